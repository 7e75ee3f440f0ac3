"""Who this rank is to the rest of the run: member, phases, events, heartbeat."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torchtitan_rl_ft.journal.client import LedgerClient
from torchtitan_rl_ft.journal.records import Member
from torchtitan_rl_ft.observability.events import EventLog, EventSink, Kind
from torchtitan_rl_ft.rpc.client import RoleRefused, RoleUnreachable
from torchtitan_rl_ft.run_folder import ATTEMPT_ENV, ProcessId, RunFolder

logger = logging.getLogger(__name__)

BEAT_INTERVAL_S = 2.0


class NoEvents:
    """The sink of ranks other than the group's first."""

    def emit(self, kind: Kind, **fields: Any) -> None:
        pass


def this_member(replica_id: int) -> Member:
    me = ProcessId.current()
    return Member(
        replica_id=replica_id,
        uuid=uuid.uuid4().hex,
        pid=me.pid,
        start_time=me.start_time,
        host=socket.gethostname(),
    )


def event_sink(run: RunFolder, replica_id: int, speaks: bool) -> EventSink:
    if not speaks:
        return NoEvents()
    return EventLog(
        run.events,
        run=run.path.name,
        role="trainer",
        name=f"trainer-{replica_id}",
        attempt=int(os.environ.get(ATTEMPT_ENV, "1")),
    )


class PhaseClock:
    """The phase this rank is in, and the seconds spent in each since `restart`."""

    def __init__(self, events: EventSink) -> None:
        self._events = events
        self.phase = "starting"
        self._since = time.monotonic()
        self._seconds: dict[str, float] = {}

    def enter(self, phase: str, step: int) -> None:
        if phase == self.phase:
            return
        now = time.monotonic()
        self._seconds[self.phase] = self._seconds.get(self.phase, 0.0) + now - self._since
        self.phase, self._since = phase, now
        self._events.emit(Kind.PHASE, phase=phase, step=step)

    def restart(self) -> dict[str, float]:
        """Seconds per phase since the last call, the running phase included."""
        now = time.monotonic()
        self._seconds[self.phase] = self._seconds.get(self.phase, 0.0) + now - self._since
        self._since = now
        seconds, self._seconds = self._seconds, {}
        return seconds


class Heartbeat:
    """Tells the ledger every two seconds that this group lives, from a side thread.

    Missing a beat is no fault of the trainer's: the ledger may be restarting.
    """

    def __init__(
        self, ledger: LedgerClient, member: Member, state: Callable[[], tuple[int, str, str]]
    ) -> None:
        self._ledger, self._member, self._state = ledger, member, state
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ledger_heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=BEAT_INTERVAL_S)

    def _run(self) -> None:
        while not self._stop.is_set():
            step, token, phase = self._state()
            with suppress(RoleUnreachable, RoleRefused):
                self._ledger.live(self._member, step, token, phase)
            self._stop.wait(BEAT_INTERVAL_S)
