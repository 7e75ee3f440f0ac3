"""A serving role whose start fails, at any step, leaves nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from pathlib import Path
from unittest.mock import AsyncMock, patch

import pytest

from torchtitan_rl_ft.config.resolve import resolve
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.models.tiny import make_tiny_model
from torchtitan_rl_ft.observability.events import EventLog
from torchtitan_rl_ft.roles import serving
from torchtitan_rl_ft.run_folder import ProcessId
from torchtitan_rl_ft.serving.ownership import Ownership
from torchtitan_rl_ft.serving.service import ServingService
from torchtitan_rl_ft.session_folder import Owner, SessionFolder

STEPS = {
    "the record": (SessionFolder, "write"),
    "the token": (SessionFolder, "write_token"),
    "the warden": (serving.process, "spawn"),
    "the engines": (ServingService, "open"),
    "the server": (serving.server, "start"),
    "the address": (Ownership, "ready"),
}


class Broken(OSError):
    pass


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("TORCHTITAN_RL_FT_JOB", raising=False)
    return tmp_path


@pytest.mark.row("F9")
@pytest.mark.parametrize("step", STEPS)
async def test_a_start_that_fails_rolls_back(home: Path, step: str) -> None:
    run = home / "run"
    make_tiny_model(home / "model", 0)
    resolved = resolve(
        ["--job.dump_folder", str(run), "--model.hf_assets_path", str(home / "model")]
        + ["--rollout.session_id", "s"]
    )
    resolved.run_folder.token(create=True)
    before = json.dumps(resolved.values)
    rollout = resolved.sections.rollout
    launcher = serving.SGLangLauncher(rollout, home / "model", resolved.run_folder, on_cpu=True)
    events = EventLog(run / "events.jsonl", run="run", role="serving", name="serving")
    wardens: list[ProcessId] = []
    spawn = serving.process.spawn

    def noted(*args, **kwargs):
        child = spawn(*args, **kwargs)
        wardens.append(child.id)
        return child

    place, name = STEPS[step]
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(ServingService, "open", AsyncMock()))
        stack.enter_context(patch.object(serving.process, "spawn", noted))
        stack.enter_context(patch.object(place, name, side_effect=Broken(step)))
        with pytest.raises(Broken, match=step):
            await serving._serve(resolved, launcher, events)
    events.close()
    session = SessionFolder("s")
    assert session.read() is None
    await asyncio.wait_for(asyncio.gather(*map(serving.process.wait_gone, wardens)), 5.0)
    assert len(wardens) == (step in ("the engines", "the server", "the address"))
    with session.serving_lock():  # let go
        pass
    assert json.dumps(resolved.values) == before
    assert resolved.run_folder.roles() == []


@pytest.mark.row("F3")
async def test_nothing_is_started_for_a_job_that_has_died(home: Path, monkeypatch, capsys) -> None:
    """Its supervisor was killed while the role was being started, and the next job is on its way:
    that one finds the session free."""
    run = home / "run"
    make_tiny_model(home / "model", 0)
    resolved = resolve(
        ["--job.dump_folder", str(run), "--model.hf_assets_path", str(home / "model")]
        + ["--rollout.session_id", "s"]
    )
    dead = Owner(1, 1.0, socket.gethostname(), "a", str(run))  # pid 1 did not begin then
    monkeypatch.setenv("TORCHTITAN_RL_FT_JOB", dead.environment()["TORCHTITAN_RL_FT_JOB"])
    rollout = resolved.sections.rollout
    launcher = serving.SGLangLauncher(rollout, home / "model", resolved.run_folder, on_cpu=True)
    events = EventLog(run / "events.jsonl", run="run", role="serving", name="serving")
    assert await serving._serve(resolved, launcher, events) == ExitCode.FAILED
    events.close()
    assert "has died: nothing is started" in capsys.readouterr().err
    assert SessionFolder("s").read() is None
    with SessionFolder("s").serving_lock():
        pass
