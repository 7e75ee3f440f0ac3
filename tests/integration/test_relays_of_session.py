"""Relays of a real serving role, over real NIXL: what they hold outlives a role that is killed, and
ends with the session, whoever ends that. Engines are fakes."""

from __future__ import annotations

import base64
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import TOKEN, ServingRole, end_sessions, fake_engine_program, start_serving
from policies import write_policy

from torchtitan_rl_ft.config.weights import WeightsSection
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.rpc.client import RoleClient
from torchtitan_rl_ft.run_folder import ProcessId
from torchtitan_rl_ft.weights.holder import launch
from torchtitan_rl_ft.weights.holder.settings import HolderSettings
from torchtitan_rl_ft.weights.image import WEIGHTS_FILE, Image
from torchtitan_rl_ft.weights.manifest import read_manifest

pytest.importorskip("nixl_cu13", reason="weights over UCX need the extra ucx")

LIMIT_S = 60.0
pytestmark = pytest.mark.timeout(180)


class Run:
    """Serving roles, one after the other, and the source of a trainer that outlives them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.memory = folder, folder / "memory"
        self.memory.mkdir()
        self._engine_program = fake_engine_program(folder)
        self._roles: list[ServingRole] = []
        self.weights = {"memory_folder": str(self.memory), "piece_mb": 1}
        self._settings = HolderSettings(
            "trainer-0.0",
            "source",
            "sources",
            WeightsSection(**self.weights),
            ProcessId.current(),
            run_folder=str(folder),
        )
        log = folder / "source.log"
        self.source = launch.start(self._settings, token=TOKEN, log=log, env=dict(os.environ))

    def start(self, **rollout: Any) -> ServingRole:
        settings = {
            "engines": 1,
            "engine_python": self._engine_program,
            "engine_start_timeout_s": 20.0,
            "install_timeout_s": 20.0,
            "cleanup_timeout": 5.0,
            "weight_transport": "nixl",
            **rollout,
        }
        self._roles.append(start_serving(self.folder, weights=self.weights, **settings))
        return self._roles[-1]

    def publish(self, role: ServingRole, step: int, **fields: Any) -> dict[str, Any]:
        folder, _ = write_policy(self.folder / "trainer", role.model, step)
        manifest = read_manifest(folder)
        image = Image({n: (t.dtype, t.shape) for n, t in manifest.tensors.items()})
        self._offer(folder, image)
        body = {
            "step": manifest.step,
            "token": manifest.token,
            "layout_digest": image.layout_digest,
            "nbytes": image.nbytes,
            "wait": "all",
            "deadline_s": LIMIT_S,
        }
        return role.client.post("/v1/publish", body, deadline_s=LIMIT_S + 5)

    def _offer(self, folder: Path, image: Image) -> None:
        def url() -> str | None:
            found = launch.address(self._settings)
            return found.url if found is not None else None

        client = RoleClient("source", url, TOKEN)
        manifest = read_manifest(folder)
        key = {"step": manifest.step, "token": manifest.token}
        header = base64.b64encode(image.header).decode()
        asked = {**key, "header": header}
        file = client.post("/v1/reserve", asked, deadline_s=LIMIT_S)["file"]
        with open(file, "r+b") as f:
            f.write((folder / WEIGHTS_FILE).read_bytes())
        ranges = [[len(image.header), image.nbytes]]
        offer = {**key, "file": file, "ranges": ranges, "assets": str(folder)}
        client.post("/v1/offer", offer, deadline_s=LIMIT_S)
        client.close()

    def relay_memory(self) -> list[Path]:
        return [p for p in self.memory.glob("*/*/relay-0") if p.is_dir()]

    def close(self) -> None:
        for role in self._roles:
            if role.process.poll() is None:
                role.process.send_signal(signal.SIGTERM)
                role.process.wait(30)
            role.client.close()
        end_sessions(self.folder)
        self.source.send(signal.SIGKILL)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = Run(tmp_path)
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
    run: Run,
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


def test_memory_of_a_session_that_its_warden_ends_is_free(run: Run) -> None:
    role = run.start(retain_ttl=1.0)
    run.publish(role, 1)
    role.process.kill()
    role.process.wait(10)
    until(lambda: not run.relay_memory())


def test_settings_that_nixl_cannot_work_with_end_the_role_with_one_clear_error(run: Run) -> None:
    """A job tries NIXL before it starts anything; a role that was started by hand meets it here."""
    run.weights["ucx_devices"] = "nope0"
    role = run.start()
    assert role.process.wait(LIMIT_S) == ExitCode.FAILED
    (fault,) = role.events("fault")
    assert fault["cause"].startswith("relay-0 (weights.holders) was started 5 times within 60 s")
    assert "making a NIXL agent" in fault["cause"]
    assert "Traceback" not in role.log()
