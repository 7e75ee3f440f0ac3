"""One time budget for all clean-up at a job's end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

RESERVE_SHARE = 0.25
"""Share of the budget that is kept back, in equal parts, for the steps that are still to come: a
step that hangs leaves each of them some time."""


@dataclass(frozen=True)
class CleanupError:
    """A step of the clean-up failed, or was not done within its limit."""

    step: str
    cause: str

    def __str__(self) -> str:
        return f"clean-up: {self.step}: {self.cause}"


class Cleanup:
    """Runs `steps` steps, one after another, within `budget_s` seconds together. Every step is
    attempted, whatever became of the earlier ones; their errors are kept and logged."""

    def __init__(
        self, budget_s: float, steps: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock, self._left = clock, steps
        self._end = clock() + budget_s
        self._reserve_s = RESERVE_SHARE * budget_s / steps
        self.errors: list[CleanupError] = []

    def limit_s(self) -> float:
        """What the next step may take; always positive."""
        later_s = self._reserve_s * max(0, self._left - 1)
        return max(self._reserve_s, self._end - self._clock() - later_s)

    async def step(self, name: str, work: Callable[[float], Awaitable[None]]) -> None:
        """Do `work`, which is told its limit in seconds and cancelled when that is over."""
        limit_s = self.limit_s()
        self._left -= 1
        try:
            async with asyncio.timeout(limit_s):
                await work(limit_s)
        except TimeoutError:
            self._failed(CleanupError(name, f"not done within {limit_s:.1f} s (cleanup_timeout)"))
        except Exception as e:  # whatever it is, the other steps are due
            logger.exception("clean-up: %s", name)
            self._failed(CleanupError(name, f"{type(e).__name__}: {e}"))

    def _failed(self, error: CleanupError) -> None:
        logger.error("%s", error)
        self.errors.append(error)
