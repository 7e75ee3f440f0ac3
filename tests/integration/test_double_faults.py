"""Two faults at once, scripted: the second one while the first is being recovered from. Real
trainers on a real ledger and a real lighthouse; a trainer and an engine together are in
test_main_job_faults.py."""

from __future__ import annotations

import json

import pytest
from test_exactly_once import KEYS, SLOWLY, Supervised, end_after
from trainer_run import TrainerRun, assert_groups_equal

from torchtitan_rl_ft.journal.ledger_report import LedgerReport

pytestmark = [pytest.mark.timeout(240), pytest.mark.row("M5")]

SAVED, DIED = 5, 8
"""The newest checkpoint, and the last step before everybody dies."""

MORE = 20
"""Steps until the end: the host has to hear of it before the last one."""

AGAIN = 7
"""The step in whose replay they die once more."""


def check_history(run: TrainerRun) -> LedgerReport:
    """Every sealed batch in its place, each sample once."""
    report = LedgerReport.of(run.run.journal)
    assert report.audit.problems == [] and report.audit.dropped == {}
    steps = [c.step for c in report.audit.history]
    assert steps == list(range(1, len(steps) + 1))
    sealed = [(e["step"], e["data"]["digest"]) for e in run.events("seal")]
    assert len(dict(sealed)) == len(sealed)  # none of them twice
    assert {(c.step, c.digest) for c in report.audit.history} <= set(sealed)
    return report


@pytest.mark.parametrize("lost", ["lighthouse", "host"])
def test_a_manager_is_lost_while_a_group_comes_back(pair, lost):
    """The lighthouse, or the role with the ledger, dies when the new group has asked for its first
    quorum and is about to take a peer's state. Nobody else ends."""
    run, supervised = pair
    supervised.wait_all_in()
    killed_mono_s = run.kill_at(1, "reduce")
    run.order(1, "transfer", act="sleep", sleep_s=2.0)
    run.start("trainer-1")
    run.wait_for(lambda: not order_of(run, 1), "the group to be about to heal")
    donor = run.processes["trainer-0"][0]
    run.kill(lost)
    run.start(lost, host_args=SLOWLY)
    supervised.wait_all_in(len(run.metrics()) + 5)
    assert donor.poll() is None
    healed = [e for e in run.events("heal") if e["mono_s"] > killed_mono_s]
    assert {e["name"] for e in healed} == {"trainer-1"}
    assert_groups_equal(run, (0, 1), at_least=5)


def order_of(run: TrainerRun, group: int) -> bool:
    return (run.run.path / f"order-{group}.0").exists()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    path = tmp_path_factory.mktemp("pair") / "run"
    with TrainerRun(path, steps=100_000, groups=2, forked=True, **KEYS) as run:
        run.start_all(host_args=SLOWLY)
        yield run, Supervised(run)
        end_after(run, MORE)
    check_history(run)


def test_trainers_die_again_while_they_replay(tmp_path):
    """All die after step 8, with a checkpoint of step 5, and again after step 6 of the replay; then
    one group dies in the replay of step 7, and heals. The steps are trained again with the sealed
    batches, bit by bit the same, and the history goes on."""
    keys = {**KEYS, "fault_tolerance__min_replica_size": 2, "checkpoint__interval": SAVED}
    with TrainerRun(tmp_path / "run", steps=100_000, groups=2, forked=True, **keys) as run:
        run.start("host", "lighthouse", host_args=SLOWLY)
        all_die_after(run, DIED)
        all_die_after(run, AGAIN - 1)
        run.start("trainer-0", "trainer-1")
        run.kill_at(1, "reduce", step=AGAIN)
        run.start("trainer-1")
        Supervised(run).wait_all_in(DIED + 3)
        end_after(run, MORE)
    report = check_history(run)
    superseded = [(s.step, s.to_step) for s in report.superseded]
    assert superseded == [(6, SAVED), (7, SAVED), (8, SAVED), (6, SAVED)]
    assert {e["step"] for e in run.events("restore")} == {SAVED}
    for step in range(SAVED + 1, DIED + 1):
        lives = [held for held in run.probes(0) + run.probes(1) if held["step"] == step]
        told = {json.dumps([held[k] for k in ("parameters", "optimizer", "lr")]) for held in lives}
        assert len(lives) >= 4 and len(told) == 1, step
    assert_groups_equal(run, (0, 1), at_least=3)


def all_die_after(run: TrainerRun, step: int) -> None:
    """Start the trainers; they die as they come to the quorum of the step after `step`."""
    for group in (0, 1):
        run.order(group, "quorum", act="kill", step=step + 1)
    run.start("trainer-0", "trainer-1")
    for group in (0, 1):
        victim = run.processes[f"trainer-{group}"][0]
        run.wait_for(lambda v=victim: v.poll() is not None, f"the kill of group {group}")
        run.kill(f"trainer-{group}")
