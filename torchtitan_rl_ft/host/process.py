"""Processes of a run: started so that none outlives its parent, awaited without polling, ended
as whole trees, and always named by pid and start time, so that a reused pid is never hit."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from torchtitan_rl_ft.host import held_start, parent_bound
from torchtitan_rl_ft.run_folder import ProcessId

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent has died, so that
    `descendants` misses none. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def describe(returncode: int | None) -> str:
    """`returncode` as `subprocess` reports it (negative: a signal; None: not our child, nobody
    told us), in words."""
    if returncode is None:
        return "ended, exit code unknown (it was adopted)"
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"


class Child:
    """A process that this one started, in a session of its own."""

    def __init__(self, popen: subprocess.Popen[bytes], log: Path) -> None:
        self._popen = popen
        self.log = log
        self.id = ProcessId.of(popen.pid)
        self.started_mono_s = time.monotonic()

    @property
    def pid(self) -> int:
        return self.id.pid

    @property
    def returncode(self) -> int | None:
        """As `subprocess` gives it; None while it runs."""
        return self._popen.poll()

    async def wait(self) -> int:
        """The return code, at once when the process ends: its pidfd becomes readable."""
        if self._popen.poll() is None:
            await wait_gone(self.id)
        return self._popen.wait()

    def release(self) -> None:
        """Let a process that was started `held` run its program."""
        if self._popen.stdin is not None:
            with self._popen.stdin as pipe, contextlib.suppress(BrokenPipeError):
                pipe.write(b"1")  # it may have been killed meanwhile
            self._popen.stdin = None

    def send(self, signum: signal.Signals) -> None:
        """Signal the process itself; nothing when it has ended."""
        self._popen.send_signal(signum)

    def end(self) -> int:
        """Kill the process itself and return its return code, in a caller without an event loop."""
        self._popen.kill()
        return self._popen.wait()


class Adopted:
    """A living process that another one started, named by what was recorded of it. Its exit is
    noticed like a child's, its return code is not to be had."""

    returncode: None = None

    def __init__(self, target: ProcessId, log: Path) -> None:
        self.id, self.log = target, log
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - target.start_time
        self.started_mono_s = time.monotonic() - age_s

    @property
    def pid(self) -> int:
        return self.id.pid

    async def wait(self) -> None:
        await wait_gone(self.id)


async def wait_gone(target: ProcessId) -> int | None:
    """Until a process, which need not be a child, has ended. No polling. Returns its return code
    when that can be told: not of a process whose parent was faster, or of another user."""
    try:
        fd = os.pidfd_open(target.pid)
    except ProcessLookupError:
        return None
    loop = asyncio.get_running_loop()
    gone = loop.create_future()
    loop.add_reader(fd, lambda: gone.done() or gone.set_result(None))
    try:
        if target.alive():  # else: the pid was someone else's already
            await gone
            return zombie_returncode(target.pid)
        return None
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def scheduled(target: ProcessId) -> tuple[float, int] | None:
    """Seconds that the main thread of a process has been on a CPU or waited for one, and how often
    it got one. None when it is gone or the kernel does not tell (/proc/<pid>/schedstat).

    A process at work beside many others, or stopped now and then, grows both; one that is stopped,
    hung or idle neither."""
    try:
        on_ns, waited_ns, runs = Path(f"/proc/{target.pid}/schedstat").read_text().split()
    except (OSError, ValueError):
        return None
    if not target.alive():
        return None
    return (int(on_ns) + int(waited_ns)) / 1e9, int(runs)


def zombie_returncode(pid: int) -> int | None:
    """How a process ended that its parent has not collected yet: proc(5), `exit_code` in
    /proc/<pid>/stat. The kernel shows 0 when we may not know, so 0 counts as unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    status = int(fields[49])
    return os.waitstatus_to_exitcode(status) if fields[0] == "Z" and status else None


def spawn(
    argv: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str],
    outlives_parent: bool = False,
    held: bool = False,
) -> Child:
    """Start `argv` in a session of its own with stdout and stderr appended to `log`.

    Unless `outlives_parent`, the kernel kills it when this process dies, whatever the way; call
    it from the main thread then (see parent_bound.py). `held`: the program runs only after
    `Child.release` (see held_start.py). Raises OSError.
    """
    command = list(argv)
    if held:
        command = [sys.executable, "-I", "-S", held_start.__file__, *command]
    if not outlives_parent:
        wrapper = [sys.executable, "-I", "-S", parent_bound.__file__, str(os.getpid())]
        command = wrapper + command
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as out:
        popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if held else subprocess.DEVNULL,
            bufsize=0,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=dict(env),
            start_new_session=True,
        )
    return Child(popen, log)


def descendants(root: ProcessId | None = None) -> list[ProcessId]:
    """All living processes below `root` (this process when None), without `root` itself."""
    root = root or ProcessId.current()
    if not root.alive():
        return []
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(root.pid).children(recursive=True):
            with contextlib.suppress(ProcessLookupError):
                if (child := ProcessId.of(process.pid)).alive():
                    found.append(child)
    return found


def listens(target: ProcessId, port: int) -> bool:
    """Whether it listens at TCP `port`; also True when nobody may look."""
    try:
        found = psutil.Process(target.pid).net_connections(kind="tcp")
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True
    return any(c.status == psutil.CONN_LISTEN and c.laddr[1] == port for c in found)


def session_members(leader_pid: int) -> list[ProcessId]:
    """Living processes of the session that process `leader_pid` led; it may have ended."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == leader_pid and (member := ProcessId.of(pid)).alive():
                found.append(member)
    return found


def reap_adopted(own: Iterable[int]) -> None:
    """Collect zombies that were adopted, leaving alone the pids in `own`, which have a waiter."""
    known = set(own)
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
            if process.pid not in known and process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)


def kill(target: ProcessId, signum: signal.Signals = signal.SIGKILL) -> bool:
    """Signal exactly this process. False when it is gone already."""
    if not target.alive():
        return False
    try:
        os.kill(target.pid, signum)
    except ProcessLookupError:
        return False
    return True


async def kill_alone_until_gone(target: ProcessId, timeout_s: float) -> bool:
    """SIGKILL this process and nothing below it. False when it is there after `timeout_s`."""
    kill(target)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await wait_gone(target)
    return not target.alive()


def freeze(roots: Iterable[ProcessId]) -> set[ProcessId]:
    """Stop `roots` and all below them; returns them all. A stopped process forks no more, so
    nothing escapes between this list and the kill that follows."""
    frozen: set[ProcessId] = set()
    fresh = {p for p in roots if p.alive()}
    while fresh:
        for target in fresh:
            kill(target, signal.SIGSTOP)
        frozen |= fresh
        fresh = {p for target in frozen for p in descendants(target)} - frozen
    return frozen


def _freeze_and_kill(roots: Iterable[ProcessId]) -> set[ProcessId]:
    frozen = freeze(roots)
    for target in frozen:
        kill(target)
    return frozen


async def kill_until_gone(targets: Iterable[ProcessId], deadline_mono_s: float) -> list[ProcessId]:
    """SIGKILL `targets` and all below them; returns those alive at the deadline."""
    # In a thread: it looks through /proc many times. Both there: a caller that is cancelled leaves
    # nothing stopped and alive.
    known = await asyncio.to_thread(_freeze_and_kill, list(targets))
    while True:
        known = {p for p in known if p.alive()}
        if not known or time.monotonic() >= deadline_mono_s:
            return sorted(known, key=lambda p: p.pid)
        for target in known:
            kill(target)
        await asyncio.sleep(_POLL_S)
