"""Spans of one process, folded from its own events: what lasted, from when to when.

Ids are a function of the run and of what a span is about, so that the spans of all roles for one
step meet in one trace without a word between the roles:

    trace of a step           step (rollout role), train (each group) with its phases, install
    trace of a prompt group   rollout

A step that is trained again, after a rewind, adds its spans to the same trace.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torchtitan_rl_ft.observability.event_data import issued
from torchtitan_rl_ft.observability.events import Event, Kind

MAX_OPEN = 8192
"""Things under way that are remembered; the oldest are forgotten."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """`trace_id` 16 bytes, `span_id` 8 bytes, as integers. Times are Unix seconds. `error`: what
    it failed by."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int | None = None
    began_s: float
    ended_s: float
    error: str | None = None
    attributes: dict[str, Any] = field(default_factory=dict)


def stable_id(n_bytes: int, *about: Any) -> int:
    """Never 0, which would be no id."""
    digest = hashlib.sha256("/".join(map(str, about)).encode()).digest()
    return int.from_bytes(digest[:n_bytes]) or 1


def trace_of_step(run: str, step: int) -> int:
    return stable_id(16, run, "step", step)


def span_of_step(run: str, step: int) -> int:
    return stable_id(8, run, "step", step)


class _Recent(OrderedDict[Hashable, Any]):
    """A dictionary that forgets its oldest entries."""

    def __setitem__(self, key: Hashable, value: Any) -> None:
        super().__setitem__(key, value)
        if len(self) > MAX_OPEN:
            self.popitem(last=False)


class SpanFold:
    """Feed it the events of one process in order; each call yields the spans that ended."""

    def __init__(self) -> None:
        self.committed_s = _Recent()
        """step -> when it was committed, of the last few."""
        self._numbers = itertools.count(1)
        self._step_began_s: float | None = None
        self._groups = _Recent()  # prompt group -> when it was drawn
        self._published = _Recent()  # version -> when it was announced
        self._up = _Recent()  # engine -> when it was up
        self._phase: Event | None = None
        self._train: tuple[Event, int] | None = None  # its first phase, its span's id

    def add(self, event: Event) -> Iterator[Span]:
        if event.role == "trainer" and event.kind is Kind.PHASE:
            yield from self._trainer(event)
        elif event.role == "rollout":
            yield from self._rollout(event)
        elif event.role == "serving":
            yield from self._serving(event)

    def close(self, wall_s: float) -> Iterator[Span]:
        """The phase that a process ends in."""
        if self._phase is not None:
            yield self._phase_span(self._phase, wall_s)
            self._phase = None

    def _id(self, event: Event) -> int:
        return stable_id(8, event.run, event.name, event.pid, event.attempt, next(self._numbers))

    def _in_step(
        self, name: str, event: Event, step: int, began_s: float, ended_s: float, **more: Any
    ) -> Span:
        attributes = {"step": step, "of": event.name, **more.pop("attributes", {})}
        return Span(
            name=name,
            trace_id=trace_of_step(event.run, step),
            span_id=more.pop("span_id", None) or self._id(event),
            parent_id=more.pop("parent_id", span_of_step(event.run, step)),
            began_s=began_s,
            ended_s=ended_s,
            attributes=attributes,
            **more,
        )

    # Trainers -------------------------------------------------------------------------------

    def _trainer(self, event: Event) -> Iterator[Span]:
        """A group's share of step k lasts from its first phase of that step to the first of the
        next; what it does with a committed state (report, publish, save) is in the next one."""
        if self._phase is not None:
            yield self._phase_span(self._phase, event.wall_s)
        if self._train is None or self._train[0].step != event.step:
            if self._train is not None:
                first, span_id = self._train
                ended_s = event.wall_s
                yield self._in_step(
                    "train", first, first.step or 0, first.wall_s, ended_s, span_id=span_id
                )
            self._train = event, self._id(event)
        self._phase = event

    def _phase_span(self, phase: Event, ended_s: float) -> Span:
        parent = self._train[1] if self._train is not None else None
        name = str(phase.phase)
        return self._in_step(name, phase, phase.step or 0, phase.wall_s, ended_s, parent_id=parent)

    # Rollout --------------------------------------------------------------------------------

    def _rollout(self, event: Event) -> Iterator[Span]:
        data = event.data
        if self._step_began_s is None:
            self._step_began_s = event.wall_s
        if event.kind is Kind.COMMIT and event.step is not None:
            self.committed_s[event.step] = event.wall_s
            yield self._in_step(
                "step",
                event,
                event.step,
                self._step_began_s,
                event.wall_s,
                span_id=span_of_step(event.run, event.step),
                parent_id=None,
                attributes={"participants": data.get("participants"), "batch": data.get("batch")},
            )
            self._step_began_s = event.wall_s
        elif event.kind is Kind.SUPERSEDE:
            self._step_began_s = event.wall_s
        elif event.kind is Kind.ISSUE:
            for group in issued(event):
                self._groups[group] = event.wall_s
        elif event.kind in (Kind.ACCEPT, Kind.DROP) and "group" in data:
            group = data["group"]
            yield Span(
                name="rollout",
                trace_id=stable_id(16, event.run, "group", group),
                span_id=self._id(event),
                began_s=self._groups.pop(group, event.wall_s),
                ended_s=event.wall_s,
                error=event.cause if event.kind is Kind.DROP else None,
                attributes={"group": group, "version": event.version},
            )

    # Serving --------------------------------------------------------------------------------

    def _serving(self, event: Event) -> Iterator[Span]:
        """An install lasts from the announcement of its version; of an engine that came up later,
        from then on."""
        data = event.data
        if event.kind is Kind.PUBLISH and event.version is not None:
            self._published[event.version] = event.wall_s
        elif event.kind is Kind.TRANSITION and data.get("old") == "starting":
            self._up[data.get("subject")] = event.wall_s
        elif event.kind is Kind.INSTALL and event.step is not None:
            took_s = sum(float(data.get(k, 0.0)) for k in ("load_ms", "prove_ms")) / 1000
            began_s = max(
                self._published.get(event.version, event.wall_s - took_s),
                self._up.get(data.get("subject"), 0.0),
            )
            yield self._in_step(
                "install",
                event,
                event.step,
                began_s,
                event.wall_s,
                attributes={"version": event.version, **data},
            )
