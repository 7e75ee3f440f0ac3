"""Numeric guards on real trainers in replica groups: what is told, what is healed, who must go."""

from __future__ import annotations

import json

import pytest
from trainer_run import TrainerRun

from torchtitan_rl_ft.exit_codes import ExitCode

pytestmark = pytest.mark.timeout(180)


def faulty(tmp_path, *faults, steps, groups, **keys) -> TrainerRun:
    run = TrainerRun(tmp_path / "run", steps=steps, groups=groups, **keys)
    run.env["TRAINER_FAULTS"] = json.dumps(list(faults))
    return run


@pytest.mark.row("I3")
@pytest.mark.row("I7")
def test_a_spike_is_told_with_its_rank_and_a_flipped_bit_is_found_and_healed(tmp_path):
    keys = {
        "recovery__check_for_spiky_loss": True,
        "recovery__check_for_large_grads": True,
        "recovery__replica_hash_interval": 5,
        "fault_tolerance__min_replica_size": 2,
    }
    faults = (
        {"kind": "flip", "replica": 1, "step": 12},
        {"kind": "scale", "replica": 1, "step": 22, "factor": 1000.0, "times": 1},
    )
    with faulty(tmp_path, *faults, steps=26, groups=2, **keys) as run:
        run.start_all()
        assert run.wait_exit("trainer-0") + run.wait_exit("trainer-1") == [0, 0], run.logs()
        anomalies = run.events("anomaly")
        assert {e["step"] for e in anomalies} == {22}
        assert {e["data"]["what"] for e in anomalies} == {"loss", "gradient norm"}
        assert {e["data"]["place"] for e in anomalies} == {"group 1, rank 0"}
        found = [e for e in run.events("fault") if "differ" in e["cause"]]
        assert [e["step"] for e in found] == [16], "the comparison after the flip at step 12"
        assert found[0]["data"]["groups"] == ["torchtitan_ft_00001"]
        assert any(e["name"] == "trainer-1" and e["step"] >= 15 for e in run.events("heal"))
        left, right = run.probe(0), run.probe(1)
        assert left[26]["parameters"] == right[26]["parameters"]
        assert [m["step"] for m in run.metrics()] == list(range(1, 27))


@pytest.mark.row("I5")
def test_a_group_that_computes_wrong_results_again_and_again_is_named_and_goes(tmp_path):
    keys = {"recovery__rerun_mode": "validate_results", "fault_tolerance__min_replica_size": 2}
    faults = (
        {"kind": "scale", "replica": 1, "step": 5, "factor": 1.5, "times": 1},
        {"kind": "scale", "replica": 2, "step": 9, "factor": 1.5},
    )
    with faulty(tmp_path, *faults, steps=14, groups=3, **keys) as run:
        run.start_all()
        assert run.wait_exit("trainer-2") == [ExitCode.WRONG_RESULT], run.logs()
        assert run.wait_exit("trainer-0") + run.wait_exit("trainer-1") == [0, 0], run.logs()
        told = {
            (e["step"], e["data"]["verdict"], e["data"]["subject"])
            for e in run.events("fault")
            if "verdict" in e["data"]
        }
        assert (5, "transient_error", "torchtitan_ft_00001") in told
        assert {t[1:] for t in told if t[0] == 9} == {("persistent_error", "torchtitan_ft_00002")}
        assert [m["step"] for m in run.metrics()] == list(range(1, 15))
        left, right = run.probe(0), run.probe(1)
        assert left[14]["parameters"] == right[14]["parameters"]
