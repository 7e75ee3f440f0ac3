"""The run folder: where a job's files are, and how roles find one another through it.

Layout (`job.dump_folder` is the run folder itself):

    config.resolved.json   every value and where it came from
    exit.json              why the last job that stopped early did so (journal/exits.py)
    events.jsonl           one line per state change (see observability/events.py)
    metrics.jsonl          one object per committed step
    journal/               ledger and sealed batches (SQLite, WAL)
    scratch/               the journal of a debug mode, while it runs
    checkpoint/            TorchTitan checkpoints, step-N-<token>/
    weights/               published policies, newest last
    model/                 the tiny model directory, when the job makes its own
    profiles/              traces of profilers, step_N/ (observability.profile_steps)
    phases/                where each rank stands (see host/phase_file.py), and learned limits
    roles/<name>.json      address, pid and start time of each role that is up
    chaos.json             faults that were injected on purpose (chaos-command-*: by the command)
    chaos/                 what the injector needs
    logs/<name>/attempt_<n>.log
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

TOKEN_ENV = "TORCHTITAN_RL_FT_TOKEN"
RUN_ENV = "TORCHTITAN_RL_FT_RUN"
ATTEMPT_ENV = "TORCHTITAN_RL_FT_ATTEMPT"
REPLICA_ENV = "TORCHTITAN_RL_FT_REPLICA_ID"
STANDBY_ENV = "TORCHTITAN_RL_FT_STANDBY"  # NAME:FORM of a trainer process that waits for a place
STANDBY_PORT_ENV = "TORCHTITAN_RL_FT_STANDBY_PORT"  # where its ranks meet
LIGHTHOUSE_ENV = "TORCHFT_LIGHTHOUSE"  # torchft's own


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data`: a reader sees the old or the new bytes, also after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temp = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temp, path)
    except BaseException as e:
        Path(temp).unlink(missing_ok=True)
        if isinstance(e, OSError) and e.filename is None:  # a full disk: say which
            e.filename = str(path)
        raise
    fsync_dir(path.parent)


def fsync_dir(path: Path) -> None:
    """Make renames inside `path` durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ProcessId:
    """A process named so that a reused pid is not mistaken for it."""

    pid: int
    start_time: float  # seconds between boot and its start: does not move when clocks are set

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Raises ProcessLookupError."""
        return cls(pid, _process_stat(pid)[1])

    @classmethod
    def current(cls) -> ProcessId:
        return cls.of(os.getpid())

    def alive(self) -> bool:
        """True while this very process exists and is not a zombie."""
        try:
            state, start_time = _process_stat(self.pid)
        except ProcessLookupError:
            return False
        return abs(start_time - self.start_time) < 0.5 / _TICKS_PER_S and state not in "ZX"


def _process_stat(pid: int) -> tuple[str, float]:
    """State letter and start (seconds since boot) of a process. Raises ProcessLookupError."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"no process {pid}") from None
    fields = stat[stat.rindex(")") + 2 :].split()  # proc(5); the name may hold blanks
    return fields[0], int(fields[19]) / _TICKS_PER_S


@dataclass(frozen=True)
class RoleAddress:
    """What `roles/<name>.json` holds. `url` has no trailing slash; lighthouse: torchft's own."""

    name: str  # "lighthouse", "serving", "rollout", "trainer-0", ...
    url: str
    pid: int
    start_time: float
    attempt: int
    host: str

    def alive(self) -> bool:
        """False only when the role ran on this host and is gone."""
        if self.host != socket.gethostname():
            return True
        return ProcessId(self.pid, self.start_time).alive()


class RunFolder:
    """Paths of one run and the registry of its roles."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).resolve()

    @property
    def resolved_config(self) -> Path:
        return self.path / "config.resolved.json"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def journal(self) -> Path:
        return self.path / "journal"

    @property
    def scratch_journal(self) -> Path:
        """Where a debug mode keeps what it needs to go on after a fault; it ends with the job."""
        return self.path / "scratch" / "journal"

    def remove_scratch(self) -> None:
        shutil.rmtree(self.path / "scratch", ignore_errors=True)

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def profiles(self) -> Path:
        return self.path / "profiles"

    @property
    def phases(self) -> Path:
        return self.path / "phases"

    def log_file(self, name: str, attempt: int) -> Path:
        return self.path / "logs" / name / f"attempt_{attempt}.log"

    def next_attempt(self, name: str) -> int:
        """Number of the next start of `name`, counted over all lives of the run folder by the
        logs of earlier ones."""
        logs = self.log_file(name, 1).parent.glob("attempt_*.log")
        numbers = [f.stem.removeprefix("attempt_") for f in logs]
        return max((int(n) for n in numbers if n.isdigit()), default=0) + 1

    def link_log(self, name: str, attempt: int, log: Path) -> None:
        """Let start `attempt` of `name` be found where it writes: at `log`."""
        link = self.log_file(name, attempt)
        link.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # of a group that was started by hand
            link.symlink_to(os.path.relpath(log, link.parent))

    # Roles ------------------------------------------------------------------------------

    def register(self, name: str, url: str, attempt: int | None = None) -> RoleAddress:
        """Announce the calling process as role `name`, ready at `url`."""
        me = ProcessId.current()
        if attempt is None:
            attempt = int(os.environ.get(ATTEMPT_ENV, "1"))
        address = RoleAddress(name, url, me.pid, me.start_time, attempt, socket.gethostname())
        self.announce(address)
        return address

    def announce(self, address: RoleAddress) -> None:
        """Register a role, which may be another process."""
        path = self._role_file(address.name)
        write_atomic(path, json.dumps(asdict(address), indent=1).encode())

    def unregister(self, name: str) -> None:
        self._role_file(name).unlink(missing_ok=True)

    def role(self, name: str) -> RoleAddress | None:
        """The registered address of `name`, dead or alive; None when it never came up, or what is
        there is damaged or of another version: nobody can be found by it."""
        try:
            return RoleAddress(**json.loads(self._role_file(name).read_bytes()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def roles(self) -> list[RoleAddress]:
        files = sorted((self.path / "roles").glob("*.json"))
        found = [self.role(f.stem) for f in files]
        return [r for r in found if r is not None]

    def _role_file(self, name: str) -> Path:
        return self.path / "roles" / f"{name}.json"

    # Token ------------------------------------------------------------------------------

    def token(self, create: bool = False) -> str:
        """The run's secret for every HTTP route.

        From the environment, else from a private file *outside* the run folder, so that no
        output file holds it. Raises FileNotFoundError when there is none and `create` is off.
        """
        if value := os.environ.get(TOKEN_ENV):
            return value
        path = self._token_file()
        if create and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            fd, temp = tempfile.mkstemp(dir=path.parent)  # mode 0600
            with os.fdopen(fd, "w") as f:
                f.write(secrets.token_urlsafe(24))
            with contextlib.suppress(FileExistsError):  # another role was first: its token holds
                os.link(temp, path)
            os.unlink(temp)
        try:
            return path.read_text()
        except FileNotFoundError:
            raise FileNotFoundError(
                f"no token for the run in {self.path}: set {TOKEN_ENV}, or start the job with "
                "`torchtitan run` on this machine first"
            ) from None

    def forget_token(self) -> None:
        self._token_file().unlink(missing_ok=True)

    def set_token(self, token: str) -> None:
        """Go on with the secret of an earlier run, for the roles that are started by hand too."""
        self._token_file().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(self._token_file(), token.encode())  # mode 0600

    def _token_file(self) -> Path:
        name = str(self.path).strip("/").replace("/", "%")
        return state_home() / f"{name[-200:]}.token"


def state_home() -> Path:
    """Where this package keeps what is private to the user and this machine."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "torchtitan_rl_ft"
