"""Relays of a real serving role, over real NIXL: what they hold outlives a role that is killed, and
ends with the session, whoever ends that. Engines are fakes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ServingRole, fake_engine_program
from relay_run import LIMIT_S, RelayRun

from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.run_folder import ProcessId

pytest.importorskip("nixl_cu13", reason="weights over UCX need the extra ucx")
pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RelayRun]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = RelayRun(
        tmp_path,
        engines=1,
        engine_python=fake_engine_program(tmp_path),
        engine_start_timeout_s=20.0,
        install_timeout_s=20.0,
        cleanup_timeout=5.0,
    )
    try:
        yield made
    finally:
        made.close()


def relay_of(role: ServingRole) -> dict[str, Any]:
    (relay,) = role.status()["relays"]
    return relay


def until(found: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    end = time.monotonic() + limit_s
    while not (value := found()):
        assert time.monotonic() < end, f"not within {limit_s} s"
        time.sleep(0.05)
    return value


@pytest.mark.row("D2")
@pytest.mark.row("D5")
def test_a_killed_role_leaves_the_version_in_memory_and_the_next_one_goes_on_with_it(
    run: RelayRun,
) -> None:
    first = run.start()
    assert run.publish(first, 1)["version"] == 1
    assert first.status()["transport"] == "nixl"
    engine, relay = first.engines()[0], relay_of(first)
    first.process.kill()
    first.process.wait(10)
    dead = ProcessId(relay["pid"], relay["start_time"])
    until(lambda: not dead.alive())  # it ends with its parent
    assert run.relay_memory(), "the session goes on"
    second = run.start()
    assert second.status()["version"] == 1, "it never falls back"
    second.until_served(1)
    assert second.engines()[0]["pid"] == engine["pid"], "adopted, and proved"
    assert not second.events("fault")
    assert run.publish(second, 2)["version"] == 2
    os.kill(relay_of(second)["pid"], signal.SIGKILL)
    second.until(lambda: (relay_of(second)["restarts"], relay_of(second)["holds"]) == (1, [2]))
    os.kill(second.engines()[0]["pid"], signal.SIGKILL)
    second.until(lambda: second.engines()[0]["restarts"] == 1)
    second.until_served(2)
    assert second.client.post("/v1/shutdown", {}, deadline_s=20) == {}
    assert second.process.wait(10) == ExitCode.DONE
    assert not run.relay_memory(), "it ended with the session"


def test_memory_of_a_session_that_its_warden_ends_is_free(run: RelayRun) -> None:
    role = run.start(retain_ttl=1.0)
    run.publish(role, 1)
    role.process.kill()
    role.process.wait(10)
    until(lambda: not run.relay_memory())


def test_settings_that_nixl_cannot_work_with_end_the_role_with_one_clear_error(
    run: RelayRun,
) -> None:
    """A job tries NIXL before it starts anything; a role that was started by hand meets it here."""
    run.weights["ucx_devices"] = "nope0"
    role = run.start()
    assert role.process.wait(LIMIT_S) == ExitCode.FAILED
    (fault,) = role.events("fault")
    assert fault["cause"].startswith("relay-0 (weights.holders) was started 5 times within 60 s")
    assert "making a NIXL agent" in fault["cause"]
    assert "Traceback" not in role.log()
