"""What the processes of a run hold on this machine, so that its end can be verified."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from torchtitan_rl_ft.run_folder import ProcessId

SHM = Path("/dev/shm")

IPC_PREFIXES = ("psm_", "torch_", "sem.", "nccl-", "ucx_", "sglang", "sgl_", "__KMP_")
"""Names that the libraries of our processes give to segments. Others in there may be a user's
files (models, data sets), which are mapped as well and are none of ours."""


@dataclass
class Footprint:
    """Everything that was ever seen in use by the observed processes."""

    processes: set[ProcessId] = field(default_factory=set)
    ports: set[int] = field(default_factory=set)  # listening, TCP
    shared_memory: set[Path] = field(default_factory=set)
    before: frozenset[Path] = field(default_factory=lambda: frozenset(SHM.glob("*")))

    def observe(self, processes: Iterable[ProcessId]) -> None:
        """Add what `processes` hold now."""
        pids = set()
        for process in processes:
            if process.alive():
                self.processes.add(process)
                pids.add(process.pid)
                self.shared_memory |= mapped_shared_memory(process.pid) - self.before
        for pid, port in listening_ports():
            if pid in pids:
                self.ports.add(port)

    def forget(self, processes: Iterable[ProcessId]) -> None:
        """Leave these, and what they map, out from now on."""
        for process in processes:
            self.processes.discard(process)
            self.shared_memory -= mapped_shared_memory(process.pid)

    def leftovers(self) -> list[str]:
        """What of it is still there, one line each."""
        alive = {p.pid for p in self.processes if p.alive()}
        lines = [f"process {pid}" for pid in alive]
        lines += [
            f"port {port} (held by process {pid})"
            for pid, port in listening_ports()
            if port in self.ports and pid in alive
        ]
        lines += [f"shared memory {path}" for path in self.shared_memory if path.exists()]
        return sorted(lines)

    def remove_shared_memory(self) -> list[Path]:
        """Unlink segments that the ended processes left behind; returns them."""
        removed = []
        for path in self.shared_memory:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
                removed.append(path)
        return sorted(removed)


def mapped_shared_memory(pid: int) -> set[Path]:
    """Named segments of inter-process communication that process `pid` maps."""
    found = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            at = line.find(f"{SHM}/")
            if at >= 0 and not line.endswith(" (deleted)"):
                path = Path(line[at:])
                if path.parent == SHM and path.name.startswith(IPC_PREFIXES):
                    found.add(path)
    return found


def listening_ports() -> list[tuple[int | None, int]]:
    """(pid, port) of each listening TCP socket; pid None when it cannot be told."""
    return [
        (c.pid, c.laddr.port)
        for c in psutil.net_connections("tcp")
        if c.status == psutil.CONN_LISTEN and c.laddr
    ]
