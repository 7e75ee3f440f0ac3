"""The processes of one engine, and everything that they leave on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.host.footprint import mapped_shared_memory
from torchtitan_rl_ft.run_folder import ProcessId
from torchtitan_rl_ft.serving.engine_records import EngineRecord, ProcessRecord
from torchtitan_rl_ft.serving.launch import Launch

WORKER_PREFIX = "sglang::"
"""SGLang's schedulers and detokenizers give themselves such titles."""

SCHEDULER_PREFIX = WORKER_PREFIX + "scheduler"
DETOKENIZER_PREFIX = WORKER_PREFIX + "detokenizer"


@dataclass(frozen=True)
class WorkerGone:
    """One of SGLang's own processes has ended, the server process is up."""

    title: str
    pid: int
    returncode: int | None

    def __str__(self) -> str:
        how = f"{self.title} (pid {self.pid}) ended"
        if self.returncode is not None:
            how += f" ({process.describe(self.returncode)})"
        return f"{how}, the server process is up"


@dataclass
class EngineProcess:
    """A unit: processes that live and end together, the main one first, started here or adopted;
    their scratch folder, their shared memory."""

    processes: tuple[process.Child | process.Adopted, ...]
    url: str
    fingerprint: str
    scratch: Path
    members: frozenset[ProcessId] = frozenset()
    shared_memory: frozenset[Path] = frozenset()
    bootstrap_port: int | None = None
    """Where decode engines meet this prefill engine."""

    _observing: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def start(cls, launch: Launch, fingerprint: str, log: Path) -> EngineProcess:
        """All nodes, each with a log of its own. They outlive this process, so they run only
        once `release` says that they are recorded. Raises OSError, with none of them left."""
        children: list[process.Child] = []
        try:
            for node, argv in enumerate(launch.nodes):
                file = log.with_name(f"{log.stem}-node-{node}.log") if node else log
                children.append(
                    process.spawn(argv, log=file, env=launch.env, outlives_parent=True, held=True)
                )
        except OSError:
            for child in children:
                process.kill(child.id)
            raise
        port = launch.bootstrap_port
        return cls(tuple(children), launch.url, fingerprint, launch.scratch, bootstrap_port=port)

    @classmethod
    def adopt(cls, record: EngineRecord) -> EngineProcess:
        """One that another serving role has started."""
        processes = tuple(process.Adopted(p.id, p.log) for p in record.processes)
        return cls(
            processes,
            record.url,
            record.fingerprint,
            record.scratch,
            record.members,
            record.shared_memory,
            record.bootstrap_port,
        )

    def release(self) -> None:
        for started in self.processes:
            if isinstance(started, process.Child):
                started.release()

    @property
    def main(self) -> process.Child | process.Adopted:
        return self.processes[0]

    @property
    def id(self) -> ProcessId:
        return self.main.id

    @property
    def adopted(self) -> bool:
        return isinstance(self.main, process.Adopted)

    @property
    def shown(self) -> dict[str, Any]:
        """For status."""
        return {
            "pid": self.id.pid,
            "start_time": self.id.start_time,
            "log": str(self.main.log),
        }

    @property
    def returncode(self) -> int | None:
        """Of the first process that has ended, as `subprocess` gives it; None while all run and
        when nobody can tell."""
        return next((p.returncode for p in self.processes if p.returncode is not None), None)

    @property
    def ended(self) -> str | None:
        """How one of the processes ended, in words; None while all run."""
        for node, root in enumerate(self.processes):
            if _ended(root):
                how = process.describe(root.returncode)
                return f"node {node}: {how}" if len(self.processes) > 1 else how
        return None

    async def wait(self) -> str:
        """Until one of the processes ends; says how."""
        waits = [asyncio.ensure_future(p.wait()) for p in self.processes]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return self.ended or "ended"
        finally:
            for wait in waits:
                wait.cancel()

    def observe(self) -> None:
        """Note processes and shared memory. Segments have random names and stay after SIGKILL,
        and a process that loses its parent may be in no tree of ours: both have to be known
        before the end. Reads all of /proc: call it in a thread."""
        with self._observing:
            below = (p for root in self.processes for p in process.descendants(root.id))
            self.members |= {*(root.id for root in self.processes), *below}
            self.shared_memory |= {m for p in self.members for m in mapped_shared_memory(p.pid)}

    def listens(self) -> bool:
        """Whether its address is its own. The port was free when it was chosen; an engine listens
        tens of seconds later, and another program, or another job's engine, may be there by then.
        Looks at the processes that were observed."""
        port = urlsplit(self.url).port
        assert port is not None
        return any(process.listens(member, port) for member in self.members)

    async def worker_gone(self) -> WorkerGone:
        """Wait until one of SGLang's own processes ends while the main one is up. The server
        outlives its scheduler by seconds, answering nothing. Called when the engine is up."""
        workers = await asyncio.to_thread(self._workers)
        ends = {asyncio.create_task(process.wait_gone(p)): (p, title) for p, title in workers}
        try:
            if ends:  # else another kind of engine: nothing to see beyond its main process
                done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if all(p.id.alive() for p in self.processes):
                    (worker, title), returncode = ends[end := done.pop()], end.result()
                    return WorkerGone(title, worker.pid, returncode)
            await asyncio.Event().wait()  # the main process is gone too: its exit is the news
            raise AssertionError("unreachable")
        finally:
            for task in ends:
                task.cancel()

    def _workers(self) -> list[tuple[ProcessId, str]]:
        """SGLang's own processes that are up, with what they call themselves."""
        below = [p for root in self.processes for p in process.descendants(root.id)]
        titles = ((p, _title(p)) for p in below)
        return [(p, title.split()[0]) for p, title in titles if title.startswith(WORKER_PREFIX)]

    def work(self) -> tuple[float | None, int | None]:
        """Seconds that the schedulers have worked, or wanted to, and how often the detokenizer had
        something to do; None when there is no such process here."""
        schedulers, detokenizers = [], []
        for member in self.members:
            title = _title(member)
            if title.startswith(WORKER_PREFIX) and (done := process.scheduled(member)):
                if title.startswith(SCHEDULER_PREFIX):
                    schedulers.append(done[0])
                elif title.startswith(DETOKENIZER_PREFIX):
                    detokenizers.append(done[1])
        return sum(schedulers) if schedulers else None, sum(detokenizers) if detokenizers else None

    def stopped(self) -> list[str]:
        """Processes that a signal has stopped."""
        found = []
        for member in sorted(self.members, key=lambda m: m.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                if psutil.Process(member.pid).status() == psutil.STATUS_STOPPED:
                    title = _title(member)
                    name = title.split()[0] if title.startswith(WORKER_PREFIX) else "its server"
                    found.append(f"{name} (pid {member.pid})")
        return found

    async def end(self, deadline_mono_s: float) -> list[ProcessId]:
        """Kill the whole tree and remove its files; returns processes that survived."""
        await asyncio.to_thread(self.observe)
        roots = [p.id for p in self.processes]
        left = await end_trees(roots, deadline_mono_s, self.members)
        self.release()
        if not left:
            await asyncio.gather(*(p.wait() for p in self.processes))
        await asyncio.to_thread(remove_files, self.scratch, self.shared_memory)
        return left

    def record(self, slot: int, group: str, duty: str) -> EngineRecord:
        return EngineRecord(
            slot=slot,
            url=self.url,
            fingerprint=self.fingerprint,
            processes=tuple(ProcessRecord(p.id, p.log) for p in self.processes),
            members=self.members,
            scratch=self.scratch,
            shared_memory=self.shared_memory,
            group=group,
            bootstrap_port=self.bootstrap_port,
            duty=duty,
        )


def _ended(root: process.Child | process.Adopted) -> bool:
    """A child's exit code may come later than the end of its main thread."""
    if isinstance(root, process.Adopted):
        return not root.id.alive()
    return root.returncode is not None


def _title(member: ProcessId) -> str:
    """What a process calls itself; empty when it is gone."""
    try:
        return " ".join(psutil.Process(member.pid).cmdline())
    except psutil.NoSuchProcess:
        return ""


async def end_recorded(record: EngineRecord, deadline_mono_s: float) -> list[int]:
    """End an engine that an earlier serving role left, and remove its files. Returns pids that
    were alive. Only processes with the recorded pid *and* start time are touched."""
    roots = [p.id for p in record.processes]
    ended = [m.pid for m in {*roots, *record.members} if m.alive()]
    await end_trees(roots, deadline_mono_s, record.members)
    await asyncio.to_thread(remove_files, record.scratch, record.shared_memory)
    return ended


async def end_trees(
    roots: Iterable[ProcessId], deadline_mono_s: float, members: Iterable[ProcessId] = ()
) -> list[ProcessId]:
    """Kill processes, their descendants, the sessions that they lead and the known `members`.
    Returns those alive at the deadline."""
    roots = list(roots)
    # Requests go on meanwhile: looking through /proc is left to threads.
    left = {*roots, *members, *await asyncio.to_thread(_trees, roots)}
    while left and time.monotonic() < deadline_mono_s:
        # A process whose parent died is no descendant any more, but stays in the session.
        survivors = await process.kill_until_gone(left, deadline_mono_s)
        left = {*survivors, *await asyncio.to_thread(_sessions, roots)}
    return sorted(left, key=lambda p: p.pid)


def _trees(roots: Iterable[ProcessId]) -> set[ProcessId]:
    return {p for root in roots for p in process.descendants(root)} | _sessions(roots)


def _sessions(roots: Iterable[ProcessId]) -> set[ProcessId]:
    return {p for root in roots for p in _session(root)}


def _session(root: ProcessId) -> list[ProcessId]:
    """Living members of the session of `root`. The kernel gives no pid out again that names a
    session; a stranger with this pid means that the session is empty."""
    with contextlib.suppress(ProcessLookupError):
        if abs(ProcessId.of(root.pid).start_time - root.start_time) >= 0.05:
            return []
    return process.session_members(root.pid)


def remove_files(scratch: Path, shared_memory: Iterable[Path]) -> None:
    shutil.rmtree(scratch, ignore_errors=True)
    for path in shared_memory:
        path.unlink(missing_ok=True)
