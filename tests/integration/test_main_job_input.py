"""Wrong input and a broken machine: one error that says what, where and how to mend it, a code
other than 0, and nothing left of what was started."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from job_run import Job

from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.models.tiny import make_tiny_model

pytestmark = pytest.mark.timeout(150)


@pytest.fixture
def job(tmp_path) -> Iterator[Job]:
    with Job(tmp_path / "run") as started:
        yield started


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "model"
    make_tiny_model(folder, 0)
    return folder


def failed(job: Job, code: ExitCode, timeout_s: float = 60.0) -> str:
    """The job's one error; it must have ended with `code` and left nothing, but for the session
    of a job that was at work: that goes with `torchtitan stop`."""
    assert job.end(timeout_s=timeout_s) == code, job.story()
    assert "Traceback" not in job.err()
    if code == ExitCode.FAILED and job.session is not None:
        job.wait_for_session_alone(within_s=5)
        assert f"serving session {job.session.id} is kept for" in job.err()
        assert job.command("stop", job.session.id).returncode == ExitCode.DONE
    assert job.left() == [] and job.folder.roles() == []
    (error,) = job.error_lines()
    return error


@pytest.mark.parametrize("missing", ["tokenizer.json", "config.json", "model.safetensors", "."])
def test_model_directory_lacks_something(job, model, missing):
    """Found before anything is started: not even the run folder is made."""
    for file in [*model.glob("tokenizer*")] if "tokenizer" in missing else [model / missing]:
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    job.start("--model.flavor", "hf", "--model.hf_assets_path", str(model))
    error = failed(job, ExitCode.CONFIG)
    assert f"model.hf_assets_path = '{model}'" in error
    assert {".": "does not exist", "tokenizer.json": "no tokenizer"}.get(missing, missing) in error
    assert not job.folder.path.exists()


def test_run_folder_cannot_be_made(job):
    job.folder.path.write_text("a file")
    job.start()
    assert f"run folder {job.folder.path}: " in failed(job, ExitCode.FAILED)


def test_engines_that_refuse_their_command_line(job):
    """Told after one start of each: another would meet the same error."""
    job.start('--rollout.engine_args=["--no-such-flag"]')
    error = failed(job, ExitCode.CONFIG, timeout_s=100)
    assert error.startswith("torchtitan: error: serving: exit code 2 (the configuration")
    assert str(job.folder.log_file("serving", 1)) in error
    assert "refused its command line (rollout.engine_args)" in job.err()
    assert "unrecognized arguments: --no-such-flag" in job.err()
    assert job.attempts("engine-0") == job.attempts("engine-1") == job.attempts("serving") == 1


def test_port_in_use(job):
    """The lighthouse has to come back at its port, where another program listens by now."""
    job.start("--recovery.role_max_restarts", "1")
    job.wait_for(lambda: job.folder.role("lighthouse"), "the lighthouse", 20)
    port = httpx.URL(job.folder.role("lighthouse").url).port
    process.kill(job.process_of("lighthouse"))
    with taken(port):
        error = failed(job, ExitCode.FAILED)
    assert error.startswith("torchtitan: error: lighthouse: exit code 1 (1 restarts within")
    assert str(job.folder.log_file("lighthouse", 2)) in error
    assert f"cannot bind 127.0.0.1:{port}" in job.err()


def taken(port: int) -> socket.socket:
    """A listener on `port`, as soon as its former owner is gone."""
    while True:
        listener = socket.socket()
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            listener.close()
        else:
            listener.listen()
            return listener


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_disk_full_while_journaling(job):
    job.folder.path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(job.folder.path)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("no file system can be mounted here")
    try:
        job.start("--training.steps", "100000")
        job.wait_step(3)
        fill(job.folder.path / "filler")
        error = failed(job, ExitCode.FAILED)
        assert "No space left on device" in error or "rollout: exit code 1" in error
        # Whichever role meets it first says so in its own words.
        out = job.out()
        assert "database or disk is full" in out or "No space left on device" in out
        found = job.audit()
        assert found.problems == [] and len(found.history) >= 3
    finally:
        subprocess.run(["umount", "-l", str(job.folder.path)], check=True)


def fill(path: Path) -> None:
    with open(path, "wb", buffering=0) as f:
        while True:
            try:
                f.write(bytes(4096))
            except OSError:
                return
