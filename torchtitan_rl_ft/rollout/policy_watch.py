"""Follows the policy that serving serves."""

from __future__ import annotations

import time
from collections.abc import Callable

from torchtitan_rl_ft.rollout.generation import (
    UNAVAILABLE_RETRY_S,
    Generator,
    ServedPolicy,
    ServingUnavailable,
    pause,
)

POLL_S = 20.0


class PolicyWatch:
    """Long-polls serving; `current` is the newest policy that an engine was seen to serve."""

    def __init__(
        self,
        generator: Generator,
        on_change: Callable[[], None],
        mono_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._generator, self._on_change, self._mono_s = generator, on_change, mono_s
        self.current: ServedPolicy | None = None
        self.seen_mono_s = 0.0
        """When it was first seen."""
        self.unavailable: str | None = None
        """Why serving did not answer the last time."""

    async def run(self) -> None:
        """Never returns; cancel it."""
        failures = 0
        while True:
            after = self.current.version if self.current is not None else -1
            try:
                found = await self._generator.policy(after, POLL_S)
            except ServingUnavailable as e:
                self.unavailable = str(e)
                await pause(failures, longest_s=UNAVAILABLE_RETRY_S)
                failures += 1
                continue
            self.unavailable, failures = None, 0
            if found is None:
                # A serving that answers before its time must not be asked in a tight loop.
                await pause(0)
                continue
            self.current, self.seen_mono_s = found, self._mono_s()
            self._on_change()
