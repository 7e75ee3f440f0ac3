"""Policy versions only grow, whatever dies. Fake engines, real serving roles."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import ServingRole, end_sessions, fake_engine_program, start_serving

from torchtitan_rl_ft.chaos import faults
from torchtitan_rl_ft.run_folder import ProcessId

ACTIONS = ["engine"] * 10 + ["serving"] * 5 + ["publish"] * 10 + ["rewind"] * 5


class Serving:
    """One serving role after the other in a run folder, and what was seen of their versions."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self._folder = folder
        self._settings = {
            "engine_python": fake_engine_program(folder),
            "engine_max_restarts": 100,
            "engine_start_timeout_s": 20.0,
            "install_timeout_s": 5.0,
            "cleanup_timeout": 5.0,
            **settings,
        }
        self.role = start_serving(folder, **self._settings)
        self.pool: list[int] = []
        self.engines: dict[int, list[int]] = defaultdict(list)  # by pid

    def look(self) -> None:
        """Note the version of the pool, and what each engine itself says it holds."""
        status = self.role.status()
        self.pool.append(status["version"])
        for engine in status["engines"]:
            if engine["pid"] is None or engine["state"] in ("starting", "retired"):
                continue
            try:
                info = httpx.get(engine["url"] + "/model_info", timeout=1.0).json()
            except (httpx.HTTPError, ValueError):
                continue
            if (version := info["weight_version"]).isdigit():
                self.engines[engine["pid"]].append(int(version))

    def process(self, slot: int) -> ProcessId | None:
        engine = self.role.engines()[slot]
        return ProcessId(engine["pid"], engine["start_time"]) if engine["pid"] else None

    def crash(self) -> None:
        self.role.process.kill()
        self.role.process.wait(10)
        self.role.client.close()

    def restart(self) -> None:
        self.role = start_serving(self._folder, **self._settings)

    def close(self) -> None:
        if self.role.process.poll() is None:
            self.role.process.send_signal(signal.SIGTERM)
            self.role.process.wait(20)
        self.role.client.close()
        end_sessions(self._folder)


@contextmanager
def serving_in(folder: Path, **settings: Any) -> Iterator[Serving]:
    serving = Serving(folder, **settings)
    try:
        yield serving
    finally:
        serving.close()


@pytest.mark.row("D2")
@pytest.mark.timeout(180)
def test_thirty_deaths_and_not_one_version_back(tmp_path: Path) -> None:
    """Engines, the serving role and the trainer (whose successor goes on from an older state) die
    in a random order, also while the last death is not over."""
    rnd = random.Random(7)
    actions = rnd.sample(ACTIONS, len(ACTIONS))
    with serving_in(tmp_path, engines=3) as serving:
        serving.role.until(lambda: "starting" not in serving.role.states())
        step, published = 0, [serving.role.publish(0)["version"]]
        for action in actions:
            if action == "engine" and (victim := serving.process(rnd.randrange(3))) is not None:
                faults.kill(victim)
            elif action == "serving":
                serving.crash()
                serving.restart()
            elif action in ("publish", "rewind"):
                step = step + 1 if action == "publish" else max(0, step - 2)
                before = serving.role.status()["version"]
                version = publish(serving.role, step)
                assert version in (before, before + 1)
                published.append(version)
            serving.look()
            time.sleep(rnd.choice([0.0, 0.1, 0.3]))
        serving.role.until(lambda: "starting" not in serving.role.states())
        last = publish(serving.role, step + 1)
        assert last == max(published) + 1
        serving.role.until_served(last)
        serving.look()
        assert serving.pool == sorted(serving.pool)
        assert published == sorted(published)
        assert len(serving.engines) > 3
        for held in serving.engines.values():
            assert held == sorted(held)
        installed: dict[int, list[int]] = defaultdict(list)
        for event in serving.role.events("install"):
            installed[event["data"]["slot"]].append(event["version"])
        assert all(versions == sorted(versions) for versions in installed.values())
        assert {v for s in serving.role.generate("end") for v in s["versions"]} == {last}


def publish(role: ServingRole, step: int) -> int:
    return role.publish(step, wait="none", scale=1 + step / 50)["version"]


@pytest.mark.row("D2")
@pytest.mark.row("D3")
def test_numbers_go_on_above_what_engines_hold_when_their_file_is_lost(tmp_path: Path) -> None:
    """Engines at {2, 3} and one without a number: the next version is 4."""
    with serving_in(tmp_path, engines=3) as serving:
        role = serving.role
        role.until(lambda: "starting" not in role.states())
        assert role.publish(0)["version"] == 1
        assert role.publish(1, scale=1.1)["version"] == 2
        fault(role, 0, sync_s=30)
        fault(role, 2, no_version=True)
        late = threading.Thread(target=role.publish, args=(2,), kwargs={"wait": "first"})
        late.start()
        role.until(lambda: role.engines()[1]["version"] == 3)
        late.join(10)
        serving.crash()
        (tmp_path / "weights" / "versions.json").unlink()
        serving.restart()
        role = serving.role
        [warning] = [e for e in role.events("warn") if "numbers go on above it" in e["cause"]]
        assert "an adopted engine holds version 3, unknown here" in warning["cause"]
        assert role.status()["version"] == 0  # nobody knows what 3 was
        assert role.publish(3, wait="first", scale=1.3)["version"] == 4


def fault(role: ServingRole, slot: int, **given: Any) -> None:
    httpx.post(role.engines()[slot]["url"] + "/fault", json=given)


@pytest.mark.row("D5")
def test_a_new_trainer_reaches_every_engine_that_survived(tmp_path: Path) -> None:
    """The serving role was replaced twice meanwhile, once before it had looked at its engines:
    all of them still owe a proof, which they give once."""
    with serving_in(tmp_path) as serving:
        serving.role.until(lambda: "starting" not in serving.role.states())
        assert serving.role.publish(0)["version"] == 1
        before = [serving.process(slot) for slot in (0, 1)]
        for _ in range(2):
            serving.crash()
            serving.restart()
        serving.role.until_served(1)
        assert counts(serving.role, "/update_weights_from_disk") == [1, 1]
        proofs = counts(serving.role, "/abort_request")  # only an engine of unknown past is asked
        assert serving.role.publish(1, scale=1.1) == {"version": 2, "installed": [0, 1]}
        assert serving.role.publish(2, scale=1.2) == {"version": 3, "installed": [0, 1]}
        assert [serving.process(slot) for slot in (0, 1)] == before
        assert counts(serving.role, "/update_weights_from_disk") == [3, 3]
        assert counts(serving.role, "/abort_request") == proofs
        assert min(proofs) >= 1


def counts(role: ServingRole, path: str) -> list[int]:
    """How often each engine was asked for `path`."""
    calls = (httpx.get(e["url"] + "/calls").json() for e in role.engines())
    return [[p for _, p in made].count(path) for made in calls]
