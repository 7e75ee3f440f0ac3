"""Which faults are due: a fold over the lines of events.jsonl. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan_rl_ft.chaos.plan import Fault, Moment, When
from torchtitan_rl_ft.chaos.training_clock import LIFE_STARTS, TrainingClock
from torchtitan_rl_ft.observability.events import Kind


@dataclass(frozen=True)
class Planned:
    """A fault of the plan. `key` names it over restarts."""

    key: str
    fault: Fault


@dataclass(frozen=True)
class Due:
    """A fault whose moment has come at `planned_mono_s`."""

    key: str
    fault: Fault
    planned_mono_s: float


def keyed(faults: Sequence[Fault]) -> list[Planned]:
    """Equal lines are told apart by their count, so that others may be added or moved."""
    seen: dict[str, int] = {}
    planned = []
    for fault in faults:
        words = " ".join(fault.line.split())
        seen[words] = seen.get(words, 0) + 1
        planned.append(Planned(f"{words} #{seen[words]}", fault))
    return planned


class Schedule:
    """Only what happens in the present life of the run (since its start, or its last resume)
    makes a fault due."""

    def __init__(
        self,
        planned: Sequence[Planned],
        started_mono_s: float,
        drawn: Iterator[Planned] | None = None,
    ) -> None:
        """`started_mono_s`: when the life began, for a run without a supervisor. `drawn`: more of
        them, by time of training, in order and perhaps without end."""
        self._planned, self._started_mono_s = list(planned), started_mono_s
        self._drawn = drawn or iter(())
        self._next_drawn = next(self._drawn, None)
        self._clock = TrainingClock()
        self._came: dict[str, float] = {}
        self._sealed = self._step = 0

    def see(self, line: Mapping[str, Any]) -> None:
        """The next line of events.jsonl."""
        self._clock.see(line)
        mono_s = float(line.get("mono_s", 0.0))
        kind = line.get("kind")
        if kind == Kind.RUN and line.get("phase") in LIFE_STARTS:
            self._came.clear()
            self._started_mono_s = mono_s
        if kind == Kind.CHAOS:
            return
        for p in self._planned:
            if p.key not in self._came and self._comes(p.fault.moment, line):
                self._came[p.key] = mono_s
        if kind == Kind.SEAL:
            self._sealed = int(line.get("step") or self._sealed)

    def keys(self) -> list[str]:
        """Of all that are known; what is drawn is known when it is due."""
        return [p.key for p in self._planned]

    def passed(self, line: Mapping[str, Any]) -> None:
        """A line of before this schedule was made: where the run stands, nothing is due by it."""
        self._clock.see(line)
        if line.get("kind") == Kind.SEAL:
            self._sealed = int(line.get("step") or self._sealed)
        if line.get("kind") == Kind.COMMIT:
            self._step = int(line.get("step") or 0)

    def too_late(self, now_mono_s: float) -> list[Fault]:
        """Faults whose moment came before this schedule was made."""
        found = []
        for fault in (p.fault for p in self._planned):
            moment = fault.moment
            reached = {When.STEP: self._step, When.ROLLOUT: self._sealed}.get(moment.when, -1)
            training_s = self._clock.training_s(now_mono_s)
            if moment.when is When.TRAINING and training_s is not None:
                late = moment.after_s < training_s
            else:
                late = moment.number <= reached
            if late:
                found.append(fault)
        return found

    def due(self, now_mono_s: float) -> list[Due]:
        """Faults whose moment has come, in the order of the plan, also those given before."""
        self._draw(now_mono_s)
        found = []
        for p in self._planned:
            at = self._moment_mono_s(p)
            if at is not None and at <= now_mono_s:
                found.append(Due(p.key, p.fault, at))
        return found

    def _draw(self, now_mono_s: float) -> None:
        training_s = self._clock.training_s(now_mono_s)
        while (
            training_s is not None
            and (drawn := self._next_drawn) is not None
            and drawn.fault.moment.after_s <= training_s
        ):
            self._planned.append(drawn)
            self._next_drawn = next(self._drawn, None)

    def _moment_mono_s(self, planned: Planned) -> float | None:
        moment = planned.fault.moment
        if moment.when is When.AFTER:
            return self._started_mono_s + moment.after_s
        if moment.when is When.TRAINING:
            return self._clock.mono_s(moment.after_s)
        came = self._came.get(planned.key)
        return came + moment.plus_s if came is not None else None

    def _comes(self, moment: Moment, line: Mapping[str, Any]) -> bool:
        kind = line.get("kind")
        if moment.when is When.STEP:
            return kind == Kind.COMMIT and int(line.get("step") or 0) >= moment.number
        if moment.when is When.ROLLOUT:
            # Prompts of a batch are drawn, or answered, from the seal of the batch before it on.
            return kind in (Kind.ISSUE, Kind.ACCEPT) and self._sealed + 1 >= moment.number
        if moment.when is When.PHASE:
            data = line.get("data", {})
            names = (kind, line.get("phase"), data.get("new"))
            about = (line.get("name"), data.get("subject"))
            return moment.phase in names and (not moment.of or moment.of in about)
        return False
