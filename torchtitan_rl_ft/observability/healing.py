"""How lost groups came back, in phases: a pure function of the events of one run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchtitan_rl_ft.observability.event_data import number, subject
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
    done_s = _first_reports(events)
    asked_s: dict[int, float] = {}  # by process, when it last asked for a quorum
    ended_s: dict[str, float] = {}  # by group, when its process ended that has not healed since
    found = []
    for i, event in enumerate(events):
        if event.kind is Kind.EXIT:
            ended_s[subject(event)] = event.mono_s
        elif event.phase == "quorum":
            asked_s[event.pid] = event.mono_s
        elif event.kind is Kind.HEAL:
            gone_s = ended_s.pop(event.name, None)
            if i in done_s:
                since_s = asked_s.get(event.pid, event.mono_s)
                fault_s = since_s if gone_s is None else _fault(events, i, gone_s)
                found.append(_recovery(event, fault_s, gone_s, since_s, done_s[i]))
    return [recovery for recovery in found if recovery is not None]


def _first_reports(events: Sequence[Event]) -> dict[int, float]:
    """Of each heal, by its place, when its process first reported a commit after it."""
    next_s: dict[int, float] = {}  # by process
    found = {}
    for i in range(len(events) - 1, -1, -1):
        event = events[i]
        if event.phase == "report":
            next_s[event.pid] = event.mono_s
        elif event.kind is Kind.HEAL and event.pid in next_s:
            found[i] = next_s[event.pid]
    return found


def _recovery(
    heal: Event, fault_s: float, ended_s: float | None, asked_s: float, done_s: float
) -> Recovery | None:
    """`ended_s`: None for a group that was healed without a restart."""
    told = [number(heal, key) for key in ("quorum_s", "transfer_s", "load_s", "bytes")]
    told_s = [value for value in told if value is not None]
    if len(told_s) < len(told):  # another version wrote it
        return None
    gone_s = asked_s if ended_s is None else ended_s
    seconds = (gone_s - fault_s, asked_s - gone_s, *told_s[:3], done_s - heal.mono_s)
    phase_s = dict(zip(PHASES, seconds, strict=True))
    return Recovery(heal.name, heal.step or 0, int(told_s[3]), phase_s, done_s - fault_s)


def _back(events: Sequence[Event], i: int) -> Iterator[Event]:
    """The events before the i-th, the newest first."""
    return (events[j] for j in range(i - 1, -1, -1))


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
