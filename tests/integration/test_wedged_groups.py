"""One rank of a group of two is stopped, or hangs, in a whole job: supervisor, watcher, launchers
and trainers are real (fakes/trainers_job.py). Its group is ended, or begins again, within the
limits; the other one goes on; it comes back and is healed."""

import json
import sys
from pathlib import Path

import pytest
from job_run import SUPERVISOR, Job
from trainer_run import assert_each_step_once

from torchtitan_rl_ft.observability.events import Kind
from torchtitan_rl_ft.run_folder import write_atomic

pytestmark = [pytest.mark.timeout(400), pytest.mark.row("G1")]

TRAINERS_JOB = str(Path(__file__).parents[1] / "fakes" / "trainers_job.py")
SILENCE_S, PHASE_S = 6, 9
LIMIT_S = 120.0
SLACK_S = 15.0
"""For looks, stacks, ends of processes, and a busy machine."""

KEYS = {
    "training.steps": 100000,
    "checkpoint.interval": 100000,
    "fault_tolerance.ranks_per_group": 2,
    "fault_tolerance.process_group_timeout_ms": 3000,
    "recovery.rank_silence_timeout_s": SILENCE_S,
    "recovery.enable_ft_package": "true",
    "recovery.phase_timeouts": f'["reduce={PHASE_S}"]',
    "recovery.replica_hash_interval": 1,
}


def start(job: Job, **keys: object) -> None:
    words = [w for key, value in (KEYS | keys).items() for w in (f"--{key}", str(value))]
    folder = ("--job.dump_folder", str(job.folder.path))
    job.spawn(SUPERVISOR, sys.executable, TRAINERS_JOB, "--probed", *folder, *words)


def together(job: Job, n: int = 3) -> None:
    """`n` more steps of both groups, whose states are equal bitwise (replica_hash_interval)."""
    at = job.step()
    job.wait_for(
        lambda: sum(m["step"] > at and m["participants"] == 2 for m in job.metrics()) >= n,
        "both groups to train",
        LIMIT_S,
    )


def stall_s(job: Job, since_step: int) -> float:
    """The longest time without a commit."""
    times = [e.mono_s for e in job.events(Kind.COMMIT) if e.step >= since_step]
    return max(b - a for a, b in zip(times, times[1:], strict=False))


def wedge(job: Job, act: str, point: str, limit_s: float) -> None:
    """Rank 1 of group 1; until both groups train again. `limit_s`: within which its group has to
    be gone from the quorum of the others."""
    together(job)
    at, told = job.step(), len(job.events(Kind.FAULT, in_phase=point))
    order = {"act": act, "point": point, "step": 0, "sleep_s": 600}
    write_atomic(job.folder.path / "order-1.1", json.dumps(order).encode())
    job.wait_event(Kind.FAULT, told + 1, LIMIT_S, in_phase=point)
    together(job)
    found_s = stall_s(job, at)
    print(f"{act} in {point}: no commit for {found_s:.1f} s")
    assert found_s < limit_s + SLACK_S, job.story()


def end(job: Job) -> None:
    assert {e.phase for e in job.events(Kind.FAULT)} == {"wedged"}, job.story()
    assert {e.data["subject"] for e in job.events(Kind.FAULT)} == {"trainer-1"}
    assert job.attempts("trainer-0") == 1
    assert_each_step_once(job)
    assert not job.audit().problems
    job.interrupt()
    job.end()
    assert not job.left(within_s=10.0)


def test_a_group_with_a_wedged_rank_is_ended_and_comes_back(tmp_path):
    (tmp_path / "run").mkdir()
    with Job(tmp_path / "run") as job:
        start(job)
        wedge(job, "stop", "commit", SILENCE_S)
        wedge(job, "sleep", "reduce", PHASE_S)
        assert job.attempts("trainer-1") == 3
        assert len(job.events(Kind.RESTART, subject="trainer-1")) == 2
        end(job)


def test_in_process_only_the_wedged_rank_is_a_new_process(tmp_path):
    (tmp_path / "run").mkdir()
    with Job(tmp_path / "run") as job:
        start(job, **{"recovery.inprocess_restart": "true"})
        wedge(job, "stop", "forward_backward", SILENCE_S)
        wedge(job, "stop", "commit", SILENCE_S)
        assert job.attempts("trainer-1") == 1
        restarts = {(e.data["subject"], str(e.phase)) for e in job.events(Kind.RESTART)}
        assert restarts == {("trainer-1", "in_process"), ("trainer-1.1", "role")}
        lives = [
            [json.loads(line)["pid"] for line in path.read_text().splitlines()]
            for path in sorted(job.folder.path.glob("life-1.*.jsonl"))
        ]
        assert [len(set(pids)) for pids in lives] == [1, 3]
        assert [len(pids) for pids in lives] == [3, 3]
        end(job)
