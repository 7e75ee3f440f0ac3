"""The wheel, installed into an environment of its own, does the job from an empty folder."""

import json
import os
import socket
import subprocess

import httpx
import pytest
from installed_wheel import build_wheel, install_wheel

from torchtitan_rl_ft.observability.events import Kind, read_events
from torchtitan_rl_ft.run_folder import ProcessId

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Path of the installed wheel's `torchtitan`."""
    base = tmp_path_factory.mktemp("wheel")
    return install_wheel(build_wheel(base), base / "venv") / "torchtitan"


@pytest.fixture
def empty(tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


def run(command, folder, *arguments):
    env = {k: v for k, v in os.environ.items() if not k.startswith("TORCHTITAN_RL_FT_")}
    env["XDG_STATE_HOME"] = str(folder.parent / "state")
    env.pop("PYTHONPATH", None)  # the wheel's own package is meant
    return subprocess.run(
        [str(command), *arguments], cwd=folder, env=env, capture_output=True, text=True
    )


def test_full_check(command, empty):
    done = run(command, empty, "check", "rl_ft.toml")
    assert done.returncode == 0, done.stderr


def test_debug_job_leaves_its_run_folder_and_nothing_else(command, empty):
    done = run(command, empty, "run", "--job.config_file", "rl_ft_debug.toml")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    folder = empty / "outputs" / "rl_ft_debug"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert "outcome    complete (exit code 0)" in done.stdout
    assert (folder / "reward.png").exists()
    events = list(read_events(folder / "events.jsonl"))
    spawned = [e.data for e in events if e.kind is Kind.SPAWN]
    members = ["engine-0", "engine-1", "lighthouse", "relay-0", "rollout", "serving"]
    assert sorted(d["subject"] for d in spawned) == [*members, "trainer-0", "trainer-1"]
    assert not any(ProcessId(d["pid"], d["start_time"]).alive() for d in spawned)
    urls = [httpx.URL(e.data["url"]) for e in events if e.kind is Kind.READY]
    assert len(urls) == len(members)
    for url in urls:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((url.host, url.port), timeout=5).close()
    assert not list(empty.parent.rglob("*.token"))
