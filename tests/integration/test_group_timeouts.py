"""Limits of the collectives inside a group, and of quorums that could never commit."""

from __future__ import annotations

import pickle

import pytest
from trainer_run import TrainerRun

from torchtitan_rl_ft.exit_codes import ExitCode

pytestmark = pytest.mark.timeout(240)

TRAIN_TIMEOUT_S = 3
STALL_S = 6


@pytest.mark.row("A7")
def test_a_stalled_rank_is_waited_for_in_the_first_step_only(tmp_path):
    keys = {
        "comm__init_timeout_seconds": 60,
        "comm__train_timeout_seconds": TRAIN_TIMEOUT_S,
        "fault_tolerance__process_group_timeout_ms": 2000,
    }
    with TrainerRun(tmp_path / "run", steps=100_000, groups=1, ranks=2, **keys) as run:
        stall = {"act": "sleep", "point": "forward_backward", "rank": 1, "sleep_s": STALL_S}
        run.order(0, **stall, step=1)
        run.start_all()
        run.wait_step(2)
        commits = run.events("commit")
        begun_s = run.events("quorum")[0]["mono_s"]
        assert commits[0]["mono_s"] - begun_s > STALL_S
        assert not run.events("refuse")

        run.order(0, **stall)
        run.wait_for(lambda: not (run.run.path / "order-0.1").exists(), "the second stall")
        stalled_wall_s = run.events("phase")[-1]["wall_s"]
        assert run.wait_exit("trainer-0") == [1, 1], run.logs()
        log = (run.run.path / "trainer-0.0.log").read_text()
        assert f"Timed out waiting {TRAIN_TIMEOUT_S * 1000}ms" in log
        [folder] = (run.run.path / "comm_traces" / "trainer-0" / "attempt_1").glob("quorum_*")
        files = [folder / f"rank_{rank}" for rank in range(2)]
        waited_s = files[0].stat().st_mtime - stalled_wall_s
        assert TRAIN_TIMEOUT_S - 0.5 < waited_s < STALL_S + 4  # 4: a loaded machine
        # Rank 0 is in a collective that rank 1 has not come to.
        records = [pickle.loads(file.read_bytes())["entries"] for file in files]
        assert records[0][-1]["profiling_name"].startswith("gloo:")
        assert records[0][-1]["record_id"] > records[1][-1]["record_id"]


@pytest.mark.scenario("Q-2")
def test_a_lighthouse_with_a_smaller_minimum_is_refused_at_once(tmp_path):
    """Started by hand with another configuration: no endless round of refused commits."""
    keys = {"fault_tolerance__min_replica_size": 2}
    other = ["--fault_tolerance.min_replica_size", "1"]
    other += ["--fault_tolerance.lighthouse_min_replicas", "1"]
    with TrainerRun(tmp_path / "run", steps=10, groups=2, **keys) as run:
        run.start("host")
        run.lighthouse_args = other
        run.start("lighthouse")
        run.start("trainer-0")
        assert run.wait_exit("trainer-0") == [ExitCode.CONFIG], run.logs()
        assert "quorum of 1 group(s), but fault_tolerance.min_replica_size is 2" in run.logs()
        assert run.metrics() == [] and not run.events("refuse")


@pytest.mark.row("G5")
@pytest.mark.scenario("Q-3")
@pytest.mark.parametrize(("retries", "timeout_s"), [(59, 60), (0, 5)])
def test_a_lighthouse_that_dies_is_waited_for_within_the_limits(tmp_path, retries, timeout_s):
    keys = {
        "fault_tolerance__quorum_timeout_s": timeout_s,
        "fault_tolerance__quorum_retries": retries,
    }
    with TrainerRun(tmp_path / "run", steps=100_000, groups=1, **keys) as run:
        run.start_all()
        run.wait_step(2)
        run.kill("lighthouse")
        if retries:
            run.wait_for(lambda: run.events("phase")[-1]["phase"] == "quorum", "the wait for it")
            run.start("lighthouse")
            run.wait_step(len(run.metrics()) + 3)
            assert run.processes["trainer-0"][0].poll() is None
        else:
            assert run.wait_exit("trainer-0", timeout_s=40) == [ExitCode.FAILED]
            log = (run.run.path / "trainer-0.0.log").read_text()
            assert "torchtitan: error: no quorum within" in log and "quorum_retries = 0" in log
