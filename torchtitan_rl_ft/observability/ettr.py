"""Effective training time ratio: a pure function of the events of a run.

A **slot** is a place of work: a trainer group's (it weighs as much as it has ranks) or an
engine's. Two definitions, side by side:

* `paper` (RobustRL, OSDI '26; ByteRobust, SOSP '25: productive time / wall time of the job): a
  second counts while the job makes progress. All stages of compute count, and rollout that is done
  again. While some slots recover, those count in which work goes on: with all trainers gone and
  rollouts running that is the paper's rollouts / (rollouts + trainers).
* `strict`: slot-seconds whose output is in the committed history / all slot-seconds. Work that was
  refused, superseded or thrown away does not count, a slot that waits neither.

Start-up counts in neither. What a slot loses has a cause: the phase of an outage (`detect`,
`restart`, `reconnect`, `redo`) and the role that had it, or `wait` and its own role.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torchtitan_rl_ft.observability.events import Event, Kind
from torchtitan_rl_ft.observability.lives import lives
from torchtitan_rl_ft.observability.outages import Outage, Outages
from torchtitan_rl_ft.observability.pauses import Pauses
from torchtitan_rl_ft.observability.slot_time import CAUSES, Bounds, Entry, entries_of
from torchtitan_rl_ft.observability.slots import Slots
from torchtitan_rl_ft.observability.tracks import Segment, Track, union

DISTURBANCES = frozenset({Kind.REFUSE, Kind.HEAL, Kind.SUPERSEDE})
"""Of a step in which one of these, or an outage, falls nothing is learned of undisturbed steps."""


@dataclass(frozen=True)
class Figure:
    ratio: float
    after_startup: float  # of the time after start-up alone
    fault_free: float | None
    """The ratio had every step been like the undisturbed ones; None when there was none."""

    lost_s: dict[str, dict[str, float]]
    """Slot-seconds by the role whose outage it was (`wait`: that waited) and by cause. In sum
    (1 - ratio) * slot-seconds."""


@dataclass(frozen=True)
class Ettr:
    """Seconds of the host's monotonic clock."""

    wall_s: float  # from the start to the last commit, or to the end of what came after it
    startup_s: float
    step_s: float | None  # median undisturbed step
    steps: int
    slots: dict[str, float]  # weight by name
    slot_s: float  # slot-seconds in all, weighted
    strict: Figure
    paper: Figure
    outages: list[Outage] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        plain = {k: v for k, v in self.__dict__.items() if k != "outages"}
        plain |= {"strict": asdict(self.strict), "paper": asdict(self.paper)}
        return plain | {"outages": [o.to_json() for o in self.outages]}


@dataclass(frozen=True)
class EttrSample:
    """At one moment: of all time since the start, and of the window before it."""

    at_s: float  # since the start of the life
    strict: float
    paper: float
    strict_window: float
    paper_window: float


def measure(events: Iterable[Event], *, whole_run: bool = False) -> Ettr | None:
    """Of the last life of the run, or from its first start on with what lay between its lives.
    None before the first commit."""
    settled = _settled(events, whole_run=whole_run)
    return None if settled is None else settled.ettr()


def samples(events: Iterable[Event], window_s: float, every_s: float) -> list[EttrSample]:
    """Of the last life, every `every_s` of it and at its end. Raises ValueError."""
    if not (window_s > 0 and every_s > 0):
        raise ValueError(f"window ({window_s:g} s) and interval ({every_s:g} s) must be above 0")
    settled = _settled(events)
    return [] if settled is None else settled.samples(window_s, every_s)


def _settled(events: Iterable[Event], *, whole_run: bool = False) -> Settled | None:
    found = Accounts()
    of_lives = [life.events for life in lives(events)]
    for event in itertools.chain.from_iterable(of_lives if whole_run else of_lives[-1:]):
        found.add(event)
    return found.settled() if found.slots.committed_s else None


class Accounts:
    """Fed event by event, in the order of the clock."""

    def __init__(self) -> None:
        self.slots, self._outages = Slots(), Outages()
        self._past = Past()
        self._disturbed_s: list[float] = []
        self._work_s: float | None = None  # the first prompts went out, or the first step began
        self._start_s: float | None = None
        self._last_s = 0.0

    def add(self, event: Event) -> None:
        if self._start_s is None:
            self._start_s = event.mono_s
        self.slots.add(event)
        self._outages.add(event)
        self._last_s = max(self._last_s, event.mono_s)
        if event.kind in DISTURBANCES and self.slots.committed_s:
            self._disturbed_s.append(event.mono_s)
        works = event.kind in (Kind.ISSUE, Kind.QUORUM, Kind.BEGIN, Kind.COMMIT)
        if works and self._work_s is None:
            self._work_s = event.mono_s

    def settled(self) -> Settled:
        """Needs a commit."""
        past, outages = self._past, self._outages.all()
        ends_s = self.slots.committed_s
        start_s = self._start_s or 0.0
        work_s = start_s if self._work_s is None else self._work_s
        begin_s = min(max(start_s, work_s), max(start_s, ends_s[0]))
        # A fault that came after the last commit counts until it is over.
        after_s = [o.until_s for o in outages if o.until_s > ends_s[-1]]
        end_s = min(max([ends_s[-1], *after_s]), self._last_s)
        since_s = start_s if past.until_s is None else past.until_s
        bad = [Segment(o.began_s, max(o.until_s, o.began_s + _MOMENT_S)) for o in outages]
        bad += [Segment(t, t + _MOMENT_S) for t in self._disturbed_s]
        calm = _calm([begin_s, *ends_s][past.commits :], union(bad))
        bounds = Bounds(since_s, begin_s, end_s, calm, past.pauses)
        entries, pauses = entries_of(self.slots, outages, bounds)
        return Settled(
            start_s=start_s,
            begin_s=begin_s,
            end_s=end_s,
            steps=len({step for _, step in self.slots.commits}),
            calm=calm,
            entries=entries,
            pauses=pauses,
            outages=outages,
            weights={s.name: s.weight for s in self.slots.slots.values()},
            past=past,
        )

    def compact(self, keep_s: float, least_s: float = 0.0) -> None:
        """Sum up what is older than `keep_s`, when that is more than `least_s`, and forget it. What
        follows costs no more however long the run gets; a rewind no longer changes what it was."""
        ends_s = self.slots.committed_s
        count = bisect.bisect_right(ends_s, self._last_s - keep_s)
        since_s = self._start_s if self._past.until_s is None else self._past.until_s
        if count <= self._past.commits or ends_s[count - 1] - (since_s or 0.0) < least_s:
            return
        settled, until_s = self.settled(), ends_s[count - 1]
        self._past = self._past.with_more(settled, until_s, count)
        self._disturbed_s = [t for t in self._disturbed_s if t >= until_s]
        self.slots.forget(until_s)


@dataclass(frozen=True)
class Past:
    """What was summed up."""

    until_s: float | None = None  # None: nothing
    commits: int = 0
    entries: list[Entry] = field(default_factory=list)
    calm_s: list[float] = field(default_factory=list)  # how long the undisturbed steps took
    calm_slot_s: tuple[float, float, float] = (0.0, 0.0, 0.0)  # all, strict, paper
    pauses: Pauses = field(default_factory=Pauses)  # in undisturbed steps

    def with_more(self, settled: Settled, until_s: float, commits: int) -> Past:
        since_s = settled.start_s if self.until_s is None else self.until_s
        bounds_s = sorted({since_s, min(max(settled.begin_s, since_s), until_s), until_s})
        more = [
            entry
            for start_s, end_s in itertools.pairwise(bounds_s)
            for entry in _summed(settled.entries, start_s, end_s)
        ]
        calm = [c for c in settled.calm if c[1] <= until_s]
        slot_s, strict = _Sums(settled.entries, "strict").sums(calm)
        _, paper = _Sums(settled.entries, "paper").sums(calm)
        a, b, c = self.calm_slot_s
        return Past(
            until_s,
            commits,
            self.entries + more,
            self.calm_s + [end_s - start_s for start_s, end_s in calm],
            (a + slot_s, b + strict, c + paper),
            self.pauses.with_more(
                q.end_s - q.start_s for q in settled.pauses if q.end_s <= until_s
            ),
        )


def _summed(entries: Iterable[Entry], start_s: float, end_s: float) -> list[Entry]:
    """An entry for each thing that became of the time between."""
    slot_s: dict[tuple[bool, bool, str, str], float] = defaultdict(float)
    for e in entries:
        inside_s = min(e.end_s, end_s) - max(e.start_s, start_s)
        if inside_s > 0:
            slot_s[(e.strict, e.paper, e.role, e.cause)] += e.weight * inside_s
    return [Entry(start_s, end_s, s / (end_s - start_s), *what) for what, s in slot_s.items()]


@dataclass(frozen=True)
class Settled:
    """The time of all slots, accounted for."""

    start_s: float
    begin_s: float  # end of the start-up
    end_s: float
    steps: int
    calm: list[tuple[float, float]]  # steps without a fault
    entries: list[Entry]
    pauses: list[Segment]  # in which nobody works, in undisturbed steps
    outages: list[Outage]
    weights: dict[str, float]
    past: Past

    @functools.cached_property
    def all_entries(self) -> list[Entry]:
        return self.past.entries + self.entries

    @functools.cached_property
    def _sums(self) -> dict[str, _Sums]:
        return {kind: _Sums(self.all_entries, kind) for kind in ("strict", "paper")}

    @property
    def calm_s(self) -> list[float]:
        return self.past.calm_s + [b - a for a, b in self.calm]

    def ettr(self) -> Ettr:
        return Ettr(
            wall_s=self.end_s - self.start_s,
            startup_s=self.begin_s - self.start_s,
            step_s=statistics.median(self.calm_s) if self.calm_s else None,
            steps=self.steps,
            slots=self.weights,
            slot_s=math.fsum(e.slot_s for e in self.all_entries),
            strict=self._figure("strict"),
            paper=self._figure("paper"),
            outages=self.outages,
        )

    def _figure(self, kind: str) -> Figure:
        entries = self.all_entries
        sums = self._sums[kind]
        lost_s: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(CAUSES, 0.0))
        for entry in entries:
            if not getattr(entry, kind):
                lost_s[entry.role][entry.cause] += entry.slot_s
        return Figure(
            ratio=sums.ratio([(self.start_s, self.end_s)]),
            after_startup=sums.ratio([(self.begin_s, self.end_s)]),
            fault_free=self._fault_free(sums, kind),
            lost_s={role: lost_s[role] for role in sorted(lost_s)},
        )

    def _fault_free(self, sums: _Sums, kind: str) -> float | None:
        """Start-up, and as many steps as there are, each like the mean undisturbed one. Few of them
        may have been slower than the disturbed ones: not less than without what faults took."""
        if not self.calm_s:
            return None
        all_slot_s, *counted = self.past.calm_slot_s
        slot_s, counted_s = sums.sums(self.calm)
        slot_s, counted_s = slot_s + all_slot_s, counted_s + counted[kind == "paper"]
        steps_s = self.steps * statistics.fmean(self.calm_s)
        total_s = self.begin_s - self.start_s + steps_s
        if total_s <= 0:
            return None
        like_calm = min(1.0, counted_s / slot_s) * steps_s / total_s if slot_s > 0 else 0.0
        return max(like_calm, self._without_losses(sums, kind))

    def _without_losses(self, sums: _Sums, kind: str) -> float:
        """The ratio without the slot-seconds that outages took."""
        slot_s, counted_s = sums.sums([(self.start_s, self.end_s)])
        slot_s -= math.fsum(
            e.slot_s for e in self.all_entries if e.cause != "wait" and not getattr(e, kind)
        )
        return min(1.0, max(0.0, counted_s / slot_s)) if slot_s > 0 else 0.0

    def samples(self, window_s: float, every_s: float) -> list[EttrSample]:
        strict, paper = self._sums["strict"], self._sums["paper"]
        count = math.ceil((self.end_s - self.start_s) / every_s - 1e-9)
        found = []
        for i in range(1, count + 1):
            at_s = min(self.start_s + i * every_s, self.end_s)
            whole, window = [(self.start_s, at_s)], [(max(self.start_s, at_s - window_s), at_s)]
            found.append(
                EttrSample(
                    at_s - self.start_s,
                    strict.ratio(whole),
                    paper.ratio(whole),
                    strict.ratio(window),
                    paper.ratio(window),
                )
            )
        return found


_MOMENT_S = 1e-9


def _calm(bounds_s: Sequence[float], bad: Track) -> list[tuple[float, float]]:
    """The intervals between bounds in which nothing bad is."""
    found, i = [], 0
    for since_s, until_s in itertools.pairwise(bounds_s):
        while i < len(bad) and bad[i].end_s <= since_s:
            i += 1
        if until_s >= since_s and not (i < len(bad) and bad[i].start_s < until_s):
            found.append((since_s, until_s))
    return found


class _Sums:
    """Shares of slot-seconds over any interval."""

    def __init__(self, entries: Sequence[Entry], kind: str) -> None:
        changes: dict[float, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for entry in entries:
            counted = entry.weight if getattr(entry, kind) else 0.0
            for at_s, sign in ((entry.start_s, 1.0), (entry.end_s, -1.0)):
                changes[at_s][0] += sign * entry.weight
                changes[at_s][1] += sign * counted
        self._at_s = sorted(changes)
        self._rates = list(itertools.accumulate((changes[t] for t in self._at_s), _plus))
        self._sums = [[0.0, 0.0]]
        for i in range(1, len(self._at_s)):
            d_s = self._at_s[i] - self._at_s[i - 1]
            before = zip(self._sums[-1], self._rates[i - 1], strict=True)
            self._sums.append([s + d_s * r for s, r in before])

    def ratio(self, intervals: Iterable[tuple[float, float]]) -> float:
        """Counted over all slot-seconds, 0 when there are none."""
        total, counted = self.sums(intervals)
        return min(1.0, max(0.0, counted / total)) if total > 0 else 0.0

    def sums(self, intervals: Iterable[tuple[float, float]]) -> tuple[float, float]:
        """All slot-seconds, and those that count."""
        total = counted = 0.0
        for since_s, until_s in intervals:
            (a, b), (c, d) = self._until(since_s), self._until(until_s)
            total, counted = total + c - a, counted + d - b
        return total, counted

    def _until(self, at_s: float) -> list[float]:
        i = bisect.bisect_right(self._at_s, at_s) - 1
        if i < 0:
            return [0.0, 0.0]
        d_s = at_s - self._at_s[i]
        return [s + d_s * r for s, r in zip(self._sums[i], self._rates[i], strict=True)]


def _plus(a: list[float], b: list[float]) -> list[float]:
    return [a[0] + b[0], a[1] + b[1]]
