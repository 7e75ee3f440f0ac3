"""How often a run is hit by faults, and how often it should save: from its events alone."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torchtitan_rl_ft.observability.events import Event, Kind
from torchtitan_rl_ft.observability.lives import lives

SIGNAL_S = 5.0
"""A stop may come that much later than the signal that asked for it."""

LOSES_STATE = ("trainer", "supervisor")
"""Roles whose faults can cost what was trained since the last save."""


def optimum_interval_s(save_cost_s: float, mtbf_s: float) -> float:
    """Seconds between two saves that cost the least time in all, saving and redoing together:
    sqrt(2 * save_cost * MTBF), for a save that is short against the MTBF.

    J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications
    of the ACM 17(9), 1974; J. T. Daly, Future Generation Computer Systems 22(3), 2006, has the
    higher orders.
    """
    return math.sqrt(2.0 * save_cost_s * mtbf_s)


@dataclass(frozen=True)
class SaveAdvice:
    """Observed over all lives of the run. Times in seconds."""

    wall_s: float
    """Time that the run was up."""

    faults: dict[str, int] = field(default_factory=dict)
    """Processes that ended by a fault, by role."""

    save_cost_s: float | None = None
    """How long a save holds the training loop up (median); None when none was seen."""

    step_s: float | None = None
    """Median time from commit to commit."""

    @property
    def mtbf_s(self) -> float | None:
        """Mean time between faults of any role; None before the first."""
        return self._between(sum(self.faults.values()))

    @property
    def state_mtbf_s(self) -> float | None:
        """Between faults that can cost training state. With several replica groups most of them do
        not, so the optimum that follows from it is the shortest that can be meant."""
        return self._between(sum(self.faults.get(role, 0) for role in LOSES_STATE))

    @property
    def interval_s(self) -> float | None:
        """The optimum; None while the save's cost or the MTBF is unknown."""
        if self.save_cost_s is None or self.state_mtbf_s is None:
            return None
        return optimum_interval_s(self.save_cost_s, self.state_mtbf_s)

    @property
    def interval_steps(self) -> int | None:
        if self.interval_s is None or not self.step_s:
            return None
        return max(1, round(self.interval_s / self.step_s))

    def _between(self, faults: int) -> float | None:
        return self.wall_s / faults if faults else None


def save_advice(events: Iterable[Event]) -> SaveAdvice | None:
    """None without an event."""
    found = lives(events)
    if not found:
        return None
    faults: Counter[str] = Counter()
    for i, life in enumerate(found):
        faults += Counter(_role(e) for e in _faults(life.events))
        if i + 1 < len(found) and life.end is None:  # another life had to begin
            faults["supervisor"] += 1
    costs = [cost for life in found for cost in _save_costs(life.events)]
    steps = [step_s for life in found for step_s in _step_times(life.events)]
    return SaveAdvice(
        wall_s=sum(life.events[-1].mono_s - life.start_s for life in found),
        faults=dict(faults),
        save_cost_s=statistics.median(costs) if costs else None,
        step_s=statistics.median(steps) if steps else None,
    )


def _faults(life: Sequence[Event]) -> list[Event]:
    """But for those of a job that stops: a scheduler may have signalled each of its processes."""
    stops = [e.mono_s for e in life if e.kind is Kind.STOP and "replica_id" not in e.data]
    until_s = min(stops, default=math.inf) - SIGNAL_S
    return [e for e in life if e.kind is Kind.EXIT and e.phase == "fault" and e.mono_s < until_s]


def _role(event: Event) -> str:
    """`trainer` of trainer-1, `engine` of engine-0."""
    return str(event.data.get("subject", event.name)).partition("-")[0]


def _step_times(life: Sequence[Event]) -> list[float]:
    at = [e.mono_s for e in life if e.kind is Kind.COMMIT]
    return [b - a for a, b in zip(at, at[1:], strict=False)]


def _save_costs(life: Sequence[Event]) -> list[float]:
    """Of each step that was saved, how long its saver was in the phase: the groups that were not
    granted the save are through with it at once."""
    saved = {e.step for e in life if e.kind is Kind.CHECKPOINT}
    since: dict[str, Event] = {}
    costs: dict[int, float] = defaultdict(float)
    for event in (e for e in life if e.kind is Kind.PHASE and e.role == "trainer"):
        begun = since.pop(event.name, None)
        if begun is not None and begun.step is not None and begun.pid == event.pid:
            step = begun.step - 1  # a phase is told with the step that comes next
            costs[step] = max(costs[step], event.mono_s - begun.mono_s)
        if event.phase == "checkpoint":
            since[event.name] = event
    return [cost for step, cost in costs.items() if step in saved]


def advice_lines(advice: SaveAdvice) -> list[str]:
    """For people: the observed MTBF, and the save interval that is the optimum for it."""
    if advice.mtbf_s is None:
        return [f"MTBF: no fault in {advice.wall_s:.0f} s"]
    roles = ", ".join(f"{role} {n}" for role, n in sorted(advice.faults.items()))
    lines = [f"MTBF {advice.mtbf_s:.0f} s ({roles} in {advice.wall_s:.0f} s)"]
    if advice.interval_s is not None:
        steps = f" (checkpoint.interval {n})" if (n := advice.interval_steps) is not None else ""
        lines.append(
            f"a save costs {advice.save_cost_s:.2f} s, trainers fail every "
            f"{advice.state_mtbf_s:.0f} s: save every {advice.interval_s:.0f} s{steps}"
        )
    return lines
