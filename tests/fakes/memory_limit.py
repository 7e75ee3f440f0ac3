"""Out of memory as the kernel does it: a memory cgroup whose limit is below what its members ask
for."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


class CgroupsForbidden(Exception):
    """This machine lets nobody here make a memory cgroup."""


@contextlib.contextmanager
def out_of_memory(pids: list[int]) -> Iterator[Callable[[], int]]:
    """The processes get 64 KiB more, together; the kernel kills them as they ask for it. Gives a
    function that says how many it has killed. The cgroup is removed in the end, when they are
    gone. Raises CgroupsForbidden."""
    v1 = V1.is_dir()
    group = (V1 if v1 else V2) / f"torchtitan-rl-ft-{secrets.token_hex(4)}"
    limit = "memory.limit_in_bytes" if v1 else "memory.max"
    try:
        group.mkdir()
        if not (group / limit).exists():
            group.rmdir()
            raise CgroupsForbidden(f"no {limit} in {group.parent}")
        (group / limit).write_text(str(2**16))
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
    except OSError as e:
        raise CgroupsForbidden(str(e)) from e
    told = group / ("memory.oom_control" if v1 else "memory.events")
    try:
        yield lambda: _killed(told.read_text())
    finally:
        with contextlib.suppress(OSError):
            os.rmdir(group)


def _killed(events: str) -> int:
    counts = dict(line.split() for line in events.splitlines())
    return int(counts["oom_kill"])
