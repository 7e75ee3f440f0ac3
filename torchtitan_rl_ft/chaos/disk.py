"""A disk that is full: a file takes all room that a small file system has left."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from torchtitan_rl_ft.chaos.plan import kind_of
from torchtitan_rl_ft.config.resolve import Resolved

LARGEST_BYTES = 2 * 1024**3
"""Of a file system that may be filled: more would take long, and others live there."""

NAME = ".chaos-ballast"
PIECE_BYTES, LEAST_BYTES = 64 * 1024**2, 4096


def of(target: str, resolved: Resolved) -> Path:
    """Where a process keeps what it may not lose: trainers their checkpoints, the rollout role its
    journal, all others (their events) the run folder. It need not exist yet."""
    folder = resolved.run_folder
    if kind_of(target) in ("trainer", "standby"):
        return folder.path / str(resolved.get("checkpoint.folder"))
    return folder.journal if target == "rollout" else folder.path


def existing(path: Path) -> Path:
    """It, or the nearest folder above it that is there."""
    return next(p for p in (path, *path.parents) if p.is_dir())


def too_large(path: Path) -> str | None:
    """Why the file system of `path` is not filled, or None."""
    at = existing(path)
    found = os.statvfs(at)
    size = found.f_blocks * found.f_frsize
    if size <= LARGEST_BYTES:
        return None
    return (
        f"the file system of {at} has {size / 1024**3:.1f} GiB, and only one of "
        f"{LARGEST_BYTES // 1024**3} GiB at most is filled: put it on a small one (a tmpfs)"
    )


class Ballast:
    """The file that fills a file system."""

    def __init__(self, folder: Path) -> None:
        """`folder` exists. Raises OSError."""
        self.path = folder / NAME
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._fd).st_size

    def fill(self) -> None:
        """Take what is free now, to the last block. Raises OSError but for ENOSPC."""
        piece = PIECE_BYTES
        while piece >= LEAST_BYTES:
            try:
                os.posix_fallocate(self._fd, self._size, piece)
                self._size += piece
            except OSError as e:
                if e.errno != errno.ENOSPC:
                    raise
                piece //= 2

    def remove(self) -> None:
        os.close(self._fd)
        free(self.path)


def free(ballast: Path) -> None:
    """Remove a ballast file. Its room is there at once, also while somebody has it open."""
    with contextlib.suppress(FileNotFoundError):
        os.truncate(ballast, 0)
        ballast.unlink()
