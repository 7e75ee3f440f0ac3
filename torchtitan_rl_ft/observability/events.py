"""The one record of a run: every state change is one line of `events.jsonl`.

ETTR, metrics, the console, reports and the simulator are derived from these lines and from
nothing else. Any process of the run may append: a line is one `write` on an O_APPEND
descriptor, so lines of several processes never mix.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from torchtitan_rl_ft.observability import json_text

_LINE_START = b'{"wall_s":'


class Kind(StrEnum):
    """What happened. A new kind is added here and nowhere else."""

    RUN = "run"  # phase: start, resume, reattach, end; cause: outcome; data: roles, ranks
    SPAWN = "spawn"  # a process was started; data: pid, start_time, log
    READY = "ready"  # a role answers; data: url
    EXIT = "exit"  # a process ended; data: pid, returncode, signal; cause
    RESTART = "restart"  # started again; phase: the rung (escalation.py); data: attempt, delay_s
    ESCALATE = "escalate"  # a rung is used up or skipped; phase: the next one; cause; data: subject
    TRANSITION = "transition"  # a state machine moved; data: subject, old, new; cause
    ANOMALY = "anomaly"  # a number far from those of the steps before; cause; data: what, value
    FAULT = "fault"  # something was found broken; data: subject; cause
    PHASE = "phase"  # a role entered a phase; phase, step
    ISSUE = "issue"  # prompts were drawn from the data source; data: groups
    PARTIAL = "partial"  # phase: resume, discard; unfinished samples; cause; data: group, tokens
    ACCEPT = "accept"  # a prompt group was rolled out and rewarded; data: group, took_s, trace
    DROP = "drop"  # a group or batch was dropped; cause; data: group | batch
    SEAL = "seal"  # a batch became final; step; data: batch, digest, samples, tokens, groups
    QUORUM = "quorum"  # data: quorum_id, participants, rank, members, left (since a refusal)
    HEAL = "heal"  # a peer's state was taken; data: from_step, source, bytes, quorum_s, ...
    BEGIN = "begin"  # the ledger's answer to begin; cause; data: decision
    REFUSE = "refuse"  # a commit was refused; cause; data: members, failing (groups)
    COMMIT = "commit"  # step; data: batch, token, participants, shares, reporter
    CONFIRM = "confirm"  # another group reported the same commit
    SUPERSEDE = "supersede"  # the ledger was rewound; data: from_step, to_step
    PUBLISH = "publish"  # a policy version was announced; version, step
    LEND = "lend"  # phase: lend, return; an engine's place; cause; data: subject
    PROMOTE = "promote"  # a standby engine, or trainer, takes the place of a lost one; cause
    FETCH = "fetch"  # a relay holds a version, checked; step; data: subject, seconds, bytes_from
    INSTALL = "install"  # an engine holds a version, verified; version; data: slot
    MOVE = "move"  # a request left an engine unfinished; cause; data: request, samples, tokens kept
    CHECKPOINT = "checkpoint"  # a checkpoint is durable; step; data: path, saved_by (group)
    RESTORE = "restore"  # a checkpoint was loaded; step; data: path, skipped
    DUMP = "dump"  # a sealed batch was dumped; step; data: path, samples, tokens, digest, reward
    EVAL = "eval"  # greedy evaluation; data: reward, prompts
    SESSION = "session"  # serving has another owner, or none; phase: attach, detach, ...
    STOP = (
        "stop"  # the job stops at a step boundary; step; cause; data: replica_id: it leaves alone
    )
    WARN = "warn"  # suspicious, the run goes on; cause
    CHAOS = "chaos"  # phase: inject, lift; cause: the line; data: fault, subject, pid, late_s


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line. `wall_s` is Unix time; `mono_s` is the host's monotonic clock (same for all
    processes of a host), the one to subtract."""

    wall_s: float
    mono_s: float
    run: str
    role: str  # supervisor, lighthouse, serving, rollout, trainer, inspector, chaos
    name: str  # the process: "trainer-1", "serving", ...
    attempt: int
    pid: int
    kind: Kind
    phase: str | None = None
    cause: str | None = None
    step: int | None = None
    version: int | None = None
    data: dict[str, Any] = field(default_factory=dict)

    def to_line(self) -> bytes:
        fields = {k: v for k, v in asdict(self).items() if v is not None and v != {}}
        return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


class EventSink(Protocol):
    """What code that reports state changes takes; tests pass a list-backed one."""

    def emit(
        self,
        kind: Kind,
        *,
        phase: str | None = None,
        cause: str | None = None,
        step: int | None = None,
        version: int | None = None,
        **data: Any,
    ) -> None: ...


class Listener(Protocol):
    """Is told each event of a process. Costs no more than an append to a queue."""

    def take(self, item: Event) -> None: ...

    def close(self) -> None: ...


class EventLog:
    """Appends the events of one process to `events.jsonl`."""

    def __init__(self, path: Path, *, run: str, role: str, name: str, attempt: int = 1) -> None:
        self._path = path
        self._fd = _open(path)
        self._run, self._role, self._name, self._attempt = run, role, name, attempt
        self._listeners: list[Listener] = []

    def listen(self, listener: Listener) -> None:
        """Told from now on, also what a full disk keeps out of the file; closed with it."""
        self._listeners.append(listener)

    def move(self, path: Path, run: str) -> None:
        """Append to the events of another run from now on."""
        fd = _open(path)
        os.close(self._fd)
        self._path, self._fd, self._run = path, fd, run

    def emit(
        self,
        kind: Kind,
        *,
        phase: str | None = None,
        cause: str | None = None,
        step: int | None = None,
        version: int | None = None,
        **data: Any,
    ) -> None:
        event = Event(
            wall_s=time.time(),
            mono_s=time.monotonic(),
            run=self._run,
            role=self._role,
            name=self._name,
            attempt=self._attempt,
            pid=os.getpid(),
            kind=kind,
            phase=phase,
            cause=cause,
            step=step,
            version=version,
            data=data,
        )
        for listener in self._listeners:
            listener.take(event)
        self._append(event.to_line())

    def _append(self, line: bytes) -> None:
        """Raises OSError that names the file."""
        try:
            if os.fstat(self._fd).st_nlink == 0:  # removed by hand: what follows is kept
                fd = _open(self._path)
                os.dup2(fd, self._fd, inheritable=False)  # threads may be writing
                os.close(fd)
            written = os.write(self._fd, line)
        except OSError as e:
            raise OSError(e.errno, e.strerror, str(self._path)) from None
        if written != len(line):  # the disk has just become full
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        os.close(self._fd)

    @property
    def about(self) -> dict[str, Any]:
        """What is the same in all its events."""
        return {
            "run": self._run,
            "role": self._role,
            "name": self._name,
            "attempt": self._attempt,
        }


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


class EventList:
    """An EventSink that keeps events in memory."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def emit(self, kind: Kind, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})


def first_line(cause: Any) -> str:
    """A cause for one line of text: its first line, blanks run together. What would steer a
    terminal (it may come from a user's code) is a question mark."""
    lines = str(cause or "").strip().splitlines()
    text = " ".join(lines[0].split()) if lines else ""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def read_events(
    path: Path, on_unread: Callable[[bytes], None] = lambda line: None
) -> Iterator[Event]:
    """Events of a file in order. A line without its end, which is still being written, ends the
    iteration. A line that a full disk tore is skipped, and what was appended to it is read; so is
    one that is no event of this version. `on_unread` is told of those that are skipped."""
    with open(path, "rb") as f:
        for line in f:
            if not line.endswith(b"\n"):
                return
            if (event := as_event(read_line(line))) is not None:
                yield event
            else:
                on_unread(line)


def as_event(read: Any) -> Event | None:
    """Of what was read as JSON; None when it is no event of this version."""
    try:
        known = Event.__dataclass_fields__
        fields: dict[str, Any] = {k: v for k, v in read.items() if k in known}
        fields["kind"] = Kind(fields["kind"])
        event = Event(**fields)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return event if _sound(event) else None


LATEST_S = 1e11
"""A clock that says more (the year 5138) is none."""

MOST = 2**63
"""A count that is not below it is none."""


def _sound(event: Event) -> bool:
    """Whether what all readers count on is of its type."""
    clocks = (event.wall_s, event.mono_s)
    times = all(isinstance(t, int | float) and abs(t) < LATEST_S for t in clocks)  # NaN neither
    counts = (event.step, event.version, event.pid)
    numbers = all(n is None or (isinstance(n, int) and abs(n) < MOST) for n in counts)
    texts = all(isinstance(t, str) for t in (event.name, event.role, event.phase or ""))
    return times and numbers and texts and isinstance(event.data, dict)


def read_line(line: bytes) -> Any:
    """A line as JSON, or what was appended to a torn one. None for what is neither."""
    for start in (0, max(0, line.rfind(_LINE_START))):
        with contextlib.suppress(ValueError):
            return json_text.parse(line[start:])
    return None


def read_event(line: bytes) -> dict[str, Any] | None:
    """A line as the JSON of an event; None for what is no event of this version."""
    read = read_line(line)
    return None if as_event(read) is None else read
