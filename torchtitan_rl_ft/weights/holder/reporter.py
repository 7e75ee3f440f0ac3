"""Telling the directory, every second and at each change, what this holder has."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

from torchtitan_rl_ft.run_folder import ProcessId
from torchtitan_rl_ft.weights.holder.directory import DirectoryClient, DirectoryError
from torchtitan_rl_ft.weights.holder.settings import HolderSettings, Key
from torchtitan_rl_ft.weights.holder.shelf import Shelf

logger = logging.getLogger(__name__)

REPORT_EVERY_S = 1.0
REPORT_TIMEOUT_S = 2.0


class Reporter:
    def __init__(self, settings: HolderSettings, directory: DirectoryClient, shelf: Shelf) -> None:
        me = ProcessId.current()
        self._who = {
            "name": settings.name,
            "kind": settings.kind,
            "pid": me.pid,
            "start_time": me.start_time,
            "host": socket.gethostname(),
        }
        self._directory, self._shelf = directory, shelf
        self._known: set[Key] = set()
        self._told: set[Key] = set()
        self._change = asyncio.Event()
        self._reported = asyncio.Condition()
        self._trouble = ""

    async def run(self, url: str) -> None:
        """Until it is cancelled; a directory that does not answer is asked again. `url` is where
        this holder answers."""
        while True:
            self._change.clear()
            await self._report(url)
            async with self._reported:
                self._reported.notify_all()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPORT_EVERY_S):
                    await self._change.wait()

    async def tell(self, key: Key, timeout_s: float) -> bool:
        """Report now. Whether the directory knows of `key` when this returns."""
        self._change.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._reported:
                await self._reported.wait_for(lambda: key in self._told)
        return key in self._told

    async def _report(self, url: str) -> None:
        held = self._shelf.report(self._known)
        reported = {Key(v["step"], v["token"]) for v in held}
        try:
            body = {**self._who, "url": url, "held": held}
            answer = await self._directory.report(body, REPORT_TIMEOUT_S)
        except DirectoryError as e:
            if str(e) != self._trouble:
                logger.warning("the directory of holders was not told: %s", e)
            self._trouble = str(e)
            return
        self._trouble = ""
        self._known, self._told = answer.known, reported
        self._shelf.prune(answer.keep)
