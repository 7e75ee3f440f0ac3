"""The directory of holders as serving keeps it: with a clock, and waking those who wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan_rl_ft.observability.events import EventSink, Kind
from torchtitan_rl_ft.serving.changes import Changes
from torchtitan_rl_ft.serving.directory import Answer, Directory, Lease, Report, Wanted
from torchtitan_rl_ft.weights.holder.settings import Key
from torchtitan_rl_ft.weights.pieces import Range, intersect

LOOK_S = 0.25
"""How often somebody who waits looks again for what time alone has changed: a wait that is over, a
holder that has fallen silent."""


@dataclass(eq=False)
class _Poll:
    """A receiver that waits for a lease. `is_over`: it asks for something else by now, and would
    leave what it were granted unused."""

    receiver: str
    key: Key
    missing: Sequence[Range]
    is_over: bool = False


class HolderBook:
    """Lives in one event loop. `needed` gives the versions that somebody here reads."""

    def __init__(
        self,
        directory: Directory,
        events: EventSink,
        changes: Changes,
        needed: Callable[[], Iterable[Key]] = tuple,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._events, self._changes = directory, events, changes
        self._clock = clock
        self.needed = needed
        self._told: set[tuple[str, Key, str]] = set()
        self._polls: list[_Poll] = []

    # Reports --------------------------------------------------------------------------------

    def report(self, told: Report) -> Answer:
        """Raises Replaced."""
        answer = self._directory.report(told, self._clock(), self.needed())
        conflicts = set(self._directory.conflicts())
        for name, key, other in conflicts - self._told:
            cause = (
                f"{key} of {name} is not that of {other}, which told of it first: nothing of it is "
                f"taken from {name}"
            )
            self._events.emit(Kind.WARN, cause=cause, step=key.step, subject=name)
        self._told = conflicts
        self._changes.notify()
        return answer

    def gone(self, name: str) -> None:
        """Its process has ended."""
        self._directory.gone(name)
        self._changes.notify()

    def found(self, name: str, pid: int) -> tuple[str, float] | None:
        """Address of the holder that is process `pid`, and for how many seconds it was silent."""
        if (found := self._directory.found(name, pid)) is None:
            return None
        return found[0], self._clock() - found[1]

    # Versions -------------------------------------------------------------------------------

    def want(self, key: Key, layout_digest: str, nbytes: int) -> None:
        self._directory.want(key, layout_digest, nbytes)
        self._changes.notify()

    @property
    def newest(self) -> Wanted | None:
        return self._directory.newest

    def held(self, name: str) -> set[Key]:
        """Versions that a holder has told to have all of."""
        return self._directory.held(name)

    def is_lost(self, key: Key, receiver: str) -> bool:
        """Whether holders have not all of it together, and `receiver` gets nothing of it."""
        return not self._directory.can_be_had(key, self._clock()) and not self._directory.receives(
            receiver, key
        )

    # Leases ---------------------------------------------------------------------------------

    async def lease(
        self, receiver: str, key: Key, missing: Sequence[Range], timeout_s: float
    ) -> list[Lease]:
        """As soon as somebody gives some of it; none at the timeout, and when the receiver asks
        for the same, or for another version, meanwhile. Raises NotWanted, Superseded."""
        for earlier in self._polls:
            if earlier.receiver == receiver:
                earlier.is_over |= earlier.key != key or bool(intersect(earlier.missing, missing))
        poll = _Poll(receiver, key, missing)
        self._polls.append(poll)
        end = self._clock() + timeout_s
        try:
            while not poll.is_over:
                granted = self._directory.lease(receiver, key, missing, self._clock())
                left_s = end - self._clock()
                if granted or left_s <= 0:
                    return granted
                await self._changes.next(min(left_s, LOOK_S))
            return []
        finally:
            self._polls.remove(poll)

    def returned(self, lease_id: str, ok: bool, cause: str | None) -> None:
        lease = self._directory.returned(lease_id, ok, self._clock())
        if lease is not None and not ok:
            self._events.emit(
                Kind.WARN,
                cause=f"{lease.giver} did not give {lease.receiver} its part of {lease.key}: "
                f"{cause or 'no reason told'}",
                step=lease.key.step,
                subject=lease.giver,
                receiver=lease.receiver,
            )
        self._changes.notify()

    def to_json(self) -> dict[str, Any]:
        return self._directory.to_json(self._clock())
