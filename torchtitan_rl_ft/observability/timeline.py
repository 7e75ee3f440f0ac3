"""One time axis for all lives of a run: microseconds since its first event."""

from __future__ import annotations

from torchtitan_rl_ft.observability.events import Event
from torchtitan_rl_ft.observability.lives import WALL_JUMP_S

RESTART_BACK_S = 5.0
"""A monotonic clock that goes back by more while the wall clock does not: another boot."""


class Timeline:
    """Fed event by event, in the order of the file. The monotonic clock is followed; where it
    begins anew, after a reboot or on another machine, the wall clock says how long the gap was."""

    def __init__(self) -> None:
        self._shift_s: float | None = None  # from the monotonic clock to the axis
        self._newest: Event | None = None
        self._drift_s = 0.0  # wall - monotonic
        self._former_shift_s = 0.0
        self.clocks = 1
        self.wall_jumps = 0

    def us(self, mono_s: float) -> int:
        """Of the present monotonic clock; never negative."""
        return max(0, round((mono_s + (self._shift_s or 0.0)) * 1e6))

    def former_us(self, mono_s: float) -> int:
        """Of the clock before the present one."""
        return max(0, round((mono_s + self._former_shift_s) * 1e6))

    def add(self, event: Event) -> str | None:
        """Take the next event in; what is worth telling of its clocks."""
        newest = self._newest
        if newest is None or self._shift_s is None:
            self._shift_s, self._newest = -event.mono_s, event
            self._drift_s = event.wall_s - event.mono_s
            return None
        told = self._look(newest, event)
        if event.mono_s > newest.mono_s or self._newest is None:
            self._newest = event
        return told

    def _look(self, newest: Event, event: Event) -> str | None:
        assert self._shift_s is not None
        back_s = newest.mono_s - event.mono_s
        passed_s = event.wall_s - newest.wall_s
        drift_s = event.wall_s - event.mono_s
        if back_s > RESTART_BACK_S and passed_s > -back_s + RESTART_BACK_S:
            gap_s = max(0.0, passed_s)
            self._former_shift_s = self._shift_s
            self._shift_s += newest.mono_s - event.mono_s + gap_s
            self._newest, self._drift_s = None, drift_s
            self.clocks += 1
            return f"the monotonic clock begins anew, {gap_s:.1f} s later by the wall clock"
        jump_s = drift_s - self._drift_s
        if abs(jump_s) > WALL_JUMP_S:
            self._drift_s = drift_s
            self.wall_jumps += 1
            return f"the wall clock was set by {jump_s:+.1f} s"
        return None
