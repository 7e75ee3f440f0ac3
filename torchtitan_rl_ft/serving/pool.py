"""All engines of a run: opened, brought to the target version, closed together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from torchtitan_rl_ft.serving.engine import Engine
from torchtitan_rl_ft.serving.shared import Shared, Target
from torchtitan_rl_ft.serving.slot import Slot
from torchtitan_rl_ft.serving.states import EngineState


class PoolFailed(Exception):
    """Fewer engines than `rollout.min_engines` can ever serve again. `never_up`: none has come
    up at all, in spite of all tries."""

    def __init__(self, message: str, *, never_up: bool) -> None:
        super().__init__(message)
        self.never_up = never_up


class EnginePool:
    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self.slots = [Slot(i, shared) for i in range(shared.rollout.engines)]

    def open(self) -> None:
        for slot in self.slots:
            slot.open()

    async def close(self) -> None:
        await asyncio.gather(*(slot.close() for slot in self.slots))

    @property
    def engines(self) -> Iterator[Engine]:
        """The present engine of each slot that has one."""
        return (s.engine for s in self.slots if s.engine is not None)

    @property
    def target(self) -> Target | None:
        return self._shared.target

    def require(self, target: Target) -> None:
        """Have every engine, now and later, hold `target`. Those that hold another version take
        no more requests from now on."""
        self._shared.target = target
        for engine in self.engines:
            if engine.state in (EngineState.SERVING, EngineState.PAUSED):
                engine.move(EngineState.STALE, f"version {target.release.version} is required")
        self._shared.changes.notify()

    def serving(self, version: int) -> list[Engine]:
        return [e for e in self.engines if e.serves(version)]

    def all_current(self, version: int) -> bool:
        """Every live engine serves `version`, and there is one. Engines that start, or die, hold
        nobody up."""
        live = [e for e in self.engines if e.live]
        return bool(live) and all(e.serves(version) for e in live)

    async def run_until_failed(self) -> None:
        """Raises PoolFailed when the floor cannot be held; an error of a slot's own code goes
        through."""
        while True:
            await self._shared.changes.wait_until(self._broken, 3600.0)
            for slot in self.slots:
                if slot.failure is not None:
                    raise slot.failure
            self._check_floor()

    def _broken(self) -> bool:
        return self._below_floor() or any(s.failure is not None for s in self.slots)

    def _below_floor(self) -> bool:
        usable = sum(s.given_up is None for s in self.slots)
        return usable < self._shared.rollout.min_engines

    def _check_floor(self) -> None:
        if self._below_floor():
            given_up = [s.given_up for s in self.slots if s.given_up is not None]
            usable = len(self.slots) - len(given_up)
            raise PoolFailed(
                f"{usable} of {len(self.slots)} engines are left, rollout.min_engines is "
                f"{self._shared.rollout.min_engines}: {given_up[-1]}",
                never_up=not any(s.came_up for s in self.slots),
            )
