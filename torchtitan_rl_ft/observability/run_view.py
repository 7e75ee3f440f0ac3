"""The present state of a run, folded from the lines of events.jsonl and metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchtitan_rl_ft.observability.events import Kind

SERVING = "serving"
STARTING = "starting"
REATTACH = "reattach"
BETWEEN_VERSIONS = frozenset({"stale", "installing", "paused"})
"""States of an engine on its way from serving one version to serving the next."""


@dataclass
class Process:
    """One role's process as its SPAWN, READY and EXIT events tell."""

    alive: bool = False
    ready: bool = False
    spawned_mono_s: float = 0.0


@dataclass
class RunView:
    """Fed line by line; never asks a role anything."""

    total_steps: int
    groups: int  # 0: nobody trains
    engines: int  # 0: batches come from dumps
    started_mono_s: float | None = None
    step: int = 0
    commits: int = 0  # in this life of the run
    batches_sealed: int = 0
    dumped: set[int] = field(default_factory=set)  # steps
    version: int | None = None
    reattached: bool = False  # engines of an earlier job were found alive
    work_begun: bool = False
    faults: int = 0
    processes: dict[str, Process] = field(default_factory=dict)
    engine_states: dict[str, str] = field(default_factory=dict)
    engines_proved: set[str] = field(default_factory=set)  # have served since they came up
    metrics: dict[str, Any] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    reward_steps: list[int] = field(default_factory=list)
    outcome: str | None = None

    def add_event(self, line: Mapping[str, Any]) -> None:
        kind, name, mono_s = line.get("kind"), str(line.get("name", "")), line.get("mono_s", 0.0)
        data = line.get("data", {})
        if kind == Kind.RUN:
            self._run(line, mono_s)
        elif kind == Kind.SPAWN:
            subject = str(data.get("subject", name))
            self.processes[subject] = Process(alive=True, spawned_mono_s=mono_s)
        elif kind == Kind.READY:
            subject = str(data.get("subject", name))
            self.processes.setdefault(subject, Process(alive=True)).ready = True
        elif kind == Kind.EXIT:
            self._exit(line, str(data.get("subject", name)))
        elif kind == Kind.TRANSITION:
            self._transition(str(data.get("subject", "")), str(data.get("new", "")))
        elif kind == Kind.FAULT:
            self.faults += 1
        elif kind == Kind.SEAL:
            self.batches_sealed += 1
        elif kind == Kind.DUMP:
            self.dumped.add(int(line.get("step", 0)))
        elif kind in (Kind.QUORUM, Kind.BEGIN):
            self.work_begun = True
        elif kind in (Kind.PUBLISH, Kind.INSTALL) and line.get("version") is not None:
            self.version = line["version"]
        elif kind in (Kind.COMMIT, Kind.SUPERSEDE):
            self.step = int(data["to_step"] if kind == Kind.SUPERSEDE else line.get("step", 0))
            self.commits += kind == Kind.COMMIT

    def add_metrics(self, row: Mapping[str, Any]) -> None:
        self.metrics = dict(row)
        reward, step = row.get("reward/mean"), row.get("step")
        if isinstance(reward, int | float) and isinstance(step, int):
            while self.reward_steps and self.reward_steps[-1] >= step:  # superseded
                self.reward_steps.pop()
                self.rewards.pop()
            self.reward_steps.append(step)
            self.rewards.append(float(reward))

    def _run(self, line: Mapping[str, Any], mono_s: float) -> None:
        if line.get("phase") == "end":
            self.outcome = line.get("cause")
            return
        self.started_mono_s, self.outcome = mono_s, None
        self.reattached = line.get("phase") == REATTACH
        self.processes, self.engine_states, self.engines_proved = {}, {}, set()
        self.work_begun, self.batches_sealed, self.commits = False, 0, 0
        self.dumped = set()

    def _exit(self, line: Mapping[str, Any], subject: str) -> None:
        process = self.processes.setdefault(subject, Process())
        process.alive = process.ready = False
        if line.get("phase") == "fault":
            self.faults += 1
        if subject == "serving":
            self.engine_states, self.engines_proved = {}, set()
        self.engine_states.pop(subject, None)
        self.engines_proved.discard(subject)

    def _transition(self, subject: str, new: str) -> None:
        if subject.startswith("engine"):
            self.engine_states[subject] = new
            if new == SERVING:
                self.engines_proved.add(subject)
            elif new not in BETWEEN_VERSIONS:
                self.engines_proved.discard(subject)

    # What is shown ----------------------------------------------------------------------

    @property
    def groups_alive(self) -> int:
        return sum(p.alive for n, p in self.processes.items() if n.startswith("trainer-"))

    @property
    def engines_serving(self) -> int:
        """Engines that serve, or that take the next version after having served."""
        return len(self.engines_proved)

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
        up = [s for s in self.engine_states.values() if s != STARTING]
        if self.reattached and not self.engine_states:
            return "going on with living engines, trainers starting"
        if not up:
            return "engines starting"
        if not self.engines_serving:
            trainers = ", trainers starting" if self.groups else ""
            return f"engines up{trainers}: waiting for the initial weights"
        return None

    def elapsed_s(self, now_mono_s: float) -> float:
        return now_mono_s - self.started_mono_s if self.started_mono_s is not None else 0.0
