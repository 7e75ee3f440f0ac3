"""The sending side: writing pieces into memory that a receiver registered."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torchtitan_rl_ft.weights.holder.agent import Agent, NixlError
from torchtitan_rl_ft.weights.holder.client import Offer
from torchtitan_rl_ft.weights.pieces import Range

logger = logging.getLogger(__name__)

POLL_S = 0.0001


class PushBusy(Exception):
    """Another push is under way: one at a time."""


class PushFailed(Exception):
    """The receiver does not take what is written, or not in time."""


@dataclass(frozen=True)
class Memory:
    """Where a version's image is in this process: byte 0 at `address`. `ranges` of it are held."""

    address: int
    ranges: tuple[Range, ...]


def note_of(piece: Range) -> bytes:
    """What the receiver is told when `piece` is written."""
    return f"{piece[0]}-{piece[1]}".encode()


def range_of(note: bytes) -> Range:
    """Raises ValueError."""
    start, end = note.decode("ascii").split("-")
    return int(start), int(end)


class Pusher:
    """Pushes of one process, one at a time. Memory is registered with the first push out of it and
    stays so: it must not change until it is forgotten. An agent that has seen a push fail is not
    used again: the transfer may not be over."""

    def __init__(
        self,
        make_agent: Callable[[], Agent],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._make_agent, self._clock, self._sleep = make_agent, clock, sleep
        self._agent: Agent | None = None
        self._registered: dict[Memory, Any] = {}
        self._turn = threading.Lock()
        self._state = threading.Lock()  # what takes long is done without it: `forget` may wait
        self.pushes = self.failed = self.pushed_bytes = 0

    def push(
        self, memory: Memory, pieces: Iterable[Range], offer: Offer, stall_timeout_s: float
    ) -> None:
        """Write `pieces`, in order, each within `stall_timeout_s`. Blocks.

        Raises PushBusy, PushFailed, NixlError (of this side: nothing was written).
        """
        if not self._turn.acquire(blocking=False):
            raise PushBusy("another push is under way")
        try:
            try:
                agent = self._agent_for(memory)
            except NixlError:
                self._end_agent()  # the next one may do better
                raise
            problem = None  # what was raised refers to the agent, which is to end here
            try:
                self._write_all(agent, memory, pieces, offer, stall_timeout_s)
            except (NixlError, PushFailed) as e:
                problem = str(e)
            del agent
            if problem is not None:
                self.failed += 1
                self._end_agent()
                raise PushFailed(problem)
            self.pushes += 1
        finally:
            self._turn.release()

    def forget(self, address: int) -> None:
        """Before the memory at `address`, from which nothing is pushed now, is changed or
        unmapped. Raises NixlError."""
        with self._state:
            for memory in [m for m in self._registered if m.address == address]:
                registered = self._registered.pop(memory)
                if self._agent is not None:
                    self._agent.deregister(registered)

    def counts(self) -> dict[str, int]:
        return {"done": self.pushes, "failed": self.failed, "bytes": self.pushed_bytes}

    def _agent_for(self, memory: Memory) -> Agent:
        """Raises NixlError."""
        agent = self._agent or self._make_agent()
        with self._state:
            self._agent = agent
            if memory not in self._registered:
                self._registered[memory] = agent.register(memory.address, memory.ranges)
        return agent

    def _end_agent(self) -> None:
        with self._state:
            agent, self._agent = self._agent, None
            self._registered.clear()
        if agent is not None:
            agent.drain()
            agent.drop()

    def _write_all(
        self,
        agent: Agent,
        memory: Memory,
        pieces: Iterable[Range],
        offer: Offer,
        stall_timeout_s: float,
    ) -> None:
        """Raises NixlError, PushFailed."""
        peer = agent.add_peer(offer.agent)
        try:
            for piece in pieces:
                self._write(agent, memory, piece, offer, peer, stall_timeout_s)
        finally:
            agent.remove_peer(peer)

    def _write(
        self,
        agent: Agent,
        memory: Memory,
        piece: Range,
        offer: Offer,
        peer: str,
        stall_timeout_s: float,
    ) -> None:
        """Raises NixlError, PushFailed."""
        start, end = piece
        limit_s = self._clock() + stall_timeout_s
        handle = agent.write(
            memory.address + start, offer.address + start, end - start, peer, note_of(piece)
        )
        try:
            while not agent.is_done(handle):
                if self._clock() > limit_s:
                    raise PushFailed(
                        f"the receiver took no piece for {stall_timeout_s:g} s ([{start}, {end}))"
                    )
                self._sleep(POLL_S)
        finally:
            agent.release(handle)
        self.pushed_bytes += end - start
