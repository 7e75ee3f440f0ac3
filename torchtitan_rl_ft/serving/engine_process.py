"""The processes of one engine, and everything that they leave on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.host.footprint import mapped_shared_memory
from torchtitan_rl_ft.run_folder import ProcessId, RunFolder, write_atomic
from torchtitan_rl_ft.serving.launch import Launch

ENGINES_OUTLIVE_SERVING = False
"""Engines end with the serving role, whatever ends it: the kernel kills their main process,
which takes the others with it."""

WORKER_PREFIX = "sglang::"
"""SGLang's schedulers and detokenizers give themselves such titles."""


@dataclass
class EngineProcess:
    """A started engine: its main process, its scratch folder, its shared memory."""

    child: process.Child
    scratch: Path
    members: set[ProcessId] = field(default_factory=set)
    shared_memory: set[Path] = field(default_factory=set)

    @classmethod
    def start(cls, launch: Launch, log: Path) -> EngineProcess:
        """Raises OSError. Call it from the main thread."""
        child = process.spawn(
            launch.argv, log=log, env=launch.env, outlives_parent=ENGINES_OUTLIVE_SERVING
        )
        return cls(child, launch.scratch)

    @property
    def id(self) -> ProcessId:
        return self.child.id

    def observe(self) -> None:
        """Note processes and shared memory. Segments have random names and stay after SIGKILL,
        and a process that loses its parent may be in no tree of ours: both have to be known
        before the end."""
        self.members |= {self.id, *process.descendants(self.id)}
        for member in self.members:
            self.shared_memory |= mapped_shared_memory(member.pid)

    async def worker_gone(self) -> str:
        """Wait until one of SGLang's own processes ends; returns which. The server outlives its
        scheduler by seconds, answering nothing. Called when the engine is up."""
        workers = [p for p in process.descendants(self.id) if _title(p).startswith(WORKER_PREFIX)]
        titles = {asyncio.create_task(wait_gone(p)): f"{_title(p)} (pid {p.pid})" for p in workers}
        if not titles:  # another kind of engine: nothing to see beyond its main process
            await asyncio.Event().wait()
        try:
            done, _ = await asyncio.wait(titles, return_when=asyncio.FIRST_COMPLETED)
            return f"{titles[done.pop()]} ended, the server process is up"
        finally:
            for task in titles:
                task.cancel()

    async def end(self, deadline_mono_s: float) -> list[ProcessId]:
        """Kill the whole tree and remove its files; returns processes that survived."""
        self.observe()
        left = await end_tree(self.id, deadline_mono_s, self.members)
        if not left:
            await self.child.wait()
        remove_files(self.scratch, self.shared_memory)
        return left

    def to_json(self) -> dict[str, Any]:
        return {
            "pid": self.id.pid,
            "start_time": self.id.start_time,
            "members": [[m.pid, m.start_time] for m in sorted(self.members, key=lambda m: m.pid)],
            "scratch": str(self.scratch),
            "shared_memory": sorted(map(str, self.shared_memory)),
        }


def _title(member: ProcessId) -> str:
    """What a process calls itself; empty when it is gone."""
    try:
        return " ".join(psutil.Process(member.pid).cmdline())
    except psutil.NoSuchProcess:
        return ""


async def wait_gone(member: ProcessId) -> None:
    """Until a process, which need not be a child, has ended. No polling."""
    try:
        fd = os.pidfd_open(member.pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    gone = loop.create_future()
    loop.add_reader(fd, lambda: gone.done() or gone.set_result(None))
    try:
        if member.alive():  # else: the pid was someone else's already
            await gone
    finally:
        loop.remove_reader(fd)
        os.close(fd)


async def end_tree(
    root: ProcessId, deadline_mono_s: float, members: Iterable[ProcessId] = ()
) -> list[ProcessId]:
    """Kill a process, its descendants, the session that it leads and the known `members`.
    Returns those alive at the deadline."""
    left = {root, *members, *process.descendants(root), *_session(root)}
    while left and time.monotonic() < deadline_mono_s:
        # A process whose parent died is no descendant any more, but stays in the session.
        survivors = await process.kill_until_gone(left, deadline_mono_s)
        left = {*survivors, *_session(root)}
    return sorted(left, key=lambda p: p.pid)


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


class EngineRecords:
    """What the engines of a run hold, on disk, so that a later serving role can clean up (or
    take over) after one that was killed."""

    def __init__(self, folder: RunFolder) -> None:
        self._path = folder.path / "serving" / "engines.json"
        self._records: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()

    def put(self, slot: int, engine: EngineProcess) -> None:
        """Durable when this returns; call it in a thread."""
        with self._lock:
            self._records[str(slot)] = engine.to_json()
            self._write()

    def remove(self, slot: int) -> None:
        with self._lock:
            if self._records.pop(str(slot), None) is not None:
                self._write()

    def _write(self) -> None:
        write_atomic(self._path, json.dumps(self._records, indent=1).encode())

    async def end_left_behind(self, deadline_mono_s: float) -> list[int]:
        """End engines that an earlier serving role of this run left. Returns pids that were
        alive. Only processes with the recorded pid *and* start time are touched."""
        try:
            old = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return []
        ended = []
        for record in old.values():
            root = ProcessId(record["pid"], record["start_time"])
            members = [ProcessId(pid, start_time) for pid, start_time in record["members"]]
            ended += [m.pid for m in {root, *members} if m.alive()]
            await end_tree(root, deadline_mono_s, members)
            remove_files(Path(record["scratch"]), map(Path, record["shared_memory"]))
        self._write()
        return ended
