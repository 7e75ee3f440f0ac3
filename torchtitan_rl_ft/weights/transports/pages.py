"""Whether a file system in memory has huge pages: a copy between processes looks up each page, and
over pages of 4 KiB that takes as long as the copy (Linux, admin-guide/mm/transhuge.rst, "Hugepages
in tmpfs/shmem")."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import psutil

SHMEM = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
IN_USE = ("always", "within_size")
"""Values of tmpfs's option `huge` with which a file of known size has them."""


@dataclass(frozen=True)
class Mount:
    """What a folder is on: kind of the file system, and its options."""

    kind: str
    options: str


def mount_of(folder: Path) -> Mount:
    """The innermost mount; of unknown kind where there is none."""
    resolved = folder.resolve()
    over = [m for m in psutil.disk_partitions(all=True) if resolved.is_relative_to(m.mountpoint)]
    # Of several over one another the last one is seen.
    best = max(enumerate(over), key=lambda m: (len(m[1].mountpoint), m[0]), default=None)
    return Mount(best[1].fstype, best[1].opts) if best else Mount("unknown", "")


def has_huge_pages(mount: Mount, shmem: Path = SHMEM) -> bool:
    """Of a tmpfs: what it was mounted with, unless the kernel forces or denies them to all."""
    try:
        chosen = re.search(r"\[(\w+)\]", shmem.read_text())
    except OSError:
        return False  # this kernel has none
    if chosen is not None and chosen[1] in ("force", "deny"):
        return chosen[1] == "force"
    asked = re.search(r"(?:^|,)huge=(\w+)", mount.options)
    return asked is not None and asked[1] in IN_USE
