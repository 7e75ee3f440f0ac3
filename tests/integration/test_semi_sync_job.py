"""A whole job in windows: real engines, real trainers, one of which is killed on the way."""

import statistics

import pytest
from job_run import Job

from torchtitan_rl_ft.chaos import faults
from torchtitan_rl_ft.exit_codes import ExitCode

WINDOWS, SYNC_STEPS, GROUPS_PER_STEP, SAMPLES = 14, 4, 8, 8
KEYS = {
    "training.steps": WINDOWS,
    "training.local_batch_size": 32,
    "fault_tolerance.semi_sync_method": "diloco",
    "fault_tolerance.sync_steps": SYNC_STEPS,
    "fault_tolerance.outer_lr": 1.0,
    "fault_tolerance.outer_momentum": 0.0,
    "rl.groups_per_step": GROUPS_PER_STEP,
    "rl.samples_per_prompt": SAMPLES,
    "checkpoint.interval": 5,
}


@pytest.mark.timeout(300)
@pytest.mark.row("G9")
def test_a_job_in_windows_learns_and_loses_nothing_when_a_group_is_killed(tmp_path):
    with Job(tmp_path / "run") as job:
        job.start(*(f"--{key}={value}" for key, value in KEYS.items()))
        job.wait_step(4, timeout_s=150)
        faults.kill(job.process_of("trainer-1"))
        assert job.end(timeout_s=200) == ExitCode.DONE
        found = job.audit()
        assert found.problems == []
        assert [c.step for c in found.history] == list(range(1, WINDOWS + 1))
        per_window = GROUPS_PER_STEP * SYNC_STEPS
        assert [c.samples for c in found.history] == [per_window * SAMPLES] * WINDOWS
        assert {k: n for k, n in found.counts.items() if n} == {"trained": WINDOWS * per_window}
        # Every window is sampled by the policy after the outer sync before it.
        versions = [row["policy_version"] for row in job.metrics()]
        assert versions == sorted(set(versions))
        rewards = [row["reward/mean"] for row in job.metrics()]
        assert [row["policy_age/max"] for row in job.metrics()] == [0] * WINDOWS
        assert statistics.mean(rewards[-3:]) > statistics.mean(rewards[:3]) + 0.25, rewards
