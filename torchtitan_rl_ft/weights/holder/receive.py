"""The receiving side: memory that one holder may write into, and what of it came whole."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.weights.holder.agent import Agent, AgentAhead, NixlError
from torchtitan_rl_ft.weights.holder.client import NOTHING_WRITTEN, HolderError, Offer
from torchtitan_rl_ft.weights.holder.mapping import Mappings
from torchtitan_rl_ft.weights.holder.pace import Pace
from torchtitan_rl_ft.weights.holder.push import range_of
from torchtitan_rl_ft.weights.holder.versions import Version
from torchtitan_rl_ft.weights.pieces import Piece, Range, merge

logger = logging.getLogger(__name__)

POLL_S = 0.0002
"""While the holder connects: it needs a few answers, one after the other."""

LATER_POLL_S = 0.001
"""When pieces come: each look costs as much as a tenth of the copy of a piece."""

CLOSE_DELAY_S = 0.1
"""Making and dropping agents takes 15 ms, in which the library lets no other thread go on. After a
push that ended well there is better to do: finish the version, announce it, hand it on."""

ADDRESSES_LOST = 1 << 46
"""Bytes of addresses that pushes which were given up may take for good: half of what a process has
on x86-64."""


class ReceiveFailed(Exception):
    """A holder did not bring what it was asked for."""


class WornOut(Exception):
    """Too many pushes were given up: a new process has all its addresses again."""


class Landing:
    """A file's memory, open to one holder for one push: an agent and a mapping of their own.

    Raises NixlError, OSError.
    """

    def __init__(
        self, agents: AgentAhead, mappings: Mappings, path: Path, nbytes: int, ranges: list[Range]
    ) -> None:
        self._agents, self._mappings = agents, mappings
        self._mapping = mappings.take(path, nbytes)
        try:
            self._agent = agents.take()
            self._agent.register(self._mapping.address, merge(ranges))
            self._metadata = self._agent.metadata()
        except NixlError:
            mappings.keep(self._mapping)
            raise
        self._closing = threading.Event()

    def offer(self, nixl: str) -> Offer:
        return Offer(self._metadata, self._mapping.address, self._mapping.nbytes, nixl)

    def watch(self, arrived: Callable[[Range], None]) -> None:
        """Call `arrived` for each piece that is written, until `close` or `abandon`. Blocks."""
        pace = Pace(POLL_S)
        while not self._closing.is_set():
            pace.begin()
            notes = self._agent.notes()
            for note in notes:
                arrived(_piece(note))
            if notes:
                pace.nap_s = LATER_POLL_S
            else:
                pace.wait()

    def stop_watching(self) -> None:
        self._closing.set()

    def close(self) -> None:
        """After a push that ended well, and the end of `watch`."""
        self._agent.drop()
        self._mappings.keep(self._mapping)
        self._agents.prepare()

    def detach(self) -> None:
        """From now on nothing that is written here reaches the file."""
        self._mapping.detach()

    def abandon(self) -> None:
        """After `detach`, and the end of `watch`. The order matters: into inaccessible pages the
        agent itself would write (UCX copies small pieces that come by TCP) and end the process."""
        self._agent.drain()
        self._agent.drop()
        self._mapping.quarantine()
        self._agents.prepare()


def _piece(note: bytes) -> Range:
    """Raises NixlError."""
    try:
        return range_of(note)
    except ValueError:
        raise NixlError(f"a note that names no piece: {note!r:.80}") from None


class Receiver:
    """`pushes` has a thread for each of `at_once` pushes, and some more; `checks` hashes."""

    def __init__(
        self,
        make_agent: Callable[[], Agent],
        nixl: str,
        stall_timeout_s: float,
        pushes: Executor,
        checks: Executor,
        at_once: int,
        addresses_lost: int = ADDRESSES_LOST,
    ) -> None:
        self._nixl = nixl
        self._turns = asyncio.Semaphore(at_once)
        self._agents, self._mappings = AgentAhead(make_agent, pushes), Mappings()
        self.stall_timeout_s = stall_timeout_s
        self._pushes, self._checks = pushes, checks
        self.abandoned = 0
        self._addresses_left = addresses_lost
        self._worn = asyncio.Event()
        self._endings: set[asyncio.Future[None]] = set()
        self._open: set[Landing] = set()

    def prepare(self) -> None:
        """So that the first push need not wait for what the next ones find."""
        self._agents.prepare()

    def to_json(self) -> dict[str, Any]:
        """What takes descriptors now: pushes whose memory is still open, and whether the agent of
        the next one is there."""
        return {"open": len(self._open), "agent_ahead": self._agents.is_ready}

    async def wear(self) -> None:
        """For as long as it can be used. Raises WornOut."""
        await self._worn.wait()
        raise WornOut(f"{self.abandoned} pushes were given up, and took most of its addresses")

    async def receive(
        self,
        version: Version,
        parts: Sequence[Piece],
        ask: Callable[[Offer], Awaitable[None]],
        checked: Callable[[Piece], None],
    ) -> None:
        """Have a holder write `parts` of `version`: `ask` it, which ends when all are written.
        `checked` is called for each piece whose bytes are those of its digest; they stay, whatever
        comes later.

        Raises ReceiveFailed, HolderError (the holder's own words), NixlError, OSError.
        """
        async with self._turns:  # nobody writes before there is a thread that looks for it
            await self._receive(version, parts, ask, checked)

    async def _receive(
        self,
        version: Version,
        parts: Sequence[Piece],
        ask: Callable[[Offer], Awaitable[None]],
        checked: Callable[[Piece], None],
    ) -> None:
        file, ranges = version.file, [p.range for p in parts]
        loop = asyncio.get_running_loop()
        landing = await self._landing(file.path, file.nbytes, ranges)
        self._open.add(landing)
        news: asyncio.Queue[Range | asyncio.Future[None]] = asyncio.Queue()

        def arrived(piece: Range) -> None:
            loop.call_soon_threadsafe(news.put_nowait, piece)

        watching = loop.run_in_executor(self._pushes, landing.watch, arrived)
        asked = asyncio.ensure_future(ask(landing.offer(self._nixl)))
        for future in (watching, asked):
            future.add_done_callback(news.put_nowait)
        is_over = False
        try:
            await self._collect(version, parts, news, asked, checked)
            is_over = True
        except HolderError as e:
            is_over = e.status in NOTHING_WRITTEN
            raise
        finally:
            asked.cancel()
            if not is_over:
                self.abandoned += 1
                landing.detach()
                self._addresses_left -= file.nbytes
                if self._addresses_left < 0:
                    self._worn.set()
            # Also when this is cancelled once more meanwhile.
            ending = asyncio.ensure_future(self._end(landing, watching, asked, is_over))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)
            await asyncio.shield(ending)

    async def _landing(self, path: Path, nbytes: int, ranges: list[Range]) -> Landing:
        """Raises NixlError, OSError."""
        making = asyncio.get_running_loop().run_in_executor(
            self._pushes, Landing, self._agents, self._mappings, path, nbytes, ranges
        )
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(self._close_unused)
            raise

    def _close_unused(self, making: asyncio.Future[Landing]) -> None:
        if not making.cancelled() and making.exception() is None:
            self._close(making.result())

    def _close(self, landing: Landing) -> None:
        """Soon: nobody need wait for it."""
        asyncio.get_running_loop().call_later(CLOSE_DELAY_S, self._close_now, landing)

    def _close_now(self, landing: Landing) -> None:
        closing = self._pushes.submit(landing.close)
        closing.add_done_callback(lambda _: self._open.discard(landing))
        closing.add_done_callback(_tell)

    async def _collect(
        self,
        version: Version,
        parts: Sequence[Piece],
        news: asyncio.Queue[Range | asyncio.Future[None]],
        asked: asyncio.Future[None],
        checked: Callable[[Piece], None],
    ) -> None:
        """Raises as `receive`, but not before the checks that have begun are done."""
        waited = {p.range: p for p in parts}
        checks: list[asyncio.Future[None]] = []

        def check(piece: Piece) -> None:
            task = asyncio.ensure_future(self._check(version, piece, checked))
            task.add_done_callback(lambda t: None if t.cancelled() else news.put_nowait(t))
            checks.append(task)

        try:
            while waited or not asked.done():
                async with asyncio.timeout(self.stall_timeout_s):
                    new = await news.get()
                if not isinstance(new, tuple):
                    new.result()
                    if new is asked:  # all is written, whether its notes are here or not
                        break
                elif (piece := waited.pop(new, None)) is not None:
                    check(piece)
        except TimeoutError:
            raise ReceiveFailed(f"no piece came for {self.stall_timeout_s:g} s") from None
        else:
            for piece in waited.values():
                check(piece)
        finally:
            results = await asyncio.gather(*checks, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _check(
        self, version: Version, piece: Piece, checked: Callable[[Piece], None]
    ) -> None:
        """Raises ReceiveFailed."""
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._checks, version.file.digest, *piece.range)
        if found != piece.digest:
            names = version.image.names_in(*piece.range)
            raise ReceiveFailed(
                f"bytes [{piece.start}, {piece.end}) differ from their digest; they are of tensor "
                f"{', '.join(names) or '(the header)'}"
            )
        checked(piece)

    async def _end(
        self,
        landing: Landing,
        watching: asyncio.Future[None],
        asked: asyncio.Future[None],
        is_over: bool,
    ) -> None:
        landing.stop_watching()
        await asyncio.gather(asked, return_exceptions=True)
        with contextlib.suppress(NixlError):  # it was raised already, if it was in time
            await watching
        if is_over:
            self._close(landing)
        else:
            try:
                await asyncio.get_running_loop().run_in_executor(self._pushes, landing.abandon)
            finally:
                self._open.discard(landing)


def _tell(closing: Future[None]) -> None:
    if (error := closing.exception()) is not None:
        logger.warning("the memory of a push that is over is not free: %r", error)
