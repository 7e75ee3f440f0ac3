"""The rollout role as a process: its routes, its ends, its one-line errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import httpx
import pytest

from torchtitan_rl_ft.config.resolve import resolve
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.models.tiny import make_tiny_model
from torchtitan_rl_ft.run_folder import RunFolder

FLAGS = ["--job.config_file", "rl_ft_debug.toml"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A prepared run folder."""
    monkeypatch.setenv("TORCHTITAN_RL_FT_TOKEN", "secret")
    folder = RunFolder(tmp_path / "run")
    make_tiny_model(folder.model, 0)
    resolve([*FLAGS, "--job.dump_folder", str(folder.path)]).write()
    return folder


def start(folder: RunFolder, *flags: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "torchtitan_rl_ft", "run", "--role", "rollout"]
    return subprocess.Popen(
        [*command, "--run-folder", str(folder.path), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def wait_ready(folder: RunFolder, process: subprocess.Popen) -> str:
    for _ in range(300):
        if (role := folder.role("rollout")) is not None and role.pid == process.pid:
            return role.url
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.05)
    raise AssertionError("the role did not register")


def end(process: subprocess.Popen, timeout_s: float = 20) -> str:
    try:
        return process.communicate(timeout=timeout_s)[0]
    finally:
        process.kill()
        process.wait()


@pytest.mark.scenario("S-2")
def test_routes_need_the_token_and_tell_what_goes_on(run):
    process = start(run)
    try:
        url = wait_ready(run, process)
        for path in ("/v1/status", "/v1/ledger/status"):
            assert httpx.get(url + path).status_code == 401
        assert httpx.post(url + "/v1/stop", json={}).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        status = httpx.get(url + "/v1/status", headers=headers).json()
        assert status["phase"] == "waiting_for_policy" and status["mode"] == "sync"
        assert "has not come up" in status["serving_unavailable"]
        ledger = httpx.get(url + "/v1/ledger/status", headers=headers).json()
        assert ledger["tip"]["step"] == 0
        answer = httpx.post(url + "/v1/stop", json=["?"], headers=headers)
        assert (answer.status_code, answer.json()["error"]) == (
            400,
            "the body is not a JSON object",
        )
        asked = httpx.post(url + "/v1/stop", json={"reason": "enough"}, headers=headers)
        assert asked.json() == {}
        end(process)
        assert process.returncode == ExitCode.DONE
    finally:
        process.kill()
        process.wait()
    assert run.role("rollout") is None
    kinds = [json.loads(line)["kind"] for line in run.events.read_text().splitlines()]
    assert "ready" in kinds
    assert all("secret" not in f.read_text(errors="replace") for f in run.path.rglob("*.json*"))


def test_sigterm_ends_it_at_once(run):
    process = start(run)
    wait_ready(run, process)
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    output = end(process)
    assert process.returncode == ExitCode.INTERRUPTED and time.monotonic() - started < 5
    assert "Traceback" not in output


def last_line(output: str) -> str:
    return output.strip().splitlines()[-1]


@pytest.mark.parametrize("flaw", ["missing", "damaged"])
def test_model_directory_without_tokenizer(run, flaw):
    model = make_tiny_model(run.path / "other", 0)
    (model / "tokenizer.json").unlink()
    if flaw == "damaged":
        (model / "tokenizer.json").write_text("{}")
    process = start(run, "--model.hf_assets_path", str(model))
    output = end(process)
    assert process.returncode == ExitCode.CONFIG
    said = "holds no tokenizer" if flaw == "missing" else "tokenizer.json is not a tokenizer"
    assert said in last_line(output) and str(model) in last_line(output)
    assert "Traceback" not in output


def test_plugin_that_cannot_be_loaded(run):
    process = start(run, "--rl.reward", "no_such_module:reward")
    output = end(process)
    assert process.returncode == ExitCode.CONFIG
    assert "rl.reward = 'no_such_module:reward'" in last_line(output)
    assert "Traceback" not in output


def test_journal_folder_that_cannot_be_written(run):
    run.journal.write_text("in the way")
    process = start(run)
    output = end(process)
    assert process.returncode == ExitCode.FAILED
    assert last_line(output).startswith("torchtitan: error: rollout: cannot create")
    assert "Traceback" not in output


def test_journal_of_another_seed_is_refused(run):
    from torchtitan_rl_ft.journal.store import Journal, NewGroup
    from torchtitan_rl_ft.observability.events import EventList

    with Journal.open(run.journal, events=EventList()) as journal:
        cursor = {"size": 80, "seed": 7, "epoch": 0, "position": 3}
        journal.issue([NewGroup({"text": "12>", "answer": "12", "epoch": 0, "index": 1})], cursor)
    process = start(run)
    output = end(process)
    assert process.returncode == ExitCode.CONFIG
    assert "seed 7, this one has 0" in last_line(output) and "Traceback" not in output
