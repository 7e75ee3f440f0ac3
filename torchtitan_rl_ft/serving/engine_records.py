"""What engines hold, on disk: a later serving role adopts them, or cleans up after them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.run_folder import ProcessId, write_atomic
from torchtitan_rl_ft.session_folder import SessionUnreadable


class Memory(StrEnum):
    """Of a colocated engine."""

    HELD = "held"
    RELEASING = "releasing"  # it was asked to give it up; whether it has is not known
    RELEASED = "released"


class RecordsCorrupt(SessionUnreadable):
    """The file of records cannot be read; engines that it names may be running."""


@dataclass(frozen=True)
class ProcessRecord:
    id: ProcessId
    log: Path


@dataclass(frozen=True)
class EngineRecord:
    """One engine. `processes`: the main one first; `members`: all that it was seen to have.
    `fingerprint` stands for its command line (serving/launch.py)."""

    slot: int
    url: str
    fingerprint: str
    processes: tuple[ProcessRecord, ...]
    members: frozenset[ProcessId]
    scratch: Path
    shared_memory: frozenset[Path]
    group: str = "policy"
    bootstrap_port: int | None = None
    duty: str = "active"
    up: bool = False
    """It has been up: what it needs to answer again is no start."""

    memory: Memory = Memory.HELD

    @property
    def main(self) -> ProcessId:
        return self.processes[0].id

    @property
    def alive(self) -> bool:
        """Whether all its processes are."""
        return all(p.id.alive() for p in self.processes)

    def to_json(self) -> dict[str, Any]:
        return {
            "slot": self.slot,
            "group": self.group,
            "duty": self.duty,
            "pid": self.main.pid,
            "start_time": self.main.start_time,
            "url": self.url,
            "log": str(self.processes[0].log),
            "fingerprint": self.fingerprint,
            "processes": [
                {"pid": p.id.pid, "start_time": p.id.start_time, "log": str(p.log)}
                for p in self.processes
            ],
            "members": [[m.pid, m.start_time] for m in _sorted(self.members)],
            "scratch": str(self.scratch),
            "shared_memory": sorted(map(str, self.shared_memory)),
            "bootstrap_port": self.bootstrap_port,
            "up": self.up,
            "memory": str(self.memory),
        }

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> EngineRecord:
        """Raises KeyError, TypeError, ValueError."""
        return cls(
            slot=int(given["slot"]),
            url=str(given["url"]),
            fingerprint=str(given["fingerprint"]),
            processes=tuple(
                ProcessRecord(ProcessId(p["pid"], p["start_time"]), Path(p["log"]))
                for p in given["processes"]
            ),
            members=frozenset(ProcessId(pid, start_time) for pid, start_time in given["members"]),
            scratch=Path(given["scratch"]),
            shared_memory=frozenset(map(Path, given["shared_memory"])),
            group=str(given["group"]),
            bootstrap_port=given["bootstrap_port"],
            duty=str(given["duty"]),
            # A session may have been kept by a version without these.
            up=bool(given.get("up", False)),
            memory=Memory(given.get("memory", Memory.HELD)),
        )


class EngineRecords:
    """The file. Methods that write are durable when they return; call them in a thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records: dict[int, EngineRecord] = {}
        self._lock = threading.Lock()

    def read(self) -> list[EngineRecord]:
        """What an earlier serving role left. Raises RecordsCorrupt."""
        try:
            given = json.loads(self.path.read_bytes())
            return [EngineRecord.from_json(r) for r in given.values()]
        except FileNotFoundError:
            return []
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise RecordsCorrupt(
                f"{self.path} cannot be read ({type(e).__name__}: {e}): end the engines of this "
                "run that are still there and remove the file"
            ) from e

    def keep(self, records: Iterable[EngineRecord]) -> None:
        """Start from these instead of none."""
        with self._lock:
            self._records = {r.slot: r for r in records}
            self._write()

    def put(self, record: EngineRecord) -> None:
        with self._lock:
            if self._records.get(record.slot) != record:
                self._records[record.slot] = record
                self._write()

    def remove(self, slot: int) -> None:
        with self._lock:
            if self._records.pop(slot, None) is not None:
                self._write()

    def save(self) -> None:
        """Write the file again: somebody has removed it."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        data = {str(slot): r.to_json() for slot, r in sorted(self._records.items())}
        write_atomic(self.path, json.dumps(data, indent=1).encode())


def _sorted(processes: Iterable[ProcessId]) -> list[ProcessId]:
    return sorted(processes, key=lambda p: p.pid)
