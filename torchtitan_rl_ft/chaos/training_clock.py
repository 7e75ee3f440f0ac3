"""The time that a run has trained for: what drawn and recorded faults are counted by. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchtitan_rl_ft.observability.events import Kind

LIFE_STARTS = frozenset({"start", "resume", "reattach"})


class TrainingClock:
    """Seconds since the first commit of a run, without those between the end of one life of its
    job and the start of the next: a fold over the lines of events.jsonl."""

    def __init__(self) -> None:
        self._began_mono_s: float | None = None
        self._away_s = 0.0
        self._last_mono_s = 0.0

    def see(self, line: Mapping[str, Any]) -> None:
        """The next line of events.jsonl."""
        mono_s = float(line.get("mono_s", 0.0))
        if line.get("kind") == Kind.RUN and line.get("phase") in LIFE_STARTS:
            if line["phase"] == "start":
                self._began_mono_s, self._away_s = None, 0.0
            elif self._began_mono_s is not None:
                # Also where the machine was started anew, and the monotonic clock with it.
                self._away_s += mono_s - self._last_mono_s
            self._last_mono_s = mono_s
        elif line.get("kind") == Kind.COMMIT and self._began_mono_s is None:
            self._began_mono_s = mono_s
        self._last_mono_s = max(self._last_mono_s, mono_s)

    def training_s(self, mono_s: float) -> float | None:
        """What it shows at `mono_s` of the present life; None before the first commit."""
        if self._began_mono_s is None:
            return None
        return mono_s - self._began_mono_s - self._away_s

    def mono_s(self, training_s: float) -> float | None:
        """When it shows `training_s`, if the present life lasts."""
        if self._began_mono_s is None:
            return None
        return self._began_mono_s + self._away_s + training_s
