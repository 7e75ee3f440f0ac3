"""The states of an engine and the moves between them."""

from __future__ import annotations

from enum import StrEnum

from torchtitan_rl_ft.observability.events import EventSink, Kind


class EngineState(StrEnum):
    STARTING = "starting"  # the process comes up
    STANDBY = "standby"  # up, kept warm, not wanted yet
    STALE = "stale"  # up, does not hold the required version
    INSTALLING = "installing"  # takes a version
    SERVING = "serving"  # has proved that it holds the version; takes requests
    PAUSED = "paused"  # holds the version, takes no requests on purpose
    SUSPECT = "suspect"  # failed a probe; takes no requests until it is cleared
    DRAINING = "draining"  # finishes its requests, then retires
    RETIRED = "retired"  # never comes back; the slot gets a new engine


S = EngineState

LEGAL: dict[EngineState, frozenset[EngineState]] = {
    S.STARTING: frozenset({S.STANDBY, S.STALE, S.RETIRED}),
    S.STANDBY: frozenset({S.STALE, S.SUSPECT, S.RETIRED}),
    S.STALE: frozenset({S.INSTALLING, S.SUSPECT, S.DRAINING, S.RETIRED}),
    S.INSTALLING: frozenset({S.SERVING, S.STALE, S.RETIRED}),
    S.SERVING: frozenset({S.PAUSED, S.STALE, S.SUSPECT, S.DRAINING, S.RETIRED}),
    S.PAUSED: frozenset({S.SERVING, S.STALE, S.SUSPECT, S.RETIRED}),
    # And back to the state it left, which `StateMachine` knows: suspicion skips no install.
    S.SUSPECT: frozenset({S.RETIRED}),
    S.DRAINING: frozenset({S.RETIRED}),
    S.RETIRED: frozenset(),
}


class IllegalTransition(Exception):
    """A move that the table does not allow: a bug, not a fault."""


class StateMachine:
    """One engine's state. Every change goes through `transition` and is one event."""

    def __init__(self, subject: str, events: EventSink) -> None:
        self._subject, self._events = subject, events
        self._left: EngineState | None = None
        self.state = EngineState.STARTING
        self.reason = "started"

    def allows(self, new: EngineState) -> bool:
        if self.state is EngineState.SUSPECT and new is self._left:
            return True
        return new in LEGAL[self.state]

    def transition(self, new: EngineState, reason: str, *, version: int | None = None) -> None:
        """Raises IllegalTransition."""
        if not self.allows(new):
            raise IllegalTransition(f"{self._subject}: {self.state} -> {new} ({reason})")
        old, self.state, self.reason = self.state, new, reason
        self._left = old if new is EngineState.SUSPECT else None
        self._events.emit(
            Kind.TRANSITION,
            cause=reason,
            version=version,
            subject=self._subject,
            old=str(old),
            new=str(new),
        )

    def clear_suspicion(self, reason: str) -> None:
        """Return to the state that suspicion interrupted."""
        if self.state is EngineState.SUSPECT and self._left is not None:
            self.transition(self._left, reason)
