"""The slots of a job (places of work: trainer groups and engines) and what was done in each: a
pure function of the events of a run."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from torchtitan_rl_ft.observability.event_data import (
    dropped,
    issued,
    moved_up,
    number,
    whole,
    wholes,
    words,
)
from torchtitan_rl_ft.observability.events import Event, Kind
from torchtitan_rl_ft.observability.lives import BEGINNINGS
from torchtitan_rl_ft.observability.outages import OF_A_RANK, role_of
from torchtitan_rl_ft.observability.tracks import Segment, union

WORK_PHASES = frozenset(
    {"forward_backward", "reduce", "commit", "optimizer", "report", "dump", "publish", "checkpoint"}
)
"""Phases of a trainer group in which it works on its step; in the others it waits or comes up."""

DUTIES = frozenset({"publish", "checkpoint", "dump"})
"""Phases that serve the step before."""

VOTED = frozenset({"optimizer", "report"})
"""Phases that follow a vote for the commit."""

AT_WORK = frozenset({"serving", "draining", "suspect"})
"""States of an engine that may hold requests."""

_REQUEST = re.compile(r"group-(\d+)\.")


@dataclass
class Attempt:
    """A trainer group's work on one step, from its quorum to the duties that follow the commit."""

    start_s: float
    end_s: float
    step: int
    voted: bool = False  # for the commit
    kept: bool = False  # committed, and not superseded since


@dataclass
class Rollout:
    """What engines did for one prompt group, or one engine for one of its samples."""

    group: int
    start_s: float
    end_s: float
    engines: tuple[str, ...] = ()  # empty: unknown, all that were at work
    empty: bool = False  # nothing came of it
    kept: bool = False  # its samples are in a batch that is committed


@dataclass
class Slot:
    name: str
    role: str  # trainer, engine
    since_s: float
    weight: float = 1.0  # ranks
    until_s: float | None = None
    away: list[Segment] = field(default_factory=list)  # lent, or kept as a spare
    away_s: float | None = None  # since when it is
    places: list[tuple[str, float]] = field(default_factory=list)  # taken over: of whom, when
    phases: list[Segment] = field(default_factory=list)  # of a trainer, or states of an engine
    attempts: list[Attempt] = field(default_factory=list)
    open_: tuple[str, float] | None = None  # the present phase or state, since when
    pid: int | None = None
    last_s: float = 0.0

    def enter(self, value: str, at_s: float) -> None:
        self.leave(at_s)
        self.open_ = (value, at_s)

    def leave(self, at_s: float) -> None:
        if self.open_ is not None and at_s > self.open_[1]:
            self.phases.append(Segment(self.open_[1], at_s, self.open_[0]))
        self.open_ = None

    def stop(self, at_s: float) -> None:
        """Its process is gone."""
        self.leave(at_s)
        if self.attempts and self.attempts[-1].end_s > at_s:
            self.attempts[-1].end_s = max(self.attempts[-1].start_s, at_s)

    def back(self, at_s: float) -> None:
        if self.away_s is not None and at_s > self.away_s:
            self.away.append(Segment(self.away_s, at_s))
        self.away_s = None

    def shown(self, until_s: float) -> list[Segment]:
        """Phases or states, the present one included."""
        if self.open_ is None or until_s <= self.open_[1]:
            return self.phases
        return [*self.phases, Segment(self.open_[1], until_s, self.open_[0])]

    def absent(self, until_s: float) -> list[Segment]:
        """When its place was not the job's to work in."""
        ends = [] if self.away_s is None else [Segment(self.away_s, until_s)]
        gone = [] if self.until_s is None else [Segment(self.until_s, until_s)]
        return union([*self.away, *ends, *gone])


class Slots:
    """Fed event by event, in the order of the clock within a life."""

    def __init__(self) -> None:
        self.slots: dict[str, Slot] = {}
        self.rollouts: list[Rollout] = []
        self.lost: list[Rollout] = []  # of which nothing is in the history
        self.commits: list[tuple[float, int]] = []  # that stand: when, step
        self.committed_s: list[float] = []  # all, superseded ones too
        self._start_s: float | None = None
        self._ranks: dict[str, float] = {}
        self._accepted: dict[int, list[Rollout]] = {}  # in no batch yet
        self._pending: dict[int, float] = {}  # issued, not accepted
        self._batches: dict[int, list[Rollout]] = {}  # sealed, to be trained, by step
        self._trained: dict[int, list[Rollout]] = {}  # committed, by step
        self._moved: dict[int, list[tuple[str, float, int]]] = defaultdict(list)
        self._shares: dict[int, set[str]] = {}  # by step, who trained it

    def add(self, event: Event) -> None:
        if self._start_s is None:
            self._start_s = event.mono_s
        name = event.name if event.role == "trainer" else str(event.data.get("subject", ""))
        if role_of(name) in ("trainer", "engine"):
            self._slot(name, event)
        self._job(event)

    # Slots ------------------------------------------------------------------------------

    def _slot(self, name: str, event: Event) -> None:
        role = str(role_of(name))
        if name not in self.slots:
            early = not self.committed_s
            since_s = self._start_s if early and self._start_s is not None else event.mono_s
            self.slots[name] = Slot(name, role, since_s, self._ranks.get(role, 1.0))
        slot = self.slots[name]
        if role == "trainer":
            self._trainer(slot, event)
        else:
            self._engine(slot, event)

    def _trainer(self, slot: Slot, event: Event) -> None:
        at_s = event.mono_s
        if event.role != "trainer":
            if event.kind is Kind.EXIT:
                slot.stop(at_s)
                slot.until_s = None if event.phase == "fault" else at_s
            elif event.kind is Kind.SPAWN:
                slot.until_s = None
            return
        if event.kind not in OF_A_RANK:
            return
        if slot.open_ is not None and event.pid != slot.pid:
            slot.stop(slot.last_s)  # nobody has told of its end
        slot.pid, slot.last_s, slot.until_s = event.pid, at_s, None
        if event.kind is Kind.PHASE and event.phase is not None:
            slot.enter(event.phase, at_s)
            self._attempt(slot, event.phase, event.step or 0, at_s)
        elif event.kind is Kind.REFUSE and slot.attempts:
            slot.attempts[-1].voted = False

    def _attempt(self, slot: Slot, phase: str, step: int, at_s: float) -> None:
        """`at_s`: the phase begins. The work of an attempt ends where the group waits again."""
        last = slot.attempts[-1] if slot.attempts else None
        running = last if last is not None and last.end_s == math.inf else None
        if running is None:
            if phase == "forward_backward":
                slot.attempts.append(Attempt(at_s, math.inf, step))
            elif phase in DUTIES and last is not None:  # one that came up while the group waited
                slot.attempts.append(Attempt(at_s, math.inf, last.step, voted=last.voted))
        elif phase not in WORK_PHASES:
            running.end_s = at_s
        elif phase in VOTED:
            running.voted = True

    def _engine(self, slot: Slot, event: Event) -> None:
        at_s = event.mono_s
        if event.kind is Kind.TRANSITION:
            new = str(event.data.get("new", ""))
            slot.enter(new, at_s)
            if new == "standby" and slot.away_s is None:
                slot.away_s = slot.since_s
        elif event.kind is Kind.EXIT:
            slot.leave(at_s)
        elif event.kind is Kind.LEND:
            if event.phase == "lend":
                slot.away_s = at_s
            else:
                slot.back(at_s)
        elif event.kind is Kind.PROMOTE:
            slot.back(at_s)
            lost = self.slots.get(str(event.cause or "").removeprefix("takes the place of "))
            if lost is not None:  # it is the spare from now on
                lost.away_s = at_s
                slot.places.append((lost.name, at_s))

    # The job ----------------------------------------------------------------------------

    def _job(self, event: Event) -> None:
        match event.kind:
            case Kind.RUN:
                self._run(event)
            case Kind.ISSUE:
                self._issue(event)
            case Kind.ACCEPT:
                self._accept(event)
            case Kind.DROP:
                self._drop(event)
            case Kind.MOVE:
                self._move(event)
            case Kind.SEAL:
                self._seal(event)
            case Kind.COMMIT:
                self._commit(event)
            case Kind.SUPERSEDE:
                self._supersede(event)
            case Kind.EXIT if event.data.get("subject") == "rollout":
                self._rollout_gone(event.mono_s)
            case Kind.EXIT if event.data.get("subject") == "serving":
                for slot in self.slots.values():
                    if slot.role == "engine":
                        slot.leave(event.mono_s)

    def _run(self, event: Event) -> None:
        if event.phase not in BEGINNINGS:
            return
        ranks = event.data.get("ranks")
        if isinstance(ranks, dict):
            self._ranks = {k: float(v) for k, v in ranks.items() if isinstance(v, int | float)}

    def _issue(self, event: Event) -> None:
        for group in issued(event):
            self._pending[group] = event.mono_s

    def _accept(self, event: Event) -> None:
        if (group := whole(event, "group")) is None:
            return
        issued_s = self._pending.pop(group, event.mono_s)
        took_s = number(event, "took_s")
        start_s = issued_s if took_s is None else event.mono_s - took_s
        moved = self._moved.pop(group, [])
        legs = _legs(group, event.data.get("trace"))
        if not legs:
            legs = [Rollout(group, min(start_s, event.mono_s), event.mono_s)]
            for engine, moved_s, tokens in moved:
                if not tokens:
                    self.lost.append(Rollout(group, min(start_s, moved_s), moved_s, (engine,)))
        self.lost += [leg for leg in legs if leg.empty]
        self._accepted[group] = [leg for leg in legs if not leg.empty]
        self.rollouts += self._accepted[group]

    def _drop(self, event: Event) -> None:
        if whole(event, "batch") is not None and event.step is not None:
            self.lost += self._batches.get(event.step, [])
            self._batches = moved_up(self._batches, event.step)
        for group in dropped(event):
            self._moved.pop(group, None)
            issued_s = self._pending.pop(group, None)
            if issued_s is not None:
                self.lost.append(Rollout(group, issued_s, event.mono_s))
            self.lost += self._accepted.pop(group, [])

    def _move(self, event: Event) -> None:
        found = _REQUEST.match(str(event.data.get("request", "")))
        if found is not None:
            tokens = whole(event, "tokens") or 0
            engine = str(event.data.get("subject", ""))
            self._moved[int(found[1])].append((engine, event.mono_s, tokens))

    def _rollout_gone(self, at_s: float) -> None:
        """What it had in flight is rolled out again."""
        for group, issued_s in self._pending.items():
            self.lost.append(Rollout(group, issued_s, at_s))
        self._pending = dict.fromkeys(self._pending, at_s)

    def _seal(self, event: Event) -> None:
        groups = wholes(event, "groups") or list(self._accepted)
        found = [leg for g in groups for leg in self._accepted.pop(g, [])]
        if event.step is not None:
            self._batches[event.step] = found

    def _commit(self, event: Event) -> None:
        if event.step is None:
            return
        self.commits.append((event.mono_s, event.step))
        self.committed_s.append(event.mono_s)
        self._shares[event.step] = set(words(event, "shares"))
        rollouts = self._batches.pop(event.step, [])
        for rollout in rollouts:
            rollout.kept = True
        self._trained.setdefault(event.step, []).extend(rollouts)

    def _supersede(self, event: Event) -> None:
        if (to_step := whole(event, "to_step")) is None:
            return
        self.commits = [c for c in self.commits if c[1] <= to_step]
        for step in [s for s in self._trained if s > to_step]:  # to be trained again
            self._batches[step] = self._trained.pop(step)
            for rollout in self._batches[step]:
                rollout.kept = False
        for slot in self.slots.values():
            for attempt in slot.attempts:
                if attempt.step > to_step:
                    attempt.voted = False

    def forget(self, until_s: float) -> None:
        """What was over by then; the commits stay."""
        self.rollouts = [r for r in self.rollouts if r.end_s > until_s]
        self.lost = [r for r in self.lost if r.end_s > until_s]
        self._trained = {
            step: [r for r in rollouts if r.end_s > until_s]
            for step, rollouts in self._trained.items()
            if any(r.end_s > until_s for r in rollouts)
        }
        attempted = {a.step for s in self.slots.values() for a in s.attempts if a.end_s > until_s}
        self._shares = {k: names for k, names in self._shares.items() if k in attempted}
        for slot in self.slots.values():
            slot.phases = [p for p in slot.phases if p.end_s > until_s]
            slot.away = [a for a in slot.away if a.end_s > until_s]
            slot.attempts = [a for a in slot.attempts if a.end_s > until_s]

    def settle(self) -> None:
        """Mark the attempts whose step is in the history."""
        steps = {step for _, step in self.commits}
        for slot in self.slots.values():
            for attempt in slot.attempts:
                shared = self._shares.get(attempt.step) or {slot.name}
                attempt.kept = attempt.voted and attempt.step in steps and slot.name in shared


def _legs(group: int, told: Any) -> list[Rollout]:
    """Of the times that ACCEPT brings with `observability.trace_samples`; none where it does not,
    or they cannot be read."""
    try:
        asked_s = told["started_s"] + told["at_ms"][0] / 1e3
        return [
            Rollout(
                group,
                asked_s + max(0.0, sent_ms) / 1e3,
                asked_s + max(sent_ms, end_ms) / 1e3,
                (str(engine),),
                empty=not tokens,
            )
            for sample in told["legs"]
            for engine, sent_ms, _, end_ms, tokens, *_ in sample
        ]
    except (KeyError, IndexError, TypeError, ValueError):
        return []
