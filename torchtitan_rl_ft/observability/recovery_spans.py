"""A span for each fault of a run, with its phases, when it is over: by the supervisor, which reads
the events of all roles."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from torchtitan_rl_ft.observability.event_order import InOrder
from torchtitan_rl_ft.observability.events import as_event, read_event
from torchtitan_rl_ft.observability.jsonl import JsonlTail
from torchtitan_rl_ft.observability.outages import Outage, Outages
from torchtitan_rl_ft.observability.spans import Span, stable_id


class RecoverySpans:
    """Of the faults from now on. What ends a supervisor itself is in no span, but in the report."""

    def __init__(self, path: Path, run: str) -> None:
        self._tail = JsonlTail(path, may_begin_anew=True, from_end=True, parse=read_event)
        self._order, self._outages, self._run = InOrder(), Outages(), run
        self._told: set[tuple[str, float]] = set()

    def read(self) -> Iterator[Span]:
        """Those that ended since the last call."""
        lines = self._tail.read()
        events = (e for e in map(as_event, lines) if e is not None)
        in_order = chain.from_iterable(map(self._order.add, events))
        fed = 0
        for event in in_order if lines else self._order.rest():
            self._outages.add(event)
            fed += 1
        if not fed:
            return
        for outage in self._outages.all():
            key = outage.name, outage.began_s
            if (outage.done_s is not None or outage.overtaken) and key not in self._told:
                self._told.add(key)
                yield from spans_of(outage, self._run, time.time() - time.monotonic())


def spans_of(outage: Outage, run: str, clocks_apart_s: float) -> Iterator[Span]:
    """`clocks_apart_s`: Unix time less the monotonic clock, now."""
    about = run, "recovery", outage.name, outage.began_s
    trace_id, span_id = stable_id(16, *about), stable_id(8, *about)
    seconds = {f"{phase}_s": round(s, 3) for phase, s in outage.phase_s.items()}
    yield Span(
        name="recovery",
        trace_id=trace_id,
        span_id=span_id,
        began_s=outage.began_s + clocks_apart_s,
        ended_s=outage.until_s + clocks_apart_s,
        error=outage.cause,
        attributes={
            "role": outage.role,
            "of": outage.name,
            "cause": outage.cause,
            "samples_lost": outage.samples_lost,
            "samples_replayed": outage.samples_replayed,
            "version_before": outage.version_before,
            "version_after": outage.version_after,
            **seconds,
        },
    )
    for phase, began_s, ended_s in outage.spans:
        yield Span(
            name=phase,
            trace_id=trace_id,
            span_id=stable_id(8, *about, phase),
            parent_id=span_id,
            began_s=began_s + clocks_apart_s,
            ended_s=ended_s + clocks_apart_s,
            attributes={"of": outage.name},
        )
