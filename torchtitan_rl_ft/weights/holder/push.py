"""The sending side: writing pieces into memory that a receiver registered."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torchtitan_rl_ft.weights.holder.agent import Agent, NixlError
from torchtitan_rl_ft.weights.holder.client import Offer
from torchtitan_rl_ft.weights.holder.pace import Pace
from torchtitan_rl_ft.weights.pieces import Range, total

logger = logging.getLogger(__name__)

POLL_S = 0.0001
LANES = 2
LANE_BYTES = 4 << 20


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


class _Lane:
    """An agent, and what is registered with it. Raises NixlError."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self._registered: dict[Memory, Any] = {}

    def register(self, memory: Memory) -> None:
        if memory not in self._registered:
            self._registered[memory] = self.agent.register(memory.address, memory.ranges)

    def forget(self, address: int) -> None:
        for memory in [m for m in self._registered if m.address == address]:
            self.agent.deregister(self._registered.pop(memory))


class Pusher:
    """Pushes of one process, one at a time. Memory is registered with the first push out of it and
    stays so: it must not change until it is forgotten. An agent that has seen a push fail is not
    used again: the transfer may not be over.

    Out of much memory a push has several lanes, each a thread with an agent: UCX moves the bytes of
    an agent in the thread that waits for them, and where it copies between processes the pages, of
    4 KiB each, take longer than their bytes. `lane_bytes`: a lane for so many, up to `LANES`."""

    def __init__(
        self,
        make_agent: Callable[[], Agent],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        lane_bytes: int = LANE_BYTES,
    ) -> None:
        self._make_agent, self._clock, self._sleep = make_agent, clock, sleep
        self._lane_bytes = lane_bytes
        self._lanes: list[_Lane] = []
        self._turn = threading.Lock()
        self._state = threading.Lock()  # what takes long is done without it: `forget` may wait
        self.pushes = self.failed = self.pushed_bytes = 0

    def push(
        self, memory: Memory, pieces: Iterable[Range], offer: Offer, stall_timeout_s: float
    ) -> None:
        """Write `pieces`, each within `stall_timeout_s`; one lane writes them in order. Blocks.

        Raises PushBusy, PushFailed, NixlError (of this side: nothing was written).
        """
        if not self._turn.acquire(blocking=False):
            raise PushBusy("another push is under way")
        try:
            try:
                agents = self._agents_for(memory)
            except NixlError:
                self._end_lanes()  # the next one may do better
                raise
            push = _Push(memory, pieces, offer, stall_timeout_s, self._clock, self._sleep)
            try:
                push.run(agents)
            except PushFailed:
                self.failed += 1
                self._end_lanes()
                raise
            finally:
                self.pushed_bytes += total(push.written)
            self.pushes += 1
        finally:
            self._turn.release()

    def forget(self, address: int) -> None:
        """Before the memory at `address`, from which nothing is pushed now, is changed or
        unmapped. Raises NixlError."""
        with self._state:
            for lane in self._lanes:
                lane.forget(address)

    def counts(self) -> dict[str, int]:
        return {"done": self.pushes, "failed": self.failed, "bytes": self.pushed_bytes}

    def _agents_for(self, memory: Memory) -> list[Agent]:
        """Raises NixlError."""
        count = max(1, min(LANES, total(memory.ranges) // self._lane_bytes))
        while len(self._lanes) < count:
            lane = _Lane(self._make_agent())
            with self._state:
                self._lanes.append(lane)  # at once: who fails ends all of them
        with self._state:
            for lane in self._lanes[:count]:
                lane.register(memory)
        return [lane.agent for lane in self._lanes[:count]]

    def _end_lanes(self) -> None:
        with self._state:
            lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.agent.drain()
            lane.agent.drop()


class _Push:
    """One push, by as many lanes as there are agents."""

    def __init__(
        self,
        memory: Memory,
        pieces: Iterable[Range],
        offer: Offer,
        stall_timeout_s: float,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._memory, self._offer, self._stall_timeout_s = memory, offer, stall_timeout_s
        self._clock, self._sleep = clock, sleep
        self._left = iter(pieces)
        self._taking, self._is_over = threading.Lock(), threading.Event()
        self._failures: list[str] = []  # exceptions would keep the agents
        self.written: list[Range] = []

    def run(self, agents: Sequence[Agent]) -> None:
        """Returns when all lanes have ended. Raises PushFailed."""
        if len(agents) == 1:
            self._lane(agents[0])
        else:
            with ThreadPoolExecutor(len(agents), thread_name_prefix="lane") as threads:
                lanes = [threads.submit(self._lane, agent) for agent in agents]
            for lane in lanes:
                lane.result()
        if self._failures:
            raise PushFailed(self._failures[0])

    def _lane(self, agent: Agent) -> None:
        """Write what is left, piece by piece. The first failure ends all lanes."""
        try:
            peer = agent.add_peer(self._offer.agent)
            try:
                while (piece := self._next()) is not None:
                    self._write(agent, piece, peer)
            finally:
                agent.remove_peer(peer)
        except (NixlError, PushFailed) as e:
            self._failures.append(str(e))
            self._is_over.set()

    def _next(self) -> Range | None:
        with self._taking:
            return None if self._is_over.is_set() else next(self._left, None)

    def _write(self, agent: Agent, piece: Range, peer: str) -> None:
        """Raises NixlError, PushFailed."""
        start, end = piece
        limit_s = self._clock() + self._stall_timeout_s
        local, remote = self._memory.address + start, self._offer.address + start
        pace = Pace(POLL_S, self._sleep)
        pace.begin()
        handle = agent.write(local, remote, end - start, peer, note_of(piece))
        try:
            while not agent.is_done(handle):
                if self._is_over.is_set():
                    return
                if self._clock() > limit_s:
                    raise PushFailed(
                        f"the receiver took no piece for {self._stall_timeout_s:g} s "
                        f"([{start}, {end}))"
                    )
                pace.wait()
                pace.begin()
        finally:
            agent.release(handle)
        self.written.append(piece)
