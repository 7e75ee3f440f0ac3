"""Which events begin a fault: serving tells of a broken engine before it tells of its end, the
watcher of a wedged rank before it ends it."""

from __future__ import annotations

from typing import Any

from torchtitan_rl_ft.observability.events import Kind, first_line

MOST_PROCESSES = 4096
WEDGED = "wedged"


class FaultCount:
    """Asked event by event, in their order."""

    def __init__(self) -> None:
        self._told: dict[str, str] = {}  # process -> cause of its last fault

    def begins(self, kind: Any, phase: Any, subject: str, cause: Any) -> bool:
        """An end of the same cause as the fault that was told of before is that fault; so is any
        end of a process that was found wedged."""
        if kind in (Kind.SPAWN, Kind.RESTART):
            self._told.pop(subject, None)
        elif kind == Kind.FAULT:
            if len(self._told) >= MOST_PROCESSES:
                self._told.clear()
            self._told[subject] = WEDGED if phase == WEDGED else first_line(cause)
            return True
        elif kind == Kind.EXIT and phase == "fault":
            return self._told.pop(subject, None) not in (WEDGED, first_line(cause))
        return False
