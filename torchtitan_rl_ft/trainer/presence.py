"""Who this rank is to the rest of the run: member, phases, events."""

from __future__ import annotations

import functools
import logging
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.config.resolve import Resolved
from torchtitan_rl_ft.host.phase_file import PhaseFile
from torchtitan_rl_ft.journal.records import Member
from torchtitan_rl_ft.observability.events import EventLog, EventSink, Kind
from torchtitan_rl_ft.observability.otel import export_events, forward_torchft
from torchtitan_rl_ft.rpc.client import RoleClient, RoleRefused, RoleUnreachable
from torchtitan_rl_ft.run_folder import ATTEMPT_ENV, ProcessId, RunFolder
from torchtitan_rl_ft.session_folder import Owner

logger = logging.getLogger(__name__)

ANNOUNCE_TIMEOUT_S = 120.0


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
    return _event_log(run.path, replica_id)


@functools.cache
def _event_log(run: Path, replica_id: int) -> EventLog:
    """One of a process, however often it begins again."""
    events = EventLog(
        RunFolder(run).events,
        run=run.name,
        role="trainer",
        name=f"trainer-{replica_id}",
        attempt=int(os.environ.get(ATTEMPT_ENV, "1")),
    )
    folder = RunFolder(run)
    settings = Resolved.read(run).sections.otel
    if (exporter := export_events(events, settings, folder.token())) is not None:
        forward_torchft(exporter)
    return events


class SessionMember:
    """Tells serving that this process belongs to a job, so that it is ended when that one has
    died and left it behind. From a side thread: training does not wait for it."""

    def __init__(self, serving: RoleClient, member: Member) -> None:
        self._serving, self._member = serving, member

    def announce(self) -> None:
        """Does nothing in a process that no job has started."""
        if (owner := Owner.from_environment()) is not None:
            name = f"trainer-{self._member.replica_id}.{os.environ.get('RANK', '0')}"
            threading.Thread(target=self._announce, args=(owner, name), daemon=True).start()

    def _announce(self, owner: Owner, name: str) -> None:
        body = {
            "attempt": owner.attempt,
            "name": name,
            "pid": self._member.pid,
            "start_time": self._member.start_time,
            "host": self._member.host,
        }
        try:
            self._serving.post("/v1/trainers", body, deadline_s=ANNOUNCE_TIMEOUT_S)
        except (RoleUnreachable, RoleRefused) as e:
            logger.warning("serving does not know %s: %s", name, e)


class PhaseClock:
    """The phase this rank is in, and the seconds spent in each since `restart`."""

    def __init__(self, events: EventSink, file: PhaseFile | None = None) -> None:
        """`file`: where whoever watches this rank reads its phase."""
        self._events, self._file = events, file
        self.phase = "starting"
        self._since = time.monotonic()
        self._seconds: dict[str, float] = {}

    def enter(self, phase: str, step: int) -> None:
        """The phase that it is in already: the work comes forward there."""
        if self._file is not None:
            self._file.enter(phase, step)
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
