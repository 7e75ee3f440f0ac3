"""Waiting for a condition of shared state inside one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable


class Changes:
    """Wakes all waiters whenever something changed; each looks for itself what did."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def next(self, timeout_s: float) -> None:
        """Until something changes, at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()

    async def wait_until(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        """True as soon as `predicate()` holds; False when it did not within `timeout_s`."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while not predicate():
            left = end - loop.time()
            if left <= 0:
                return False
            try:
                async with asyncio.timeout(left):
                    await self._event.wait()
            except TimeoutError:
                return predicate()
        return True
