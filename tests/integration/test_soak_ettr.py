"""A hundred steps of the real job, ten trainer faults: against a restart of the whole job under the
same trace. `make soak`; benchmarks/ettr_live.py has all arms."""

import pytest

from benchmarks.ettr_live import machine, measure
from benchmarks.live import tables
from benchmarks.live.arms import plan
from benchmarks.live.results import Results

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


@pytest.mark.row("M5")
def test_ten_percent_of_steps_with_a_fault_cost_less_than_under_full_restarts(tmp_path):
    wanted = ("no_fault", tables.OURS, tables.BASELINES[0])
    arms = [a for a in plan(quick=True, steps=100) if a.name in wanted]
    results = Results(tmp_path / "live.json", machine(), {"short": 100})
    assert measure(arms, results) == []
    calm, ours, restarted = results.arms
    assert (calm["strategy"], ours["strategy"], restarted["strategy"]) == (
        "no_fault",
        "role_isolated",
        "full_restart",
    )
    assert ours["trace"] == restarted["trace"] and len(ours["trace"]) == 10
    for kind in ("strict", "paper"):
        assert ours["ettr"][kind] > restarted["ettr"][kind]
    assert ours["recovery_s"]["trainer"] < 0.5 * restarted["recovery_s"]["job"]
    assert ours["wall_s"] < restarted["wall_s"] and ours["samples"]["lost"] == 0
