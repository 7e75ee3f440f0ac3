"""Files of a source, mapped into the rank that writes its shards into them.

A source uses a file again for a later version: the mapping stays, and its pages are there.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from torchtitan_rl_ft.weights.pieces import Range

KEPT = 4
"""Mappings at a time; a source has two files, seldom three."""


class ImageUnusable(Exception):
    """The file that a source gave is none to write into."""


@dataclass(frozen=True)
class _File:
    """One that stays the same through renames."""

    device: int
    inode: int
    nbytes: int


class MappedImages:
    def __init__(self) -> None:
        self._mapped: dict[_File, torch.Tensor] = {}

    def open(self, path: Path, nbytes: int, ranges: Iterable[Range]) -> torch.Tensor:
        """The bytes of an image, uint8, writable at `ranges`, for which there is memory then: a
        full file system raises OSError here, where a write would end the process (SIGBUS).

        Raises OSError, ImageUnusable.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            if found.st_size != nbytes:
                raise ImageUnusable(f"{path} has {found.st_size} bytes, the image has {nbytes}")
            file = _File(found.st_dev, found.st_ino, nbytes)
            if (image := self._mapped.pop(file, None)) is None:
                for start, end in ranges:
                    os.posix_fallocate(fd, start, end - start)
                image = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
        finally:
            os.close(fd)
        self._mapped[file] = image  # the newest is last
        while len(self._mapped) > KEPT:
            del self._mapped[next(iter(self._mapped))]
        return image

    def close(self) -> None:
        self._mapped.clear()
