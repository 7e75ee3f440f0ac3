"""The fetches of a relay: the newest wish is the one that counts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from torchtitan_rl_ft.weights.holder.directory import Superseded
from torchtitan_rl_ft.weights.holder.fetch import Fetch, OtherPolicy, Wish
from torchtitan_rl_ft.weights.holder.shelf import Shelf
from torchtitan_rl_ft.weights.holder.versions import Version

logger = logging.getLogger(__name__)


class Fetches:
    def __init__(self, shelf: Shelf, make_fetch: Callable[[Wish], Fetch]) -> None:
        self._shelf, self._make_fetch = shelf, make_fetch
        self._wish: Wish | None = None
        self._task: asyncio.Task[Version] | None = None
        self.fetched = self.failed = 0

    async def fetch(self, wish: Wish, timeout_s: float) -> Version:
        """The version, whole and checked. The same wish again joins the fetch under way, another
        one ends it. Raises FetchFailed, Superseded, NoMemory, OSError."""
        version = self._held(wish)
        if version is not None:
            return version
        while (task := self._task) is not None and not task.done() and self._wish != wish:
            task.cancel()
            await asyncio.wait([task])
        if task is None or task.done():
            self._wish = wish
            self._task = task = asyncio.create_task(self._run(wish, timeout_s))
        await asyncio.wait([task])  # a caller that leaves does not end it
        if task.cancelled():
            raise Superseded(f"{wish.key} was given up for another version")
        return task.result()

    def counts(self) -> dict[str, int]:
        return {"done": self.fetched, "failed": self.failed}

    def _held(self, wish: Wish) -> Version | None:
        """Raises OtherPolicy."""
        try:
            version = self._shelf[wish.key]
        except KeyError:
            return None
        if version.image.layout_digest != wish.layout_digest or (
            wish.manifest_digest not in (None, version.manifest_digest)
        ):
            raise OtherPolicy(f"another policy is held here as {wish.key}")
        return version

    async def _run(self, wish: Wish, timeout_s: float) -> Version:
        start_s = time.monotonic()
        try:
            with self._shelf.using(wish.key):
                version = await self._make_fetch(wish).run(timeout_s)
        except BaseException:
            self.failed += 1
            raise
        self.fetched += 1
        version.seconds = time.monotonic() - start_s
        logger.info("%s is here after %.2f s: %s", wish.key, version.seconds, version.bytes_from)
        return version
