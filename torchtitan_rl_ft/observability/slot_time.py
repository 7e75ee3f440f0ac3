"""What became of the time of each slot: a pure function of its work and of the outages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan_rl_ft.observability.outages import Outage
from torchtitan_rl_ft.observability.pauses import Pauses
from torchtitan_rl_ft.observability.slots import AT_WORK, Rollout, Slot, Slots
from torchtitan_rl_ft.observability.tracks import Segment, Track, newest, overlay, union

WORKS_ON = frozenset({"slow", "fail", "fill"})
"""Injected faults under which a process may get something done."""

CAUSES = ("detect", "restart", "reconnect", "redo", "wait")


@dataclass(frozen=True)
class Entry:
    """What became of a slice of a slot's time."""

    start_s: float
    end_s: float
    weight: float
    strict: bool
    paper: bool
    role: str  # whose loss it is, where it is lost
    cause: str

    @property
    def slot_s(self) -> float:
        return self.weight * (self.end_s - self.start_s)


@dataclass(frozen=True)
class _Lapse:
    """A phase of an outage."""

    outage: Outage
    phase: str


@dataclass(frozen=True)
class _Seen:
    """What is true of a slot during a slice."""

    absent: bool | None
    startup: bool | None
    useful: bool | None  # work whose output is in the history
    lost: bool | None  # work that was refused, superseded or thrown away
    phase: str | None  # of a trainer, or the state of an engine
    own: _Lapse | None
    unnoticed: _Lapse | None  # the loss of another trainer group
    job: _Lapse | None  # the newest of any process
    trainer: _Lapse | None
    rollout: _Lapse | None
    serving: _Lapse | None
    lighthouse: _Lapse | None
    stalled: bool | None  # for longer than usual nobody works


@dataclass(frozen=True)
class Bounds:
    since_s: float  # of what is asked for
    begin_s: float  # end of the start-up
    end_s: float
    calm: Sequence[tuple[float, float]]  # undisturbed steps
    pauses: Pauses = field(default_factory=Pauses)  # in earlier undisturbed steps


def entries_of(
    slots: Slots, outages: Sequence[Outage], bounds: Bounds
) -> tuple[list[Entry], list[Segment]]:
    """What became of the time of all slots, and the pauses in undisturbed steps."""
    slots.settle()
    start_s, begin_s, end_s = bounds.since_s, bounds.begin_s, bounds.end_s
    outages = [o for o in outages if o.until_s >= start_s]
    all_ = list(slots.slots.values())
    of_role = [
        _lapses(o for o in outages if o.role in roles)
        for roles in (("trainer",), ("rollout",), ("serving", "gateway"), ("lighthouse",))
    ]
    unseen = union(
        Segment(o.began_s, o.until_s)
        for o in outages
        if o.role in ("rollout", "serving") and o.injected not in WORKS_ON
    )
    rolled = _Rolled.of(slots, unseen)
    work = {s.name: _work(s, rolled, end_s) for s in all_}
    progress = union(seg for done in work.values() for seg in done.running)
    pauses = _pauses(progress, max(start_s, begin_s), end_s)
    calm = _within_one(bounds.calm, pauses)
    usual_s = bounds.pauses.with_more(p.end_s - p.start_s for p in calm).usual_s() or 0.0
    stalls = [p for p in pauses if p.end_s - p.start_s > usual_s]
    shared = [_lapses(outages), *of_role, stalls]
    startup = [Segment(start_s, begin_s)] if begin_s > start_s else []
    found = []
    for slot in all_:
        since_s, done = max(start_s, slot.since_s), work[slot.name]
        own = _lapses(o for o in outages if _is_own(slot, o))
        of_slot = [slot.absent(end_s), startup, done.useful, done.lost, slot.shown(end_s), own]
        of_slot.append(_unnoticed(outages, slot.name))
        if since_s >= end_s:
            continue
        for part in overlay(since_s, end_s, [*of_slot, *shared]):
            seen = _Seen(*part.values)
            if not seen.absent:
                found.append(_judge(slot, seen, part.start_s, part.end_s))
    return found, calm


def _pauses(progress: Track, since_s: float, until_s: float) -> list[Segment]:
    """When nobody works."""
    edges = [since_s, *(t for s in progress for t in s[:2]), until_s]
    gaps = (
        Segment(max(a, since_s), min(b, until_s))
        for a, b in zip(edges[::2], edges[1::2], strict=True)
    )
    return [g for g in gaps if g.end_s > g.start_s]


def _within_one(steps: Iterable[tuple[float, float]], pauses: Iterable[Segment]) -> list[Segment]:
    """The pauses that lie in undisturbed steps."""
    found, i = [], 0
    calm = union(Segment(a, b) for a, b in steps)
    for pause in pauses:
        while i < len(calm) and calm[i].end_s < pause.end_s:
            i += 1
        if i < len(calm) and calm[i].start_s <= pause.start_s:
            found.append(pause)
    return found


def _lapses(outages: Iterable[Outage]) -> list[Segment]:
    """At each time the phase of the outage that began last."""
    found = []
    for start_s, end_s, outage in newest(Segment(o.began_s, o.until_s, o) for o in outages):
        for phase, since_s, until_s in outage.spans:
            since_s, until_s = max(since_s, start_s), min(until_s, end_s)
            if until_s > since_s:
                found.append(Segment(since_s, until_s, _Lapse(outage, phase)))
    return found


def _unnoticed(outages: Iterable[Outage], but: str) -> list[Segment]:
    """When a trainer group is lost and nobody knows."""
    others = [o for o in outages if o.role == "trainer" and o.name != but and o.phase_s["detect"]]
    return newest(
        Segment(o.began_s, o.began_s + o.phase_s["detect"], _Lapse(o, "detect")) for o in others
    )


def _is_own(slot: Slot, outage: Outage) -> bool:
    """Its own, or that of a slot whose place it has taken."""
    if outage.name == slot.name:
        return True
    taken_s = [at_s for name, at_s in slot.places if name == outage.name]
    return any(outage.began_s <= at_s <= outage.until_s for at_s in taken_s)


@dataclass(frozen=True)
class _Work:
    useful: list[Segment]
    lost: list[Segment]
    running: list[Segment]  # work that may come to something, or has


class _ByEngine:
    """When rollouts were under way, in which engine."""

    def __init__(self, rollouts: Iterable[Rollout], unseen: Track) -> None:
        known, guessed = defaultdict(list), []
        for r in rollouts:
            span = Segment(r.start_s, r.end_s)
            for engine in r.engines:
                known[engine].append(span)
            if not r.engines:
                guessed.append(span)
        self._known = known
        self._guessed = _without(union(guessed), unseen)

    def of(self, engine: str) -> list[Segment]:
        return union([*self._known.get(engine, ()), *self._guessed])


@dataclass(frozen=True)
class _Rolled:
    kept: _ByEngine
    lost: _ByEngine
    all: _ByEngine

    @classmethod
    def of(cls, slots: Slots, unseen: Track) -> _Rolled:
        """`unseen`: when nobody could have told that a prompt group is done."""
        return cls(
            _ByEngine((r for r in slots.rollouts if r.kept), unseen),
            _ByEngine(slots.lost, unseen),
            _ByEngine([*slots.rollouts, *slots.lost], unseen),
        )


def _work(slot: Slot, rolled: _Rolled, end_s: float) -> _Work:
    if slot.role == "trainer":
        spans = [(Segment(a.start_s, min(a.end_s, end_s)), a) for a in slot.attempts]
        useful = union(s for s, a in spans if a.kept)
        lost = union(s for s, a in spans if not a.kept and a.end_s <= end_s)
        return _Work(useful, lost, useful)
    at_work = [s for s in slot.shown(end_s) if s.value in AT_WORK]

    def done(rollouts: _ByEngine) -> list[Segment]:
        return _within(at_work, rollouts.of(slot.name))

    return _Work(done(rolled.kept), done(rolled.lost), done(rolled.all))


def _within(outer: Track, inner: Track) -> list[Segment]:
    return _pick(outer, inner, lambda a, b: a is not None and b is not None)


def _without(outer: Track, holes: Track) -> list[Segment]:
    return _pick(outer, holes, lambda a, b: a is not None and b is None)


def _pick(outer: Track, other: Track, wanted: Callable[[Any, Any], bool]) -> list[Segment]:
    if not outer:
        return []
    parts = overlay(outer[0].start_s, outer[-1].end_s, [outer, other])
    return [Segment(p.start_s, p.end_s) for p in parts if wanted(*p.values)]


def _judge(slot: Slot, seen: _Seen, start_s: float, end_s: float) -> Entry:
    def entry(strict: bool, paper: bool, role: str = "", cause: str = "") -> Entry:
        return Entry(start_s, end_s, slot.weight, strict, paper, role, cause)

    def charged(lapse: _Lapse) -> Entry:
        return entry(False, False, lapse.outage.role, lapse.phase)

    own = seen.own
    if seen.startup:
        return entry(False, False, slot.role, "wait")
    if own is not None and own.outage.injected not in WORKS_ON and own.phase != "redo":
        return charged(own)
    if (peer := _held_up_by(slot, seen)) is not None:
        return charged(peer)
    if seen.useful:
        return entry(True, True)
    if seen.lost:
        lapse = own or seen.job
        role = slot.role if lapse is None else lapse.outage.role
        return entry(False, slot.role == "engine", role, "redo")
    if own is not None:
        return charged(own)
    if (needed := _needed(slot, seen)) is not None:
        return charged(needed)
    return entry(False, True, slot.role, "wait")


def _held_up_by(slot: Slot, seen: _Seen) -> _Lapse | None:
    """The outage for which a trainer group waits in the middle of its work: of a peer whose loss
    is not yet noticed, or of a role that does not answer."""
    if slot.role != "trainer":
        return None
    lapse = None
    if seen.phase in ("reduce", "commit"):
        lapse = seen.unnoticed
    elif seen.phase in ("report", "checkpoint"):
        lapse = seen.rollout
    elif seen.phase == "publish":
        lapse = seen.serving or seen.rollout
    return None if lapse is None or lapse.outage.injected in WORKS_ON else lapse


def _needed(slot: Slot, seen: _Seen) -> _Lapse | None:
    """The outage for which an idle slot waits: of what it cannot do without, or of whatever it
    is while the whole job stands still."""
    needs = [seen.rollout]
    if slot.role == "engine":
        needs.append(seen.serving)
    elif seen.phase == "quorum":
        needs += [seen.lighthouse, seen.trainer]
    if seen.stalled:
        needs.append(seen.job)
    return next((o for o in needs if o is not None), None)
