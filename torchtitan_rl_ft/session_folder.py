"""The session folder: what outlives a job, and how the next one finds it.

A session is a serving role with its engines. It belongs to one job at a time (its owner) and may
be kept for the next one. All of it is on one host, so its folder is outside the run folder:

    $XDG_STATE_HOME/torchtitan_rl_ft/sessions/<id>/
        session.json    who serves, who owns, what may not change (written by serving alone)
        engines.json    what engines hold (written by serving/engine_records.py)
        token           secret of the HTTP routes, mode 0600
        serving.lock    held by the serving process while it lives
        warden.lock     held by the warden (serving/warden.py)

Standard library only: the warden reads it too.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.run_folder import ProcessId, state_home, write_atomic

JOB_ENV = "TORCHTITAN_RL_FT_JOB"
"""The job that a role belongs to, as JSON of `Owner`; not set for a role started by hand."""

FORMAT = 1


class SessionUnreadable(Exception):
    """A file of the session cannot be read: whose it is, or what its engines hold, cannot be
    told."""


class SessionBusy(Exception):
    """Another process serves the session."""


def boot_s() -> float:
    """Seconds since boot, sleep included: does not move when clocks are set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True)
class HostProcess:
    """A process of some host."""

    pid: int
    start_time: float  # seconds between boot and its start
    host: str

    @property
    def id(self) -> ProcessId:
        return ProcessId(self.pid, self.start_time)

    def alive(self) -> bool | None:
        """None when it cannot be told from here."""
        return self.id.alive() if self.host == socket.gethostname() else None


@dataclass(frozen=True)
class Owner(HostProcess):
    """A job: one `torchtitan run`. The process is the supervisor."""

    attempt: str
    """Random, other for each start."""

    run_folder: str

    @classmethod
    def this_process(cls, attempt: str, run_folder: Path) -> Owner:
        me = ProcessId.current()
        return cls(me.pid, me.start_time, socket.gethostname(), attempt, str(run_folder))

    @classmethod
    def from_environment(cls) -> Owner | None:
        """The job that started this role; None when a person did."""
        text = os.environ.get(JOB_ENV)
        return cls(**json.loads(text)) if text else None

    def environment(self) -> dict[str, str]:
        return {JOB_ENV: json.dumps(asdict(self))}

    def __str__(self) -> str:
        return f"the job in {self.run_folder} (process {self.pid} on {self.host})"


@dataclass(frozen=True)
class ServingAt(HostProcess):
    """A serving role. `url` is empty until it is ready."""

    url: str
    log: str
    """Its log file; empty when it has none."""


@dataclass(frozen=True)
class Trainer(HostProcess):
    """A trainer process that a session ends when its job has died."""

    attempt: str
    name: str


@dataclass(frozen=True)
class SessionRecord:
    """What session.json holds."""

    id: str
    rule: str
    """What the id was made from."""

    serving: ServingAt
    owner: Owner | None = None
    by_hand: bool = False
    """Serving was started without a job and owns itself: nothing is fenced, nothing expires."""

    last_attempt: str = ""
    """The owner, or the one that let go last."""

    run_folder: str = ""
    """Where that one works, and serving with it."""

    published: bool = False
    """The owner's trainer has published a policy."""

    frozen: dict[str, Any] = field(default_factory=dict)
    retain_ttl_s: float = 0.0
    unowned_since_boot_s: float | None = None
    trainers: tuple[Trainer, ...] = ()
    warden: ProcessId | None = None

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SessionRecord:
        """Raises ValueError, KeyError, TypeError."""
        fields = dict(data)
        if fields.pop("format") != FORMAT:
            raise ValueError(f"format {data['format']}, not {FORMAT}")
        record = cls(**fields)
        owner, warden = fields["owner"], fields["warden"]
        return replace(
            record,
            serving=ServingAt(**fields["serving"]),
            owner=Owner(**owner) if owner is not None else None,
            trainers=tuple(Trainer(**t) for t in fields["trainers"]),
            warden=ProcessId(**warden) if warden is not None else None,
        )


@dataclass(frozen=True)
class EngineHold:
    """What one recorded engine holds on this host."""

    roots: tuple[ProcessId, ...]
    members: tuple[ProcessId, ...]
    scratch: Path
    shared_memory: tuple[Path, ...]

    @property
    def processes(self) -> tuple[ProcessId, ...]:
        return (*self.roots, *self.members)


def sessions_home() -> Path:
    return state_home() / "sessions"


class SessionFolder:
    """Paths of one session and its record."""

    def __init__(self, session_id: str, home: Path | None = None) -> None:
        self.id = session_id
        self.path = (home or sessions_home()) / session_id

    @classmethod
    def at(cls, path: Path) -> SessionFolder:
        return cls(path.name, path.parent)

    @classmethod
    def all(cls) -> list[SessionFolder]:
        """Sessions of this user on this host, by id."""
        if not sessions_home().is_dir():
            return []
        return [cls(p.name) for p in sorted(sessions_home().iterdir()) if p.is_dir()]

    @property
    def record_file(self) -> Path:
        return self.path / "session.json"

    @property
    def engines(self) -> Path:
        """The file of serving/engine_records.py."""
        return self.path / "engines.json"

    # Record -----------------------------------------------------------------------------

    def read(self) -> SessionRecord | None:
        """None when there is no such session. Raises SessionUnreadable."""
        try:
            return SessionRecord.from_json(json.loads(self.record_file.read_bytes()))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise SessionUnreadable(
                f"{self.record_file} cannot be read ({type(e).__name__}: {e}): end what it names, "
                f"then remove {self.path}"
            ) from e

    def write(self, record: SessionRecord) -> None:
        self._make()
        write_atomic(self.record_file, json.dumps(record.to_json(), indent=1).encode())

    def remove(self) -> None:
        """Forget the session. The record goes first: without it there is none. The lock goes last:
        what another job writes into a session of this name is none of what is removed."""
        self.record_file.unlink(missing_ok=True)
        if (memory := self.memory()) is not None:
            shutil.rmtree(memory, ignore_errors=True)
        for file in self.path.glob("*"):
            if file != self._lock_file:
                file.unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)

    def _make(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)

    # Engines ----------------------------------------------------------------------------

    def engine_holds(self) -> list[EngineHold]:
        """What the recorded engines hold. Raises SessionUnreadable."""
        try:
            records = json.loads(self.engines.read_bytes())
            return [_hold(record) for record in records.values()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise SessionUnreadable(
                f"{self.engines} cannot be read ({type(e).__name__}: {e}): end the engines of the "
                "session that are still there, then remove the file"
            ) from e

    def living(self) -> bool:
        """Whether something of the session lives, or may live: its owner, its serving role, an
        engine. Raises SessionUnreadable."""
        record = self.read()
        known = [] if record is None else [record.serving, record.owner]
        if any(p is not None and p.alive() is not False for p in known):
            return True
        return any(p.alive() for hold in self.engine_holds() for p in hold.processes)

    # Secret and locks -------------------------------------------------------------------

    def token(self) -> str | None:
        try:
            return (self.path / "token").read_text()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write_token(self, token: str) -> None:
        self._make()
        write_atomic(self.path / "token", token.encode())  # mode 0600

    def hold_memory(self, folder: Path) -> None:
        """Policies are there, in memory: removed with the session, whoever ends it."""
        self._make()
        write_atomic(self._memory_file, str(folder).encode())

    def memory(self) -> Path | None:
        """Where policies are in memory; None when they are not."""
        try:
            return Path(self._memory_file.read_text())
        except OSError:
            return None

    @property
    def _memory_file(self) -> Path:
        return self.path / "memory"

    @property
    def _lock_file(self) -> Path:
        return self.path / "serving.lock"

    @contextlib.contextmanager
    def serving_lock(self) -> Generator[None]:
        """Hold the session for one serving process; the kernel lets go when it dies.

        Raises SessionBusy.
        """
        self._make()
        fd = os.open(self._lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SessionBusy(f"session {self.id} is served by another process") from None
            if not _is_at(fd, self._lock_file):
                raise SessionBusy(f"session {self.id} is just being removed")
            yield
        finally:
            os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    """Whether the open file is the one that others find there."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _hold(record: dict[str, Any]) -> EngineHold:
    return EngineHold(
        roots=tuple(ProcessId(p["pid"], p["start_time"]) for p in record["processes"]),
        members=tuple(ProcessId(pid, start_time) for pid, start_time in record["members"]),
        scratch=Path(record["scratch"]),
        shared_memory=tuple(map(Path, record["shared_memory"])),
    )
