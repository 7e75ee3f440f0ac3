"""Profilers of engines: the real serving service over fake engines, asked step by step."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from policies import tiny_model
from serving_pool import Pool, open_pool

from torchtitan_rl_ft.observability.events import EventList
from torchtitan_rl_ft.rollout import engine_profiles
from torchtitan_rl_ft.rollout.generation import ServingUnavailable
from torchtitan_rl_ft.serving.profiles import TRACES, EngineProfiles


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "m")


class Steps:
    """Rollout's side, with the pool in place of the HTTP hop."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        self.profiles = EngineProfiles(lambda: pool.service.pool.engines, pool.events)
        self.asked: list[tuple[str, list[int]]] = []
        self.events, self.step, self.folder = EventList(), 1, folder
        self.away = False
        self.rollout = self.again()

    def again(self) -> engine_profiles.EngineProfiles:
        """As after a restart of the rollout role."""
        return engine_profiles.EngineProfiles(
            self, range(3, 5), self.folder, lambda: self.step, self.events
        )

    async def profile(self, action: str, folder: Path) -> list[int]:
        if self.away:
            raise ServingUnavailable("away")
        act = self.profiles.start if action == "start" else self.profiles.stop
        self.asked.append((action, await act(folder)))
        return self.asked[-1][1]

    async def look_at(self, *steps: int) -> None:
        for self.step in steps:
            await self.rollout.look()

    def traces(self) -> list[str]:
        return sorted(p.name for p in self.folder.glob(f"*/{TRACES}"))


async def test_engines_are_profiled_once_during_the_range(model: Path, tmp_path: Path) -> None:
    async with open_pool(tmp_path / "run", model) as pool:
        await pool.publish(1)
        steps = Steps(pool, tmp_path / "profiles")
        await steps.look_at(1, 2, 3)
        assert steps.asked == [("start", [0, 1])] and not steps.traces()
        steps.rollout = steps.again()  # rollout is restarted meanwhile
        os.kill(pool.service.pool.slots[1].engine.process.id.pid, signal.SIGKILL)
        await pool.until(lambda: pool.states()[1] != "serving")
        await pool.until(lambda: pool.states() == ["serving", "serving"])
        await steps.look_at(3, 4)
        assert [slots for _, slots in steps.asked] == [[0, 1], [1], []]  # the new engine, once
        await steps.look_at(5, 6)
        assert steps.asked[-1] == ("stop", [0, 1])
        assert steps.traces() == [f"engine-{i}-TP-0.trace.json.gz" for i in (0, 1)]
        steps.rollout = steps.again()
        steps.asked.clear()
        await steps.rollout.follow(None)  # over: the steps are made again, and not profiled
        assert steps.asked == [] and not pool.seen("warn", subject="engine-0")
        assert len(await pool.generate("after")) == 2


async def test_an_engine_that_refuses_serves_on(model: Path, tmp_path: Path) -> None:
    async with open_pool(tmp_path / "run", model, engines=1) as pool:
        await pool.publish(1)
        steps = Steps(pool, tmp_path / "profiles")
        engine = pool.service.pool.slots[0].engine
        await engine.client.start_profile(str(tmp_path), "somebody", 10)
        await steps.look_at(3)
        assert steps.asked == [("start", [])]
        assert len(pool.seen("warn", subject="engine-0")) == 1
        assert pool.states() == ["serving"] and len(await pool.generate()) == 2


async def test_traces_that_cannot_be_written_are_one_warning(model: Path, tmp_path: Path) -> None:
    async with open_pool(tmp_path / "run", model, engines=1) as pool:
        await pool.publish(1)
        steps = Steps(pool, tmp_path / "profiles")
        (tmp_path / "profiles").write_text("in the way")
        await steps.look_at(3, 4)
        assert steps.asked == [("start", []), ("start", [])]
        assert len(pool.seen("warn", subject="engine-0")) == 1
        assert pool.states() == ["serving"] and len(await pool.generate()) == 2


async def test_a_serving_that_is_away_is_asked_again(model: Path, tmp_path: Path) -> None:
    async with open_pool(tmp_path / "run", model, engines=1) as pool:
        await pool.publish(1)
        steps = Steps(pool, tmp_path / "profiles")
        steps.away = True
        await steps.look_at(3, 3)
        steps.away = False
        await steps.look_at(3, 5)
        assert [a for a, _ in steps.asked] == ["start", "stop"] and len(steps.traces()) == 1
        assert len(steps.events.events) == 1


async def test_the_end_of_a_run_waits_for_traces_within_its_limit(tmp_path: Path) -> None:
    class Writing:
        """Engines that are asked to stop and do not come to an end."""

        async def profile(self, action: str, folder: Path) -> list[int]:
            if action == "stop":
                await asyncio.Event().wait()
            folder.mkdir(parents=True, exist_ok=True)
            return [0]

    events = EventList()
    profiles = engine_profiles.EngineProfiles(
        Writing(), range(3, 5), tmp_path / "profiles", lambda: 4, events
    )
    await profiles.look()
    async with asyncio.timeout(30):
        await profiles.finish(0.05)
    assert [e["cause"] for e in events.events] == [
        "engines have not written their profiles within 0.05 s, the run ends"
    ]
