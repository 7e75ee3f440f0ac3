"""One Perfetto trace of a run, made of its events and metrics alone (`torchtitan report --trace`).

Each process of the run has a track with its phases (trainers, rollout) or states (engines); steps,
batches and prompt groups have tracks with arrows from one to the next, each sample an asynchronous
track (`sample_trace.py`), each fault a slice with its phases (`outages.py`). The events are read
once, in the order of the file, and written as they come: kept are a few numbers of each step, and
the prompt groups of the last ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.observability.event_data import whole, wholes
from torchtitan_rl_ft.observability.events import Event, Kind, first_line
from torchtitan_rl_ft.observability.fault_trace import FaultTrace
from torchtitan_rl_ft.observability.lives import BEGINNINGS
from torchtitan_rl_ft.observability.sample_trace import SampleTrace
from torchtitan_rl_ft.observability.timeline import Timeline
from torchtitan_rl_ft.observability.trace_format import (
    NO_ARGS,
    Args,
    Process,
    TraceFile,
    Track,
    writing,
)

INSTANTS = frozenset(
    {
        Kind.FAULT,
        Kind.WARN,
        Kind.ANOMALY,
        Kind.CHAOS,
        Kind.RESTART,
        Kind.ESCALATE,
        Kind.REFUSE,
        Kind.QUORUM,
        Kind.HEAL,
        Kind.PUBLISH,
        Kind.LEND,
        Kind.PROMOTE,
        Kind.MOVE,
        Kind.PARTIAL,
        Kind.DROP,
        Kind.CHECKPOINT,
        Kind.RESTORE,
        Kind.DUMP,
        Kind.EVAL,
        Kind.SESSION,
        Kind.STOP,
    }
)
"""Shown at their time on the track of the process that they are about."""

COUNTED = {
    "reward": ("reward/mean",),
    "policy age": ("policy_age/mean", "policy_age/max"),
    "ETTR": ("ettr/strict", "ettr/paper"),
}
"""Counters, of metrics.jsonl."""


@dataclass
class _Life:
    """One process in the name of a role."""

    track: Track
    pid: int
    phase: str | None = None  # of the innermost open slice
    over: bool = False


@dataclass
class _Role:
    """All lives of one name."""

    process: Process
    lives: list[_Life] = field(default_factory=list)
    installs: Track | None = None

    @property
    def last(self) -> _Life | None:
        return self.lives[-1] if self.lives else None


@dataclass(frozen=True)
class TraceReport:
    """What was written."""

    events: int
    samples: int
    steps: int
    superseded: int
    faults: int
    lives: int
    clocks: int
    wall_jumps: int

    def line(self) -> str:
        parts = [f"{self.steps} steps", f"{self.samples} samples", f"{self.events} events"]
        if self.faults:
            parts.append(f"{self.faults} faults")
        if self.superseded:
            parts.append(f"{self.superseded} steps superseded")
        if self.clocks > 1:
            parts.append(f"{self.clocks} clocks, one after the other")
        return ", ".join(parts)


class RunTrace:
    """Fed event by event; `close` ends what is open."""

    def __init__(self, file: TraceFile, metrics: Iterable[Mapping[str, Any]]) -> None:
        self._file, self._timeline = file, Timeline()
        self._job = file.process("job")
        self._steps, self._marks = self._job.track("steps"), self._job.track("lives, warnings")
        self._faults = FaultTrace(file.process("faults"))
        self._sample_trace = SampleTrace(file, self._timeline)
        self._roles: dict[str, _Role] = {}
        self._metrics = _by_commit(metrics)
        self._now_us = self._since_us = 0
        self._trained: set[int] = set()
        self._held: dict[str, float] = {"accepted": 0, "sealed": 0}
        self._serving: set[str] = set()
        self._counts = {"events": 0, "superseded": 0, "lives": 0, "steps": 0}

    def add(self, event: Event) -> None:
        clocks = self._timeline.clocks
        told = self._timeline.add(event)
        if self._timeline.clocks != clocks:
            self._faults.write(self._timeline.former_us)
        self._faults.add(event)
        at_us = self._timeline.us(event.mono_s)
        if told is not None:
            self._marks.instant(at_us, told, scope="g")
        if event.kind is Kind.RUN:
            self._run(event, at_us)
        self._now_us = max(self._now_us, at_us)
        self._counts["events"] += 1
        match event.kind:
            case Kind.PHASE:
                self._phase(event, at_us)
            case Kind.SPAWN:
                self._spawn(event, at_us)
            case Kind.READY:
                self._ready(event, at_us)
            case Kind.EXIT:
                self._exit(event, at_us)
            case Kind.TRANSITION:
                self._transition(event, at_us)
            case Kind.INSTALL:
                self._install(event, at_us)
            case Kind.SUPERSEDE:
                self._supersede(event, at_us)
            case Kind.ACCEPT | Kind.SEAL | Kind.COMMIT:
                self._batches(event, at_us)
            case Kind.DROP:
                self._sample_trace.drop(event)
            case _:
                pass
        if event.kind in INSTANTS:
            self._instant(event, at_us)

    def close(self) -> TraceReport:
        for role in self._roles.values():
            for life in role.lives:
                life.track.end_all(self._now_us, {"unfinished": True} if not life.over else {})
        self._sample_trace.close(self._now_us)
        self._faults.write(self._timeline.us)
        self._marks.end_all(self._now_us)
        return TraceReport(
            **self._counts,
            samples=self._sample_trace.samples,
            faults=self._faults.written,
            clocks=self._timeline.clocks,
            wall_jumps=self._timeline.wall_jumps,
        )

    # Processes ----------------------------------------------------------------------------

    def _role(self, name: str) -> _Role:
        if name not in self._roles:
            self._roles[name] = _Role(self._file.process(name))
        return self._roles[name]

    def _life(self, name: str, pid: int | None, at_us: int, args: Mapping[str, Any]) -> _Life:
        """That of process `pid`; the one before it in this name is over."""
        role = self._role(name)
        for life in reversed(role.lives):
            if pid is None or life.pid == pid:
                return life
        if role.last is not None:
            self._end(role.last, at_us)
        number = len(role.lives) + 1
        track = role.process.track(f"{name}, life {number}, process {pid}")
        track.begin(at_us, f"life {number}", args)
        role.lives.append(_Life(track, pid or 0))
        return role.lives[-1]

    def _enter(self, life: _Life, at_us: int, phase: str, args: Mapping[str, Any]) -> None:
        if life.phase is not None:
            life.track.end(at_us)
        life.track.begin(at_us, phase, args)
        life.phase, life.over = phase, False

    def _end(self, life: _Life, at_us: int, args: Args = NO_ARGS) -> None:
        while life.track.depth > 1:
            life.track.end(at_us)
        if life.track.depth:
            life.track.end(at_us, args)
        life.phase, life.over = None, True

    def _of(self, event: Event, at_us: int) -> _Life:
        """The life that writes the event."""
        life = self._life(event.name, event.pid, at_us, {"attempt": event.attempt})
        if life.over:  # told of its end before its last word was
            life.track.begin(at_us, "after its end")
            life.over = False
        return life

    def _spawn(self, event: Event, at_us: int) -> None:
        name, pid = str(event.data.get("subject", event.name)), event.data.get("pid")
        life = self._life(name, pid if isinstance(pid, int) else None, at_us, event.data)
        if life.phase is None and event.phase is None and not life.over:
            self._enter(life, at_us, "starting", {})

    def _ready(self, event: Event, at_us: int) -> None:
        name = str(event.data.get("subject", event.name))
        life = self._role(name).last
        if life is not None and life.phase == "starting":
            self._enter(life, at_us, "up", event.data)

    def _phase(self, event: Event, at_us: int) -> None:
        args = {} if event.step is None else {"step": event.step}
        self._enter(self._of(event, at_us), at_us, event.phase or "?", args)

    def _exit(self, event: Event, at_us: int) -> None:
        name, pid = str(event.data.get("subject", event.name)), event.data.get("pid")
        args = {"end": event.cause, **event.data}
        for life in self._role(name).lives:
            if life.pid == pid and not life.over:
                self._end(life, at_us, args)
        self._serving.discard(name)
        if event.phase == "fault":
            self._mark(name, at_us, f"ended: {first_line(event.cause)}", args)

    def _transition(self, event: Event, at_us: int) -> None:
        name = str(event.data.get("subject", event.name))
        new = str(event.data.get("new", "?"))
        life = self._role(name).last or self._life(name, None, at_us, {})
        if life.over:
            return
        args = {"cause": event.cause, "version": event.version}
        self._enter(life, at_us, new, {k: v for k, v in args.items() if v is not None})
        before = len(self._serving)
        (self._serving.add if new == "serving" else self._serving.discard)(name)
        if len(self._serving) != before:
            self._job.counter(at_us, "engines that serve", {"engines": len(self._serving)})

    def _install(self, event: Event, at_us: int) -> None:
        name = str(event.data.get("subject", event.name))
        role = self._role(name)
        if role.installs is None:
            role.installs = role.process.track(f"{name}, installs")
        took_ms = event.data.get("paused_ms")
        took_us = round(took_ms * 1e3) if isinstance(took_ms, int | float) else 0
        role.installs.slice(at_us - took_us, at_us, f"version {event.version}", event.data)
        if event.version is not None:
            self._job.counter(at_us, "policy version", {"installed": event.version})

    def _instant(self, event: Event, at_us: int) -> None:
        about = [event.phase, event.data.get("replica_id"), first_line(event.cause)]
        words = [str(w) for w in about if w not in (None, "")]
        name = str(event.data.get("subject", event.name))
        args = {"step": event.step, "version": event.version, **event.data}
        shown = f"{event.kind}: {' '.join(words)}"[:120] if words else str(event.kind)
        self._mark(name, at_us, shown, {k: v for k, v in args.items() if v is not None})

    def _mark(self, name: str, at_us: int, shown: str, args: Mapping[str, Any]) -> None:
        role = self._roles.get(name)
        track = role.last.track if role is not None and role.last is not None else self._marks
        track.instant(at_us, shown, args)

    # The job ------------------------------------------------------------------------------

    def _run(self, event: Event, at_us: int) -> None:
        if event.phase not in BEGINNINGS:
            self._marks.end_all(at_us, {"outcome": event.cause, **event.data})
            return
        killed = self._marks.depth > 0
        outcome = {"outcome": "its supervisor was killed"} if killed else {}
        self._marks.end_all(self._now_us, outcome)
        for name, role in self._roles.items():
            if event.phase == "reattach" and (name.startswith("engine") or name == "serving"):
                continue  # they outlive a job
            for life in role.lives:
                if not life.over:
                    self._end(life, self._now_us, outcome)
        self._counts["lives"] += 1
        self._marks.begin(at_us, f"life {self._counts['lives']}: {event.phase}", event.data)
        self._since_us = at_us

    def _batches(self, event: Event, at_us: int) -> None:
        held = self._held
        if event.kind is Kind.ACCEPT:
            self._sample_trace.accept(event)
            held["accepted"] += 1
        elif event.kind is Kind.SEAL:
            self._sample_trace.seal(event)
            held["accepted"] = max(0, held["accepted"] - len(wholes(event, "groups")))
            held["sealed"] += 1
        else:
            held["sealed"] = max(0, held["sealed"] - 1)
            self._commit(event, at_us)
        if event.kind is not Kind.ACCEPT:
            shown = {"accepted groups": held["accepted"], "sealed batches": held["sealed"]}
            self._job.counter(at_us, "buffer", shown)

    def _commit(self, event: Event, at_us: int) -> None:
        step = event.step or 0
        again = " again" if step in self._trained else ""
        self._trained.add(step)
        self._counts["steps"] += 1
        args = {k: v for k, v in event.data.items() if k != "token"}
        began_us, ended_us = self._steps.slice(
            min(self._since_us, at_us), at_us, f"step {step}{again}", args
        )
        self._since_us = ended_us
        self._sample_trace.commit(event, began_us, self._steps)
        row = self._metrics.get((step, whole(event, "batch")))
        for name, values in (row or {}).items():
            self._job.counter(at_us, name, values)

    def _supersede(self, event: Event, at_us: int) -> None:
        last, first = event.data.get("from_step"), event.data.get("to_step")
        if isinstance(last, int) and isinstance(first, int):
            self._counts["superseded"] += max(0, last - first)
            self._held["sealed"] += max(0, last - first)
        shown = f"superseded: steps after {first} are trained again"
        self._steps.instant(at_us, shown, {"cause": event.cause, **event.data}, scope="g")


def _by_commit(
    metrics: Iterable[Mapping[str, Any]],
) -> dict[tuple[Any, Any], dict[str, dict[str, float]]]:
    """Values of the counters by (step, batch)."""
    found = {}
    for row in metrics:
        counters = {}
        for name, keys in COUNTED.items():
            values = {k: row[k] for k in keys if isinstance(row.get(k), int | float)}
            if values:
                counters[name] = values
        step, batch = row.get("step"), row.get("batch")
        if isinstance(step, int) and isinstance(batch, int | None):
            found[step, batch] = counters
    return found


def write_trace(
    path: Path,
    events: Iterable[Event],
    metrics: Iterable[Mapping[str, Any]],
    about: Mapping[str, Any],
) -> TraceReport:
    """Write the trace of a run to `path`, compressed when its name ends in .gz. Raises OSError."""
    told = dict(about)
    with writing(path, told) as file:
        trace = RunTrace(file, metrics)
        for event in events:
            trace.add(event)
        report = trace.close()
        told |= {
            "lives": report.lives,
            "clocks": report.clocks,
            "wall_clock_was_set": report.wall_jumps,
            "superseded_steps": report.superseded,
        }
    return report
