"""The lives of a run: what happened from one start of its supervisor to the next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torchtitan_rl_ft.observability.events import Event, Kind

BEGINNINGS = ("start", "resume", "reattach")
"""Phases of RUN with which a life begins."""

WALL_JUMP_S = 1.0
"""Wall and monotonic clock that drift apart by more within a life: the wall clock was set."""


@dataclass(frozen=True)
class Life:
    events: list[Event]  # in the order of the monotonic clock, at least one
    phase: str  # how it began; "" without a supervisor

    @property
    def start_s(self) -> float:
        return self.events[0].mono_s

    @property
    def end(self) -> Event | None:
        """The supervisor's last word, when it came to it."""
        ends = (e for e in reversed(self.events) if e.kind is Kind.RUN and e.phase == "end")
        return next(ends, None)

    @property
    def wall_jumps_s(self) -> list[float]:
        """By how much the wall clock was set, each time, over `WALL_JUMP_S`."""
        jumps: list[float] = []
        offset_s = self.events[0].wall_s - self.start_s
        for event in self.events:
            if abs(event.wall_s - event.mono_s - offset_s) > WALL_JUMP_S:
                jumps.append(event.wall_s - event.mono_s - offset_s)
                offset_s = event.wall_s - event.mono_s
        return jumps


def lives(events: Iterable[Event]) -> list[Life]:
    """In the order of the file. Events before the first beginning, without a supervisor, are a
    life of their own."""
    found: list[tuple[str, list[Event]]] = []
    for event in events:
        if event.kind is Kind.RUN and event.phase in BEGINNINGS:
            found.append((event.phase or "", []))
        elif not found:
            found.append(("", []))
        found[-1][1].append(event)
    return [Life(sorted(of_life, key=lambda e: e.mono_s), phase) for phase, of_life in found]


def last_life(events: Iterable[Event]) -> list[Event]:
    """The events since the last RUN start, resume or reattach, in the order of the clock."""
    found = lives(events)
    return found[-1].events if found else []


def log_notes(events: Iterable[Event], unread: int) -> list[str]:
    """What is wrong with the log itself. `unread`: complete lines that were no event."""
    notes = []
    if unread:
        lines = "1 line" if unread == 1 else f"{unread} lines"
        notes.append(f"{lines} of the events are torn or of another version, and were left out")
    jumps_s = [jump_s for life in lives(events)[-1:] for jump_s in life.wall_jumps_s]
    if jumps_s:
        by = ", ".join(f"{jump_s:+.1f} s" for jump_s in jumps_s[:3])
        more = "" if len(jumps_s) <= 3 else f" and {len(jumps_s) - 3} more times"
        notes.append(f"the wall clock was set by {by}{more}: no duration here is measured by it")
    return notes
