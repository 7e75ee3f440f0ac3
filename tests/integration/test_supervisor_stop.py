"""The debug job, stopped while its roles and engines come up: nothing of it is left."""

import os
import signal
import subprocess
import sys
import time

import pytest

from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.host.footprint import SHM, Footprint
from torchtitan_rl_ft.observability.events import Kind, read_events
from torchtitan_rl_ft.run_folder import ProcessId, RunFolder

pytestmark = pytest.mark.timeout(120)

MEMBERS = 8
"""Lighthouse, serving, its relay, two engines, rollout, two trainers."""


@pytest.fixture
def job(tmp_path, request):
    """A started debug job; what it holds is watched."""
    folder = RunFolder(tmp_path / "run")
    command = [sys.executable, "-m", "torchtitan_rl_ft", "run", "rl_ft_debug.toml"]
    supervisor = subprocess.Popen(
        [*command, "--job.dump_folder", str(folder.path), *getattr(request, "param", ())],
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")},
        stderr=subprocess.PIPE,
        text=True,
    )
    supervisor.folder = folder
    supervisor.footprint = Footprint(before=frozenset(SHM.glob("*")))
    yield supervisor
    if supervisor.poll() is None:
        supervisor.kill()
        supervisor.wait()


def run_until(job, phase, n, timeout_s=60.0):
    """Until `n` events of a kind are there, and half a second more."""
    me = ProcessId.of(job.pid)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        job.footprint.observe(process.descendants(me))
        events = read_events(job.folder.events) if job.folder.events.exists() else []
        if sum(e.kind is phase for e in events) >= n:
            time.sleep(0.5)
            job.footprint.observe(process.descendants(me))
            return
        time.sleep(0.1)
    raise AssertionError(f"no {n} {phase} events")


def left_after(job, timeout_s):
    deadline = time.monotonic() + timeout_s
    while (left := job.footprint.leftovers()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


@pytest.mark.parametrize(("kind", "n"), [(Kind.RUN, 1), (Kind.SPAWN, MEMBERS)])
def test_interrupted_start_is_clean(job, kind, n):
    run_until(job, kind, n)
    job.send_signal(signal.SIGINT)
    _, err = job.communicate(timeout=30)
    assert job.returncode == ExitCode.INTERRUPTED
    assert err.splitlines()[-1] == "torchtitan: error: stopped by SIGINT"
    assert job.footprint.leftovers() == [] and job.folder.roles() == []


@pytest.mark.scenario("Z-1")
@pytest.mark.parametrize("job", [("--rollout.retain_ttl", "0")], indirect=True)
def test_killed_supervisor_takes_roles_and_engines_with_it(job):
    run_until(job, Kind.SPAWN, MEMBERS)
    assert len(job.footprint.processes) >= MEMBERS
    job.kill()
    job.wait()
    assert left_after(job, 5.0) == []
