"""Standby trainers of a run, as the supervisor keeps them: up, and given the place of a lost group.

The contract is in docs/architecture.md, "Standby trainers".
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.observability.events import EventSink, Kind, read_event
from torchtitan_rl_ft.observability.jsonl import JsonlTail
from torchtitan_rl_ft.rpc.client import RoleClient, RoleRefused, RoleUnreachable
from torchtitan_rl_ft.run_folder import RunFolder

PROMOTE_TIMEOUT_S = 5.0
"""A standby sleeps beside us: one that has not answered by then never will."""

SETTLE_TIMEOUT_S = 60.0
"""How long the start of the next standby waits for the first commit of the promoted group."""

KILL_TIMEOUT_S = 5.0
_POLL_S = 0.25


@dataclass
class Standby:
    """One life of a standby. `taken`: it is being given a place, or has one; for good."""

    name: str
    attempt: int
    child: process.Child
    taken: bool = False
    promoted: asyncio.Future[str] = field(default_factory=asyncio.Future)
    """The place it has, once it has it."""


def choose(standbys: Iterable[Standby], ready: Callable[[Standby], bool]) -> Standby | None:
    """The one that takes a place now: the lowest name of those that are ready and free. Pure."""
    free = [s for s in standbys if not s.taken and ready(s)]
    return min(free, key=lambda s: s.name, default=None)


class NoPlace(Exception):
    """There is no place that a standby could train in."""


class Places(Protocol):
    """Where promoted standbys train (loans.py: borrowed places)."""

    async def take(self, place: str) -> list[int] | None:
        """The devices for group `place`; None: the standby has its own. Raises NoPlace."""

    async def settle(self, place: str) -> None:
        """The group has committed in its new place."""

    async def forgo(self, place: str) -> None:
        """Nobody trains where group `place` was to train."""


class OwnPlaces:
    """A spare trains where it waited."""

    async def take(self, place: str) -> list[int] | None:
        return None

    async def settle(self, place: str) -> None:
        pass

    async def forgo(self, place: str) -> None:
        pass


class FirstCommit:
    """Tells when a group (no place: any) has reported a commit since this object was made."""

    def __init__(self, events: Path, place: str) -> None:
        self._place = place
        self._tail = JsonlTail(events, may_begin_anew=True, from_end=True, parse=read_event)
        self._since_mono_s = time.monotonic()

    def seen(self) -> bool:
        return any(
            line.get("name") == (self._place or line.get("name"))
            and (line.get("kind"), line.get("phase")) == (Kind.PHASE, "report")
            and line.get("mono_s", 0.0) >= self._since_mono_s
            for line in self._tail.read()
        )


class Standbys:
    """The standbys of one run. A standby counts nowhere: not as a worker, not in the quorum."""

    def __init__(
        self,
        folder: RunFolder,
        events: EventSink,
        places: Places | None = None,
        settle_timeout_s: float = SETTLE_TIMEOUT_S,
    ) -> None:
        self._folder, self._events = folder, events
        self._places: Places = places or OwnPlaces()
        self._settle_timeout_s = settle_timeout_s
        self._up: dict[str, Standby] = {}

    def started(self, name: str, attempt: int, child: process.Child) -> Standby:
        """A standby was started. It may be chosen once it has registered."""
        self._up[name] = Standby(name, attempt, child)
        return self._up[name]

    def ended(self, standby: Standby) -> None:
        """Its process is gone, and it has no place."""
        standby.taken = True
        self._up.pop(standby.name, None)
        self._folder.unregister(standby.name)

    async def promote(self, place: str, cause: str) -> tuple[int, Standby] | None:
        """Give `place` to a standby, whose process is the group's from now on; with the count of
        starts of the group. None when there is none that takes it: the group is started anew."""
        noticed = time.monotonic()
        standby = choose(self._up.values(), self._ready)
        if standby is None:
            if waiting := sorted(s.name for s in self._up.values() if not s.taken):
                told = f"{', '.join(waiting)} not ready: {place} is started anew"
                self._events.emit(Kind.WARN, cause=told, subject=place)
            return None
        standby.taken = True
        try:
            devices = await self._places.take(place)
        except NoPlace as e:
            standby.taken = False
            self._events.emit(Kind.WARN, cause=f"no place for {standby.name}: {e}", subject=place)
            return None
        placed, attempt = time.monotonic(), self._folder.next_attempt(place)
        body = {"replica_id": _replica_id(place), "attempt": attempt, "devices": devices}
        try:
            await asyncio.to_thread(self._ask, standby, body)
        except (RoleRefused, RoleUnreachable) as e:
            self._events.emit(Kind.FAULT, cause=f"not promoted: {e}", subject=standby.name)
            # It might still take the place that its group is about to be started in.
            await process.kill_until_gone([standby.child.id], time.monotonic() + KILL_TIMEOUT_S)
            await self._places.forgo(place)
            return None
        if self._up.get(standby.name) is not standby:  # it has ended, and was told to `ended`
            await self._places.forgo(place)
            return None
        self._name_logs(standby, place, attempt)
        self._events.emit(
            Kind.PROMOTE,
            cause=cause,
            subject=place,
            standby=standby.name,
            attempt=attempt,
            pid=standby.child.pid,
            place_s=round(placed - noticed, 3),
            promote_s=round(time.monotonic() - placed, 3),
        )
        self._folder.unregister(standby.name)
        standby.promoted.set_result(place)
        return attempt, standby

    async def under_way(self, place: str = "") -> None:
        """Until the promoted group has committed, or any group of a job that starts: a start
        meanwhile would share the cores with them. Bounded."""
        commit = FirstCommit(self._folder.events, place)
        end = time.monotonic() + self._settle_timeout_s
        while not commit.seen() and time.monotonic() < end:
            await asyncio.sleep(_POLL_S)
        if place:
            await self._places.settle(place)

    def _ready(self, standby: Standby) -> bool:
        address = self._folder.role(standby.name)
        return address is not None and address.attempt == standby.attempt and address.alive()

    def _ask(self, standby: Standby, body: dict[str, Any]) -> None:
        address = self._folder.role(standby.name)
        url = address.url if address is not None else None
        client = RoleClient(standby.name, lambda: url, self._folder.token())
        try:
            client.post("/v1/promote", body, deadline_s=PROMOTE_TIMEOUT_S)
        finally:
            client.close()

    def _name_logs(self, standby: Standby, place: str, attempt: int) -> None:
        """Its logs are found under the name of its group, too."""
        for log in self._folder.path.glob(f"logs/{standby.name}*/attempt_{standby.attempt}.log"):
            rank = log.parent.name.removeprefix(standby.name)  # ".1", or nothing
            if not rank or rank.startswith("."):
                self._folder.link_log(place + rank, attempt, log)


def _replica_id(place: str) -> int:
    return int(place.rpartition("-")[2])
