"""The present state of a run, folded from the lines of events.jsonl and metrics.jsonl: what the
console, `torchtitan status`, the status page and /metrics show.

A line costs microseconds, and the memory is bounded: curves are thinned, of events the last are
kept.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torchtitan_rl_ft.observability.curve import Curve
from torchtitan_rl_ft.observability.events import Kind
from torchtitan_rl_ft.observability.fault_count import FaultCount
from torchtitan_rl_ft.observability.run_members import (
    BETWEEN_VERSIONS,
    NOT_UP,
    SERVING,
    Members,
    reason_of,
)

REATTACH = "reattach"
MOST_EVENTS = 500
MOST_ROUTINE = 60
"""Events of steps in which all is well are kept apart: they must not push out what went wrong."""

ROUTINE = frozenset({Kind.COMMIT, Kind.PUBLISH, Kind.CHECKPOINT, Kind.DUMP})
MOST_REASONS = 20
"""Reasons that are counted apart; further ones are "other"."""

CURVES = {
    "reward": "reward/mean",
    "loss": "loss",
    "step_s": "time/step_s",
    "policy_age": "policy_age/mean",
}
"""Name of a curve -> key of metrics.jsonl."""

TOLD = frozenset(Kind) - {
    Kind.PHASE,
    Kind.ISSUE,
    Kind.PARTIAL,
    Kind.ACCEPT,
    Kind.SEAL,
    Kind.BEGIN,
    Kind.CONFIRM,
    Kind.QUORUM,
    Kind.INSTALL,
}
"""Events that are kept for people; the others come several to a step."""

UPDATING = BETWEEN_VERSIONS | {SERVING}

PROGRESS = frozenset(
    {Kind.ACCEPT, Kind.SEAL, Kind.COMMIT, Kind.DUMP, Kind.EVAL, Kind.PUBLISH, Kind.CHECKPOINT}
)
"""Events that say that the job came forward."""


@dataclass
class RunState:
    """Fed line by line; never asks a role anything."""

    total_steps: int
    groups: int  # 0: nobody trains
    engines: int  # 0: batches come from dumps
    started_mono_s: float | None = None
    started_wall_s: float | None = None
    last_mono_s: float = 0.0  # of the last event
    progress_mono_s: float | None = None  # of the last that says that the job came forward
    step: int = 0
    sealed_step: int = 0  # there are batches up to this step
    commits: int = 0  # in this life of the run
    batches_sealed: int = 0
    dumped: set[int] = field(default_factory=set)  # steps
    version: int | None = None
    version_step: int | None = None
    checkpoint_step: int | None = None
    reattached: bool = False  # engines of an earlier job were found alive
    work_begun: bool = False
    faults: int = 0
    fault_count: FaultCount = field(default_factory=FaultCount)
    totals: Counter[str] = field(default_factory=Counter)  # events by kind, in all lives
    groups_issued: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # prompt groups by reason
    members: Members = field(default_factory=Members)
    metrics: dict[str, Any] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=lambda: {name: Curve() for name in CURVES})
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MOST_EVENTS))
    routine: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MOST_ROUTINE))
    last_event: int = 0  # number of the last one in `events` and `routine`, from 1
    outcome: str | None = None

    def add_event(self, line: Mapping[str, Any]) -> None:
        """Raises KeyError, TypeError, ValueError, AttributeError for a line that is no event of
        this version."""
        kind, mono_s = Kind(line["kind"]), float(line.get("mono_s", 0.0))
        data = line.get("data", {})
        self.last_mono_s = mono_s
        self.totals[kind] += 1
        subject = str(data.get("subject", line.get("name", "")))
        self.faults += self.fault_count.begins(kind, line.get("phase"), subject, line.get("cause"))
        if kind in PROGRESS:
            self.progress_mono_s = mono_s
        if kind is Kind.RUN:
            self._run(line, mono_s)
        elif kind is Kind.ISSUE:
            self.groups_issued += int(data.get("groups", 0))
        elif kind is Kind.SEAL:
            self.batches_sealed += 1
            self.sealed_step = max(self.sealed_step, int(line.get("step", 0)))
        elif kind is Kind.DROP:
            self._drop(line)
        elif kind is Kind.DUMP:
            self.dumped.add(int(line.get("step", 0)))
        elif kind in (Kind.QUORUM, Kind.BEGIN):
            self.work_begun = True
        elif kind in (Kind.PUBLISH, Kind.INSTALL) and line.get("version") is not None:
            if kind is Kind.PUBLISH or self.version is None or line["version"] > self.version:
                self.version, self.version_step = line["version"], line.get("step")
        elif kind is Kind.CHECKPOINT:
            self.checkpoint_step = line.get("step")
        elif kind in (Kind.COMMIT, Kind.SUPERSEDE):
            self.step = int(data["to_step"] if kind is Kind.SUPERSEDE else line.get("step", 0))
            self.sealed_step = max(self.sealed_step, self.step)
            self.commits += kind is Kind.COMMIT
        self.members.add(line)
        if kind in TOLD and not _every_step(kind, line):
            self._tell(line)

    def add_metrics(self, row: Mapping[str, Any]) -> None:
        self.metrics = {k: v for k, v in row.items() if _is_plain(v)}
        step = row.get("step")
        if not isinstance(step, int):
            return
        for name, key in CURVES.items():
            value = row.get(key)
            if isinstance(value, int | float) and math.isfinite(value):
                self.curves[name].add(step, float(value))

    def _run(self, line: Mapping[str, Any], mono_s: float) -> None:
        if line.get("phase") == "end":
            self.outcome = str(line.get("cause"))
            self.members.end(mono_s)
            return
        self.started_mono_s, self.outcome = mono_s, None
        self.started_wall_s, self.progress_mono_s = line.get("wall_s"), None
        self.reattached = line.get("phase") == REATTACH
        self.members.begin(line, reattached=self.reattached)
        self.work_begun, self.batches_sealed, self.commits = False, 0, 0
        self.dumped = set()

    def _drop(self, line: Mapping[str, Any]) -> None:
        data = line.get("data", {})
        reason = drop_reason(line.get("cause"))
        if reason not in self.dropped and len(self.dropped) >= MOST_REASONS:
            reason = "other"
        self.dropped[reason] += len(data["groups"]) if "groups" in data else 1
        if "batch" in data:  # those after it move up
            self.sealed_step = max(self.step, self.sealed_step - 1)

    def _tell(self, line: Mapping[str, Any]) -> None:
        """Only what is fit to be seen: of a dead process's log nothing."""
        self.last_event += 1
        data = line.get("data", {})
        told = {
            "n": self.last_event,
            "wall_s": line.get("wall_s"),
            "kind": str(line["kind"]),
            "name": str(data.get("subject", line.get("name", ""))),
            "phase": line.get("phase"),
            "cause": reason_of(line.get("cause")) or None,
            "step": line.get("step"),
            "version": line.get("version"),
            "old": data.get("old"),
            "new": data.get("new"),
            "failing": data.get("failing"),
        }
        kept = self.routine if line["kind"] in ROUTINE else self.events
        kept.append({k: v for k, v in told.items() if v is not None})

    # What is shown ----------------------------------------------------------------------

    @property
    def rewards(self) -> list[float]:
        return self.curves["reward"].values

    @property
    def reward_steps(self) -> list[int]:
        return self.curves["reward"].steps

    @property
    def groups_alive(self) -> int:
        return sum(r.alive for n, r in self.members.roles.items() if n.startswith("trainer-"))

    @property
    def groups_up(self) -> int:
        """Trainer groups that have started: a process that still imports is none."""
        return sum(
            r.state == "up" for n, r in self.members.roles.items() if n.startswith("trainer-")
        )

    @property
    def engines_serving(self) -> int:
        """Engines that serve, or that take the next version after having served."""
        return sum(e.proved for e in self.members.engines.values())

    @property
    def buffered_batches(self) -> int:
        """Sealed and not trained yet."""
        return self.sealed_step - self.step

    @property
    def under_way(self) -> bool:
        """The first step is committed, or rolled out where nobody trains."""
        return self.commits > 0 or (not self.groups and bool(self.dumped))

    def phase(self) -> str:
        """What the run is waiting for before its first step; afterwards what it does."""
        if self.outcome is not None:
            return self.outcome
        if self.under_way:
            return "training" if self.groups else "rolling out"
        if self.engines and (phase := self._engine_phase()):
            return phase
        if not self.batches_sealed or not self.groups:
            return "rolling out the first batch" if self.engines else "loading the first dump"
        return "first step" if self.work_begun else "first batch sealed, trainers starting"

    def _engine_phase(self) -> str | None:
        """Why nothing can be rolled out yet."""
        states = [e.state for e in self.members.engines.values() if e.state != "unknown"]
        if self.reattached and not states:
            return "going on with living engines, trainers starting"
        if NOT_UP.issuperset(states):
            return "engines starting"
        if not self.engines_serving:
            trainers = ", trainers starting" if self.groups else ""
            return f"engines up{trainers}: waiting for the initial weights"
        return None

    def elapsed_s(self, now_mono_s: float) -> float:
        """Of this life; of one that has ended, until its end."""
        if self.started_mono_s is None:
            return 0.0
        end_s = self.last_mono_s if self.outcome is not None else now_mono_s
        return max(0.0, end_s - self.started_mono_s)

    def to_json(self, now_mono_s: float) -> dict[str, Any]:
        """`age_s` of a member: since its state or phase changed."""
        quorum = self.members.quorum
        versions = [e.version for e in self.members.engines.values() if e.version is not None]
        return {
            "phase": self.phase(),
            "outcome": self.outcome,
            "started_wall_s": self.started_wall_s,
            "elapsed_s": round(self.elapsed_s(now_mono_s), 1),
            "progress_age_s": _age_s(self.progress_mono_s, now_mono_s),
            "step": self.step,
            "total_steps": self.total_steps,
            "commits": self.commits,
            "dumped": len(self.dumped),
            "groups": {"up": self.groups_up, "total": self.groups},
            "engines_up": {"up": self.engines_serving, "total": self.engines},
            "versions": {
                "published": self.version,
                "step": self.version_step,
                "oldest_held": min(versions, default=None),
                "newest_held": max(versions, default=None),
                "checkpoint_step": self.checkpoint_step,
            },
            "quorum": None if quorum is None else _aged(asdict(quorum), now_mono_s),
            "roles": [_aged(r.to_json(), now_mono_s) for r in _sorted(self.members.roles)],
            "engines": [_aged(e.to_json(), now_mono_s) for e in _sorted(self.members.engines)],
            "buffered_batches": self.buffered_batches,
            "faults": self.faults,
            "restarts": dict(self.members.restarts),
            "refused_commits": self.totals[Kind.REFUSE],
            "heals": self.totals[Kind.HEAL],
            "quorum_changes": self.members.quorum_changes,
            "dropped": dict(self.dropped),
            "metrics": self.metrics,
            "curves": {name: curve.to_json() for name, curve in self.curves.items()},
            "last_event": self.last_event,
        }

    def events_after(self, n: int) -> dict[str, Any]:
        """Those with a greater number that are still kept; `missed`: how many are not."""
        kept = heapq.merge(self.events, self.routine, key=lambda e: e["n"])
        found = [e for e in kept if e["n"] > n]
        missed = max(0, self.last_event - n - len(found))
        return {"events": found, "last": self.last_event, "missed": missed}


def _every_step(kind: Kind, line: Mapping[str, Any]) -> bool:
    """An engine on its way to the next version; a publish that serving tells of too."""
    data = line.get("data", {})
    if kind is Kind.TRANSITION:
        return UPDATING.issuperset((data.get("old"), data.get("new")))
    return kind is Kind.PUBLISH and line.get("role") == "rollout"


def _is_plain(value: Any) -> bool:
    """One number, flag or text, but no number that JSON does not know."""
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, int | str)


def drop_reason(cause: Any) -> str:
    """The kind of a drop: without its numbers, and what comes after a colon."""
    head = reason_of(cause).split(":")[0].strip()[:60]
    return re.sub(r"\d+", "N", head) or "unknown"


def _sorted(members: Mapping[str, Any]) -> list[Any]:
    """By name, numbers as numbers; the order of the roles is that of a job's start."""
    order = ("supervisor", "lighthouse", "serving", "rollout", "trainer", "standby")

    def key(name: str) -> tuple[int, str, int]:
        kind, _, number = name.rpartition("-")
        if not number.isdigit():
            kind, number = name, "0"
        return (order.index(kind) if kind in order else len(order), kind, int(number))

    return [members[name] for name in sorted(members, key=key)]


def _aged(found: dict[str, Any], now_mono_s: float) -> dict[str, Any]:
    age_s = _age_s(found.pop("since_mono_s"), now_mono_s)
    return found | {"age_s": age_s}


def _age_s(mono_s: float | None, now_mono_s: float) -> float | None:
    return None if mono_s is None else round(max(0.0, now_mono_s - mono_s), 1)
