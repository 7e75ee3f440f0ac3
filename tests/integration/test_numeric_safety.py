"""Numeric guards on real trainers in replica groups: what is told, what is healed, who must go."""

from __future__ import annotations

import json

import pytest
from trainer_run import TrainerRun

from torchtitan_rl_ft.exit_codes import ExitCode

pytestmark = pytest.mark.timeout(240)


def arm(run: TrainerRun, participants: int, *faults: dict) -> int:
    """Once so many groups train, let `faults` happen `after` so many steps. Returns the step."""
    run.wait_for(
        lambda: bool(run.metrics()) and run.metrics()[-1]["participants"] == participants, "groups"
    )
    now = run.metrics()[-1]["step"]
    made = [{**f, "step": now + f.pop("after")} for f in faults]
    (run.run.path / "faults.json.new").write_text(json.dumps(made))
    (run.run.path / "faults.json.new").rename(run.run.path / "faults.json")
    return now


@pytest.mark.row("I3")
@pytest.mark.row("I7")
def test_a_spike_is_told_with_its_rank_and_a_flipped_bit_is_found_and_healed(tmp_path):
    keys = {
        "recovery__check_for_spiky_loss": True,
        "recovery__check_for_large_grads": True,
        "recovery__replica_hash_interval": 5,
    }
    with TrainerRun(tmp_path / "run", steps=90, groups=2, **keys) as run:
        run.start_all(host_args=("--slow-s", "0.15"))
        flip = {"kind": "flip", "replica": 1, "after": 12}
        spike = {"kind": "scale", "replica": 1, "after": 22, "factor": 1000.0, "times": 1}
        now = arm(run, 2, flip, spike)
        assert now < 60, "all groups were there in time"
        assert run.wait_exit("trainer-0") + run.wait_exit("trainer-1") == [0, 0], run.logs()
        anomalies = run.events("anomaly")
        assert {e["step"] for e in anomalies} == {now + 22}
        assert {e["data"]["what"] for e in anomalies} == {"loss", "gradient norm"}
        assert {e["data"]["place"] for e in anomalies} == {"group 1, rank 0"}
        assert all(e["data"]["parameter"] for e in anomalies)
        found = [e for e in run.events("fault") if "differ" in e["cause"]]
        compared = (now + 11) // 5 * 5 + 5  # the first comparison of a state after the flip
        assert [e["step"] for e in found] == [compared + 1]
        assert found[0]["data"]["groups"] == ["torchtitan_ft_00001"]
        assert any(e["name"] == "trainer-1" and e["step"] == compared for e in run.events("heal"))
        assert run.probe(0)[90]["parameters"] == run.probe(1)[90]["parameters"]
        assert [m["step"] for m in run.metrics()] == list(range(1, 91))


@pytest.mark.row("I5")
def test_a_group_that_computes_wrong_results_again_and_again_is_named_and_goes(tmp_path):
    keys = {"recovery__rerun_mode": "validate_results"}
    with TrainerRun(tmp_path / "run", steps=90, groups=3, **keys) as run:
        run.start_all(host_args=("--slow-s", "0.15"))
        once = {"kind": "scale", "replica": 1, "after": 3, "factor": 1.5, "times": 1}
        always = {"kind": "scale", "replica": 2, "after": 8, "factor": 1.5}
        now = arm(run, 3, once, always)
        assert now < 70, "all groups were there in time"
        assert run.wait_exit("trainer-2") == [ExitCode.WRONG_RESULT], run.logs()
        assert run.wait_exit("trainer-0") + run.wait_exit("trainer-1") == [0, 0], run.logs()
        told = {
            (e["step"] - now, e["data"]["verdict"], e["data"]["subject"])
            for e in run.events("fault")
            if "verdict" in e["data"]
        }
        assert told == {
            (3, "transient_error", "torchtitan_ft_00001"),
            (8, "persistent_error", "torchtitan_ft_00002"),
        }
        assert [m["step"] for m in run.metrics()] == list(range(1, 91))
        assert run.probe(0)[90]["parameters"] == run.probe(1)[90]["parameters"]
