"""Numeric guards on real trainers in replica groups: what is told, what is healed, who must go,
what stops."""

from __future__ import annotations

import json

import pytest
from trainer_run import TrainerRun, steps_of

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
        spike = {"kind": "scale", "replica": 1, "after": 22, "factor": 1e3, "plus": 1e3, "times": 1}
        now = arm(run, 2, flip, spike)
        assert now < 60, "all groups were there in time"
        assert run.wait_exit("trainer-0") + run.wait_exit("trainer-1") == [0, 0], run.logs()
        anomalies = run.events("anomaly")
        # The first step from then on in which group 1 took part; it may have been late for one.
        taken = (m["step"] for m in run.metrics() if m["participants"] == 2)
        assert {e["step"] for e in anomalies} == {next(s for s in taken if s >= now + 22)}
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


NAN_STEP = 3
NAN = {"kind": "scale", "replica": 0, "step": NAN_STEP, "factor": float("nan")}
KEEP_ALL = {"checkpoint__interval": 1, "checkpoint__keep_latest_k": 0, "metrics__log_freq": 10}


def end_at(run: TrainerRun, fault: dict, code: int) -> None:
    """Everything ends by the fault, and nothing of its step or a later one is left."""
    (run.run.path / "faults.json").write_text(json.dumps([fault]))
    run.start_all()
    assert run.wait_exit("trainer-0") == [code] * run.ranks, run.logs()
    for made in ("publish", "checkpoint"):
        assert max(e["step"] for e in run.events(made)) == NAN_STEP - 1, made
    assert not list(run.run.weights.glob(f"step-{NAN_STEP}-*"))


@pytest.mark.row("I1")
@pytest.mark.scenario("N-1")
def test_a_nan_on_one_rank_stops_all_ranks_of_its_group_before_the_update(tmp_path):
    """In a step that is not logged."""
    keys = {**KEEP_ALL, "recovery__max_numeric_refusals": 2}
    with TrainerRun(tmp_path / "run", steps=12, groups=1, ranks=2, forked=True, **keys) as run:
        end_at(run, {**NAN, "rank": 1}, ExitCode.NUMERIC)
        assert steps_of(run) == [1, 2]
        assert max(run.probe(0, rank=0)) == max(run.probe(0, rank=1)) == NAN_STEP - 1
        refused = [e for e in run.events("refuse") if e["step"] == NAN_STEP]
        assert refused and all("1 rank(s) are not finite" in e["cause"] for e in refused)


@pytest.mark.row("I7")
def test_without_the_guard_what_is_not_finite_is_not_published_all_the_same(tmp_path):
    keys = {**KEEP_ALL, "recovery__check_for_nan_in_loss_and_grad": False}
    with TrainerRun(tmp_path / "run", steps=12, groups=1, forked=True, **keys) as run:
        end_at(run, NAN, ExitCode.FAILED)
        assert steps_of(run) == [1, 2, NAN_STEP] and not run.events("refuse")
        assert (
            "holds NaN or infinity; not published" in (run.run.path / "trainer-0.0.log").read_text()
        )


@pytest.mark.scenario("N-1")
def test_an_update_that_overflows_is_neither_published_nor_saved(tmp_path):
    """Loss and gradients are finite up to the update: only what it made is not."""
    keys = {
        "optimizer__lr": 1e40,
        "lr_scheduler__warmup_steps": 0,
        "checkpoint__interval": 1,
        "fault_tolerance__min_replica_size": 2,  # one publishes, the other one would save
    }
    with TrainerRun(tmp_path / "run", steps=12, groups=2, forked=True, **keys) as run:
        run.start_all()
        run.wait_for(
            lambda: any("parameters are not finite" in e["cause"] for e in run.events("fault")),
            "the save that is refused",
        )
        assert not run.events("publish") and not run.events("checkpoint")
