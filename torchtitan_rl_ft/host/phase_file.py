"""Where a process of a run stands: a small file that it rewrites, read by a watcher outside it.

    PHASES/<host>.<pid>     checksum, JSON, blanks up to RECORD_BYTES

Two counters tell a wedged process from one that waits: `marks` grows when the work goes on,
`beats` when a side thread (or the event loop) of the process runs at all. A process that is
stopped, or whose GIL is held, does neither.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.run_folder import ProcessId

RECORD_BYTES = 2048
"""Within one page: rewritten by one call."""

LAST_OF_A_STEP = "report"
"""Once a process has been through this phase, its phases are no longer the first of their kind."""

FIRST = "first_"
"""Before a phase's name: until the process has committed a step (caches are cold, code is
compiled)."""

ONCE = frozenset({"starting", "standby"})
"""Phases before any step: nothing to tell apart."""

TRAINER_PHASES = (
    "starting",
    "standby",
    "attach",
    "waiting_for_batch",
    "quorum",
    "forward_backward",
    "reduce",
    "commit",
    "optimizer",
    "report",
    "checkpoint",
    "publish",
    "dump",
    "restarting",
)
"""All that a trainer's rank can be in."""


@dataclass(frozen=True, kw_only=True)
class PhaseRecord:
    """What one process says of itself."""

    name: str  # of the role: "trainer-1", "standby-0", "rollout"
    rank: str = ""  # inside its group; "launcher"; "" for a role of one process
    pid: int
    start_time: float
    host: str
    phase: str
    step: int | None = None
    settled: bool = False  # it has committed a step
    marks: int = 0
    beats: int = 0
    since_mono_s: float = 0.0  # when the phase was entered, on the clock of its host
    generation: int = 0  # in-process restarts of its group, as it knows them
    longest_s: dict[str, float] = field(default_factory=dict)  # phase (perhaps first_) -> seconds
    counts: dict[str, int] = field(default_factory=dict)  # how often each was finished

    @property
    def id(self) -> ProcessId:
        return ProcessId(self.pid, self.start_time)

    @property
    def key(self) -> str:
        """Of its limit."""
        return key_of(self.phase, self.settled)

    @property
    def who(self) -> str:
        return f"{self.name} rank {self.rank}" if self.rank.isdigit() else self.name

    def encode(self) -> bytes:
        return encode(asdict(self))

    @classmethod
    def decode(cls, data: bytes) -> PhaseRecord | None:
        """None for one that is being rewritten, or no record."""
        body = data[9:].rstrip()
        try:
            if int(data[:8], 16) != zlib.crc32(body):
                return None
            return cls(**json.loads(body))
        except (ValueError, TypeError):
            return None


def encode(fields: dict[str, Any]) -> bytes:
    body = json.dumps(fields, separators=(",", ":")).encode()
    return (b"%08x " % zlib.crc32(body) + body).ljust(RECORD_BYTES - 1) + b"\n"


def key_of(phase: str, settled: bool) -> str:
    return phase if settled or phase in ONCE else FIRST + phase


class PhaseFile:
    """Written by the process that it speaks of. Safe to use from several threads.

    Raises OSError from `open` only: a full disk later must not end a step.
    """

    def __init__(self, folder: Path, name: str, rank: str = "", generation: int = 0) -> None:
        me = ProcessId.current()
        self._path = path_of(folder, me.pid)
        self._fd = self._open()
        self._lock = threading.Lock()
        self._closed = False
        self._now: dict[str, Any] = dict(
            name=name,
            rank=rank,
            pid=me.pid,
            start_time=me.start_time,
            host=socket.gethostname(),
            phase="starting",
            since_mono_s=time.monotonic(),
            generation=generation,
        )
        self._marks = self._beats = 0
        self._marked_mono_s = time.monotonic()
        self._settled = False
        self._longest_s: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        with self._lock:
            self._write()

    def enter(self, phase: str, step: int | None = None) -> None:
        """The work goes on in `phase`; the phase it is in already: it has come forward there."""
        with self._lock:
            self._mark()
            if phase != self._now["phase"]:
                self._leave(self._marked_mono_s)
                self._now["phase"] = phase
            self._now["step"] = step
            self._write()

    def start_again(self, generation: int) -> None:
        """The process begins anew, as after its start."""
        with self._lock:
            self._mark()
            self._settled = False
            self._now |= dict(
                phase="starting", step=None, since_mono_s=time.monotonic(), generation=generation
            )
            self._write()

    def rename(self, name: str) -> None:
        """The process takes another role."""
        with self._lock:
            self._now["name"] = name
            self._write()

    def beat(self) -> None:
        """Called all the time, by a thread that needs nothing but the interpreter."""
        with self._lock:
            self._beats += 1
            self._be_there()
            self._write()

    def now(self) -> tuple[str, float]:
        """(key of its limit, seconds since it has last come forward)."""
        with self._lock:
            key = key_of(str(self._now["phase"]), self._settled)
            return key, time.monotonic() - self._marked_mono_s

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._fd)
                self._path.unlink(missing_ok=True)

    def _open(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def _be_there(self) -> None:
        """A file that was removed by hand is made again: without it nobody watches."""
        if self._closed or os.fstat(self._fd).st_nlink:
            return
        with contextlib.suppress(OSError):
            fd = self._open()
            os.close(self._fd)
            self._fd = fd

    def _mark(self) -> None:
        self._marks += 1
        self._marked_mono_s = time.monotonic()

    def _leave(self, now_s: float) -> None:
        old = str(self._now["phase"])
        key = key_of(old, self._settled)
        took_s = now_s - self._now["since_mono_s"]
        self._longest_s[key] = round(max(took_s, self._longest_s.get(key, 0.0)), 3)
        self._counts[key] = self._counts.get(key, 0) + 1
        self._settled |= old == LAST_OF_A_STEP
        self._now["since_mono_s"] = now_s

    def _write(self) -> None:
        if self._closed:
            return
        self._now |= {
            "settled": self._settled,
            "marks": self._marks,
            "beats": self._beats,
            "longest_s": self._longest_s,
            "counts": self._counts,
        }
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, encode(self._now), 0)


def path_of(folder: Path, pid: int) -> Path:
    return folder / f"{socket.gethostname()}.{pid}"


def read(path: Path) -> PhaseRecord | None:
    """None when there is no whole record now."""
    try:
        return PhaseRecord.decode(path.read_bytes())
    except OSError:
        return None


def records(folder: Path) -> Iterator[PhaseRecord]:
    """Of all living processes of this host. Files of dead ones are removed."""
    for path in sorted(folder.glob(f"{socket.gethostname()}.*")):
        record = read(path)
        if record is None:
            continue
        if record.id.alive():
            yield record
        else:
            path.unlink(missing_ok=True)
