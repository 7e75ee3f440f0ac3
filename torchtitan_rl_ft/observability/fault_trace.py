"""Outages as slices of a trace, each with its phases within it."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import asdict

from torchtitan_rl_ft.observability.events import Event, Kind, first_line
from torchtitan_rl_ft.observability.outages import Outage, Outages
from torchtitan_rl_ft.observability.trace_format import Process, Track

LATE_LINES_S = 2.0
"""Lines of several processes come in the order of the clock but for this much."""

TOLD_APART = frozenset({Kind.ACCEPT, Kind.ISSUE, Kind.CONFIRM, Kind.BEGIN})
"""The many events that say nothing of an outage."""


class FaultTrace:
    """Fed event by event in the order of the file; `write` ends a clock, or the run."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._tracks: dict[str, Track] = {}
        self._outages = Outages()
        self._late: list[tuple[float, int, Event]] = []
        self._n = self.written = 0

    def add(self, event: Event) -> None:
        if event.kind in TOLD_APART:
            return
        if event.kind is Kind.RUN:  # a life is in order for itself
            self._feed(float("inf"))
        self._n += 1
        heapq.heappush(self._late, (event.mono_s, self._n, event))
        self._feed(event.mono_s - LATE_LINES_S)

    def write(self, us: Callable[[float], int]) -> None:
        """All outages so far; `us` places a time of the clock that they were taken by."""
        self._feed(float("inf"))
        for outage in self._outages.all():
            self._write(outage, us)
        self._outages = Outages()

    def _feed(self, until_s: float) -> None:
        while self._late and self._late[0][0] <= until_s:
            self._outages.add(heapq.heappop(self._late)[2])

    def _write(self, outage: Outage, us: Callable[[float], int]) -> None:
        if outage.name not in self._tracks:
            self._tracks[outage.name] = self._process.track(outage.name)
        track = self._tracks[outage.name]
        args = asdict(outage) | {"over": outage.done_s is not None, "phase_s": outage.phase_s}
        track.begin(us(outage.began_s), first_line(outage.cause)[:100] or "fault", args)
        for phase, began_s, ended_s in outage.spans:
            track.begin(us(began_s), phase)
            track.end(us(ended_s))
        track.end(us(outage.until_s))
        self.written += 1
