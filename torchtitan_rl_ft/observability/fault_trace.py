"""Outages as slices of a trace, each with its phases within it."""

from __future__ import annotations

from collections.abc import Callable

from torchtitan_rl_ft.observability.event_order import InOrder
from torchtitan_rl_ft.observability.events import Event, first_line
from torchtitan_rl_ft.observability.outage import Outage
from torchtitan_rl_ft.observability.outages import Outages
from torchtitan_rl_ft.observability.trace_format import Process, Track


class FaultTrace:
    """Fed event by event in the order of the file; `write` ends a clock, or the run."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._tracks: dict[str, Track] = {}
        self._order, self._outages = InOrder(), Outages()
        self.written = 0

    def add(self, event: Event) -> None:
        for each in self._order.add(event):
            self._outages.add(each)

    def write(self, us: Callable[[float], int]) -> None:
        """All outages so far; `us` places a time of the clock that they were taken by."""
        for event in self._order.rest():
            self._outages.add(event)
        for outage in self._outages.all():
            self._write(outage, us)
        self._outages = Outages()

    def _write(self, outage: Outage, us: Callable[[float], int]) -> None:
        if outage.name not in self._tracks:
            self._tracks[outage.name] = self._process.track(outage.name)
        track = self._tracks[outage.name]
        args = outage.to_json() | {"over": outage.done_s is not None}
        track.begin(us(outage.began_s), first_line(outage.cause)[:100] or "fault", args)
        for phase, began_s, ended_s in outage.spans:
            track.begin(us(began_s), phase)
            track.end(us(ended_s))
        track.end(us(outage.until_s))
        self.written += 1
