"""Has the engines profiled while the steps of `observability.profile_steps` are made."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from torchtitan_rl_ft.observability.events import EventSink, Kind
from torchtitan_rl_ft.rollout.generation import GenerationFailed, ServingUnavailable

LOOK_S = 5.0


class Profiler(Protocol):
    async def profile(self, action: str, folder: Path) -> list[int]:
        """Slots of the engines that did as asked. Raises ServingUnavailable, GenerationFailed."""
        ...


class EngineProfiles:
    """From the commit before the first step to that of the last. Once: steps that are made again
    are not profiled again, where there are traces."""

    def __init__(
        self,
        profiler: Profiler,
        steps: range,
        folder: Path,
        next_step: Callable[[], int],
        events: EventSink,
    ) -> None:
        """`folder`: of these steps, where each engine has its own; `next_step`: after the last
        commit."""
        self._profiler, self._steps, self._folder = profiler, steps, folder
        self._next_step, self._events = next_step, events
        self._over = any(folder.glob("*/*.trace.json.gz"))
        self._asked_at = 0
        self._said = ""
        self._following: asyncio.Task[None] | None = None

    async def follow(self, changed: Callable[[float], Awaitable[None]]) -> None:
        """Until the range is over. `changed`: returns at the next commit, or after seconds."""
        while not self._over:
            await self.look()
            await changed(LOOK_S)

    async def look(self) -> None:
        if self._over:
            return
        step = self._next_step()
        if step in self._steps:
            # Once a step: for engines that came up during the one before.
            if step != self._asked_at and await self._ask("start"):
                self._asked_at = step
            return
        past = step >= self._steps.stop
        if past and not self._folder.exists():  # no engine was asked
            self._over = True
        elif past or self._asked_at:
            self._over = await self._ask("stop")

    def begin(self, changed: Callable[[float], Awaitable[None]]) -> None:
        self._following = asyncio.create_task(self.follow(changed))

    def cancel(self) -> None:
        if self._following is not None:
            self._following.cancel()

    async def finish(self, limit_s: float) -> None:
        """The last step is committed. The run waits so long for traces, and ends without them."""
        self.cancel()
        if self._over or not self._asked_at:
            return
        try:
            async with asyncio.timeout(limit_s):
                await self._ask("stop")
        except TimeoutError:
            cause = f"engines have not written their profiles within {limit_s:g} s, the run ends"
            self._events.emit(Kind.WARN, cause=cause)

    async def _ask(self, action: str) -> bool:
        try:
            await self._profiler.profile(action, self._folder)
        except (ServingUnavailable, GenerationFailed) as e:
            if not self._said:  # asked again at the next look
                self._said = f"engines are not profiled: {e}"
                self._events.emit(Kind.WARN, cause=self._said)
            return False
        return True
