"""A job without a supervisor: each role started by hand, one trainer by TorchTitan's own entry."""

import os
import signal
import subprocess
import sys
import time

import pytest

from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.observability.jsonl import read_jsonl
from torchtitan_rl_ft.run_folder import RUN_ENV, TOKEN_ENV, ProcessId, RunFolder

STEPS = 3


@pytest.fixture
def by_hand(tmp_path):
    """Starts commands in the run folder's environment; ends their trees afterwards."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("TORCHTITAN_RL_FT_")}
    env |= {"XDG_STATE_HOME": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}
    started = []

    def start(*command, **more):
        log = open(tmp_path / f"{len(started)}.log", "w")  # noqa: SIM115
        popen = subprocess.Popen(
            [sys.executable, "-m", *command],
            env={**env, **more},
            cwd=tmp_path,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        popen.text = lambda: (tmp_path / log.name).read_text()
        started.append(popen)
        return popen

    yield start
    for popen in started:
        if popen.poll() is None:
            for one in process.freeze([ProcessId.of(popen.pid)]):
                process.kill(one)
        popen.wait()


def role_command(folder, role, *more):
    command = ["torchtitan_rl_ft", "run", "--role", role, "--job.config_file", "rl_ft_debug.toml"]
    return [*command, "--job.dump_folder", str(folder), f"--training.steps={STEPS}", *more]


@pytest.mark.timeout(120)
def test_trainer_says_which_role_is_missing(by_hand, tmp_path):
    environment = {RUN_ENV: str(tmp_path / "none"), "RANK": "0", "WORLD_SIZE": "1"}
    trainer = by_hand(
        "torchtitan.train", "--module", "torchtitan_rl_ft", "--config", "rl_ft_debug", **environment
    )
    assert trainer.wait(timeout=100) != 0
    assert f"run folder {tmp_path / 'none'} does not exist" in trainer.text()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_roles_started_by_hand_do_the_job(by_hand, tmp_path):
    folder = RunFolder(tmp_path / "run")
    services = [by_hand(*role_command(folder.path, role)) for role in ("lighthouse", "serving")]
    rollout = by_hand(*role_command(folder.path, "rollout"))
    first = by_hand(*role_command(folder.path, "trainer", "--fault_tolerance.replica_id=0"))
    deadline = time.monotonic() + 60
    while len(folder.roles()) < 3 and time.monotonic() < deadline:
        time.sleep(0.2)
    second = by_hand(
        *("torch.distributed.run", "--standalone", "--nproc-per-node=1", "-m"),
        *("torchtitan.train", "--module", "torchtitan_rl_ft", "--config", "from_run"),
        **{RUN_ENV: str(folder.path), "TORCHTITAN_RL_FT_REPLICA_ID": "1"},
    )
    for role in (rollout, first, second):
        assert role.wait(timeout=180) == 0, role.text()[-3000:]
    for service in services:
        service.send_signal(signal.SIGTERM)
    for service in services:
        assert service.wait(timeout=30) == 0, service.text()[-3000:]
    assert [row["step"] for row in read_jsonl(folder.metrics)] == [1, 2, 3]
    assert TOKEN_ENV not in folder.resolved_config.read_text()
