"""The processes of one engine, and everything that they leave on this machine."""

from __future__ import annotations

import contextlib
import json
import shutil
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


@dataclass
class EngineProcess:
    """A started engine: its main process, its scratch folder, its shared memory."""

    child: process.Child
    scratch: Path
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
        """Note the shared memory in use. SGLang's segments have random names and stay after
        SIGKILL, so they have to be known before."""
        for member in (self.id, *process.descendants(self.id)):
            self.shared_memory |= mapped_shared_memory(member.pid)

    async def end(self, deadline_mono_s: float) -> list[ProcessId]:
        """Kill the whole tree and remove its files; returns processes that survived."""
        self.observe()
        left = await end_tree(self.id, deadline_mono_s)
        if not left:
            await self.child.wait()
        remove_files(self.scratch, self.shared_memory)
        return left

    def to_json(self) -> dict[str, Any]:
        return {
            "pid": self.id.pid,
            "start_time": self.id.start_time,
            "scratch": str(self.scratch),
            "shared_memory": sorted(map(str, self.shared_memory)),
        }


async def end_tree(root: ProcessId, deadline_mono_s: float) -> list[ProcessId]:
    """Kill a process, its descendants and the session that it leads. Returns those alive at the
    deadline."""
    left = {root, *process.descendants(root), *_session(root)}
    while left and time.monotonic() < deadline_mono_s:
        # A process whose parent died is no descendant any more, but stays in the session.
        survivors = await process.kill_until_gone(left, deadline_mono_s)
        left = {*survivors, *_session(root)}
    return sorted(left, key=lambda p: p.pid)


def _session(root: ProcessId) -> list[ProcessId]:
    """Living members of the session of `root`. The kernel gives no pid out again that names a
    session; a stranger with this pid means that the session is empty."""
    with contextlib.suppress(psutil.NoSuchProcess):
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

    def put(self, slot: int, engine: EngineProcess) -> None:
        self._records[str(slot)] = engine.to_json()
        self._write()

    def remove(self, slot: int) -> None:
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
            if root.alive():
                ended.append(root.pid)
                await end_tree(root, deadline_mono_s)
            remove_files(Path(record["scratch"]), map(Path, record["shared_memory"]))
        self._write()
        return ended
