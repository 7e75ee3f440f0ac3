"""Effective training time ratio, first form: a pure function of the events of one run.

    ETTR = productive step time / wall time, from the run's start to its last commit

A step's time is the interval between its commit and the one before (the first step's: from the
first prompt that goes out, the end of start-up). Of a step in which a fault was seen
only as much counts as productive as the median undisturbed step took; the excess is lost. A
step that was superseded (trained again after its state was lost) counts nothing. Start-up is
not productive, so a run without faults stays below 1; `after_startup` leaves start-up out.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from torchtitan_rl_ft.observability.events import Event, Kind

DISTURBANCES = frozenset(
    {Kind.FAULT, Kind.RESTART, Kind.REFUSE, Kind.HEAL, Kind.SUPERSEDE, Kind.CHAOS}
)


@dataclass(frozen=True)
class Ettr:
    """All in seconds of the host's monotonic clock. wall = startup + productive + lost."""

    wall_s: float
    startup_s: float
    productive_s: float
    lost_s: float
    step_s: float  # median undisturbed step
    steps: int

    @property
    def ratio(self) -> float:
        return self.productive_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def after_startup(self) -> float:
        active_s = self.wall_s - self.startup_s
        return self.productive_s / active_s if active_s > 0 else 0.0


@dataclass(frozen=True)
class _Step:
    step: int
    duration_s: float
    disturbed: bool


def ettr(events: Iterable[Event]) -> Ettr | None:
    """ETTR of the last life of the run (since the last RUN start or resume); None before its
    first commit."""
    life = last_life(events)
    commits = [e for e in life if e.kind is Kind.COMMIT and e.step is not None]
    if not commits:
        return None
    start_s = life[0].mono_s
    begin_s = max(start_s, _first_work_s(life, commits[0].mono_s))
    steps = _steps(life, begin_s)
    calm = [s.duration_s for s in steps if not s.disturbed] or [s.duration_s for s in steps]
    typical_s = statistics.median(calm) if calm else 0.0
    productive_s = sum(min(s.duration_s, typical_s) if s.disturbed else s.duration_s for s in steps)
    wall_s = commits[-1].mono_s - start_s
    startup_s = begin_s - start_s
    lost_s = max(0.0, wall_s - startup_s - productive_s)
    return Ettr(wall_s, startup_s, productive_s, lost_s, typical_s, len(steps))


def last_life(events: Iterable[Event]) -> list[Event]:
    """The events since the last RUN start, resume or reattach, in the order of the clock."""
    life: list[Event] = []
    for event in events:
        if event.kind is Kind.RUN and event.phase in ("start", "resume", "reattach"):
            life = []
        life.append(event)
    return sorted(life, key=lambda e: e.mono_s)


def _first_work_s(life: list[Event], first_commit_s: float) -> float:
    """When the first prompts went out or, without a rollout, the first step began."""
    for event in life:
        if event.kind in (Kind.ISSUE, Kind.QUORUM, Kind.BEGIN) and event.mono_s <= first_commit_s:
            return event.mono_s
    return first_commit_s


def _steps(life: list[Event], begin_s: float) -> list[_Step]:
    steps: list[_Step] = []
    since_s, disturbed = begin_s, False
    for event in life:
        if event.mono_s < begin_s:
            continue
        if event.kind is Kind.SUPERSEDE:
            steps = [s for s in steps if s.step <= int(event.data.get("to_step", 0))]
        if event.kind in DISTURBANCES:
            disturbed = True
        if event.kind is Kind.COMMIT and event.step is not None:
            steps.append(_Step(event.step, event.mono_s - since_s, disturbed))
            since_s, disturbed = event.mono_s, False
    return steps
