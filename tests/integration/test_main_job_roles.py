"""Roles started one by one, as a scheduler does it, one trainer through TorchTitan's own entry
point."""

from __future__ import annotations

import signal
import sys

import pytest
from job_run import Job

from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.run_folder import RUN_ENV, RunFolder

pytestmark = pytest.mark.timeout(180)

STEPS = 6  # of rl_ft_debug.toml
TITAN = ("-m", "torchtitan.train", "--module", "torchtitan_rl_ft", "--config", "rl_ft_debug")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1")


def registered(folder: RunFolder, *names: str) -> bool:
    found = (folder.role(name) for name in names)
    return all(role is not None and role.alive() for role in found)


def test_by_hand_and_by_torchtitans_entry_point(tmp_path):
    with Job(tmp_path / "run") as job:
        for role in ("lighthouse", "serving", "rollout"):
            job.start_role(role)
        job.start_role("trainer", "--fault_tolerance.replica_id", "1", name="trainer-1")
        services = ("lighthouse", "serving", "rollout")
        job.wait_for(lambda: registered(job.folder, *services), "services", 30)
        job.spawn("torchrun", *TORCHRUN, *TITAN, **{RUN_ENV: str(job.folder.path)})
        for name in ("torchrun", "trainer-1", "rollout"):
            assert job.end(name, timeout_s=100) == ExitCode.DONE, job.story()
        for name in ("serving", "lighthouse"):
            job.processes[name].send_signal(signal.SIGTERM)
            assert job.end(name, timeout_s=30) == ExitCode.DONE, job.story()
        assert job.left() == []
        assert [row["step"] for row in job.metrics()] == list(range(1, STEPS + 1))
        assert job.metrics()[-1]["participants"] == 2
        assert job.audit().problems == [] and len(job.audit().history) == STEPS


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (None, f"name its folder in {RUN_ENV}"),
        ("", "role rollout of the run in {folder} never came up: start it with"),
    ],
)
def test_torchtitans_entry_point_says_what_is_missing(tmp_path, run, message):
    with Job(tmp_path / "run") as job:
        env = {}
        if run is not None:
            job.folder.path.mkdir()
            job.folder.token(create=True)
            env = {RUN_ENV: str(job.folder.path)}
        job.spawn("train", sys.executable, *TITAN, **env)
        assert job.end("train") != ExitCode.DONE
        last = job.err("train").strip().splitlines()[-1]
        assert message.format(folder=job.folder.path) in last
