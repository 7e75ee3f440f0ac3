"""How lost groups came back, in phases: a pure function of the events of one run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchtitan_rl_ft.observability.event_data import number
from torchtitan_rl_ft.observability.events import Event, Kind

PHASES = ("detection", "start", "quorum", "transfer", "load", "first_step")


@dataclass(frozen=True)
class Recovery:
    """One heal of a group. All in seconds.

    detection: from the fault to the process's end (nothing where no fault was seen: a process
    that dies is noticed at once). start: until the new process asks for a quorum. first_step:
    from the loaded state to the first commit. `total_s` is measured from end to end, apart from
    the phases. Both are 0 at the front for a group that was healed without a restart.
    """

    name: str
    step: int
    n_bytes: int
    phase_s: dict[str, float]
    total_s: float

    def line(self) -> str:
        parts = [f"{p.replace('_', ' ')} {self.phase_s[p]:.2f}" for p in PHASES]
        return f"{self.name} at step {self.step}: {self.total_s:.2f} s ({', '.join(parts)})"


def recoveries(events: Sequence[Event]) -> list[Recovery]:
    """Of events in the order of the clock: each heal whose group has committed since."""
    heals = [i for i, event in enumerate(events) if event.kind is Kind.HEAL]
    return [found for i in heals if (found := _recovery(events, i)) is not None]


def _recovery(events: Sequence[Event], i: int) -> Recovery | None:
    heal = events[i]
    done_s = None
    for event in itertools.islice(events, i, None):
        if event.pid == heal.pid and event.phase == "report":
            done_s = event.mono_s
            break
    if done_s is None:
        return None
    asked_s = _asked(events, i)
    ended_s = _end_of_former_life(events, i)
    if ended_s is None:
        ended_s = fault_s = asked_s
    else:
        fault_s = _fault(events, i, ended_s)
    told = [number(heal, key) for key in ("quorum_s", "transfer_s", "load_s", "bytes")]
    told_s = [value for value in told if value is not None]
    if len(told_s) < len(told):  # another version wrote it
        return None
    seconds = (ended_s - fault_s, asked_s - ended_s, *told_s[:3], done_s - heal.mono_s)
    phase_s = dict(zip(PHASES, seconds, strict=True))
    return Recovery(heal.name, heal.step or 0, int(told_s[3]), phase_s, done_s - fault_s)


def _back(events: Sequence[Event], i: int) -> Iterator[Event]:
    """The events before the i-th, the newest first."""
    return (events[j] for j in range(i - 1, -1, -1))


def _asked(events: Sequence[Event], i: int) -> float:
    """When the i-th event's process had asked for the quorum in which it healed."""
    for event in _back(events, i):
        if event.pid == events[i].pid and event.phase == "quorum":
            return event.mono_s
    return events[i].mono_s


def _end_of_former_life(events: Sequence[Event], i: int) -> float | None:
    """When the group's process before this one ended; None when this one has healed before."""
    heal = events[i]
    for event in _back(events, i):
        if event.kind is Kind.HEAL and event.pid == heal.pid:
            return None
        if event.kind is Kind.EXIT and event.data.get("subject") == heal.name:
            return event.mono_s
    return None


def _fault(events: Sequence[Event], i: int, ended_s: float) -> float:
    """When what ended the process had begun: the injected or noticed fault since its last phase,
    else its end."""
    name = events[i].name
    for event in _back(events, i):
        if event.mono_s > ended_s:
            continue
        if event.kind is Kind.PHASE and event.name == name:
            break
        if event.kind in (Kind.CHAOS, Kind.FAULT) and event.data.get("subject") == name:
            return event.mono_s
    return ended_s
