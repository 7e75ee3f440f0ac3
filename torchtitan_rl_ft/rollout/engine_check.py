"""The check of all engines between the end of a rollout and what is made of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from torchtitan_rl_ft.observability.events import EventSink, Kind
from torchtitan_rl_ft.rollout.generation import GenerationFailed, ServingUnavailable

VERDICT_S = 1.0
"""Beyond the limit of the probes, for the verdict and what follows from it."""

LONGEST_S = 30.0
"""A batch waits no longer for a verdict. An engine that is silent for so long takes no requests
any more, and its check goes on without us: the trainer need not stand still for it."""


class Checker(Protocol):
    async def check(self, timeout_s: float) -> list[int]:
        """Slots of engines found dead, and gone. Raises ServingUnavailable, GenerationFailed."""
        ...

    async def release(self, timeout_s: float) -> list[int]:
        """Slots of engines that gave their memory up. Raises as `check`."""
        ...


class EngineCheck:
    """Asks serving to look at its engines, and, colocated, to have them give their memory up: the
    trainers compute as soon as they see the batch. Never fails: a serving that is away or silent
    costs `limit_s` at most, for each of the two, and one warning, not the batch."""

    def __init__(
        self,
        checker: Checker,
        events: EventSink,
        health_check_timeout_s: float,
        on_done: Callable[[], None],
        mono_s: Callable[[], float] = time.monotonic,
        *,
        colocated: bool = False,
    ) -> None:
        self._checker, self._events, self._colocated = checker, events, colocated
        self._on_done, self._mono_s = on_done, mono_s
        self.limit_s = min(health_check_timeout_s + VERDICT_S, LONGEST_S)
        self.took_s = 0.0
        """Of the last one."""
        self._task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        began = self._mono_s()
        try:
            await self._checker.check(self.limit_s)
        except (ServingUnavailable, GenerationFailed) as e:
            self._events.emit(Kind.WARN, cause=f"engines not checked: {e}")
        if self._colocated:
            try:
                await self._checker.release(self.limit_s)
            except (ServingUnavailable, GenerationFailed) as e:
                self._events.emit(Kind.WARN, cause=f"memory of engines not released: {e}")
        self.took_s = self._mono_s() - began

    def done(self) -> bool:
        """True when a check has ended that an earlier call began; the next call begins another.
        `on_done` is called when it is time to ask again."""
        if self._task is None:
            self._task = asyncio.create_task(self.run())
            self._task.add_done_callback(lambda _: self._on_done())
        if not self._task.done():
            return False
        task, self._task = self._task, None
        task.result()
        return True

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
