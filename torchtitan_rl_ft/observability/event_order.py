"""Events in the order of the clock: processes append their lines themselves, so that one may come a
moment after a younger one."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from torchtitan_rl_ft.observability.events import Event, Kind

DISORDER_S = 1.0
"""How much later than a younger line one may come."""


class InOrder:
    """Hands out what it is fed in the order of the clock within a life. The newest events are kept
    back: what belongs before them may come."""

    def __init__(self) -> None:
        self._late: list[tuple[float, int, Event]] = []
        self._n = 0  # of equal times the first one first
        self._newest_s = -math.inf

    def add(self, event: Event) -> Iterator[Event]:
        """What can be handed out now."""
        if event.kind is Kind.RUN:  # another life, whose clock may be another one
            yield from self.rest()
            yield event
            return
        self._n += 1
        heapq.heappush(self._late, (event.mono_s, self._n, event))
        self._newest_s = max(self._newest_s, event.mono_s)
        while self._late and self._late[0][0] <= self._newest_s - DISORDER_S:
            yield heapq.heappop(self._late)[2]

    def rest(self) -> Iterator[Event]:
        """All that was kept back: nothing comes before it any more."""
        self._newest_s = -math.inf
        while self._late:
            yield heapq.heappop(self._late)[2]
