"""Memory that a peer writes into: a mapping that can be taken away from it at any moment.

By way of libc: Python's mmap knows no MAP_FIXED.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


KEPT = 4
"""Files that a holder has are two, seldom three."""


class Mapping:
    """A file, mapped shared and writable at `address`. Where a peer writes into it, nothing in this
    process may look at the file through this mapping: it can go away. Raises OSError."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.nbytes = nbytes
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.address = _mmap(
                None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, self._fd
            )
        except OSError:
            os.close(self._fd)
            raise

    @property
    def is_removed(self) -> bool:
        """Whether the file has no name any more: its memory is not free while it is mapped."""
        return os.fstat(self._fd).st_nlink == 0

    def is_of(self, path: Path) -> bool:
        """Whether `path`, which may have been renamed, is what is mapped, all of it."""
        found = os.stat(path)
        return os.path.samestat(found, os.fstat(self._fd)) and found.st_size == self.nbytes

    def detach(self) -> None:
        """Put pages that belong to nothing in the place of the file's: what is written from now on
        goes nowhere, and disturbs nobody."""
        anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
        _mmap(self.address, self.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, anonymous, -1)

    def quarantine(self) -> None:
        """Put inaccessible pages there, for as long as this process lives: a copy by another
        process fails, and nothing else ever gets these addresses."""
        anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
        _mmap(self.address, self.nbytes, _PROT_NONE, anonymous, -1)
        os.close(self._fd)

    def close(self) -> None:
        """Only after a push that ended well on both sides."""
        os.close(self._fd)
        if _libc.munmap(self.address, self.nbytes) != 0:
            raise OSError(ctypes.get_errno(), "munmap failed")


class Mappings:
    """Mappings whose pushes ended well: the next version in the same file finds its pages there.
    Raises OSError."""

    def __init__(self) -> None:
        self._kept: list[Mapping] = []
        self._lock = threading.Lock()

    def take(self, path: Path, nbytes: int) -> Mapping:
        with self._lock:
            self._close(lambda m: m.is_removed)
            found = next((m for m in self._kept if m.nbytes == nbytes and m.is_of(path)), None)
            if found is not None:
                self._kept.remove(found)
        return found or Mapping(path, nbytes)

    def keep(self, mapping: Mapping) -> None:
        with self._lock:
            self._kept.append(mapping)
            oldest = self._kept[:-KEPT]
            self._close(lambda m: m.is_removed or m in oldest)

    def _close(self, is_useless: Callable[[Mapping], bool]) -> None:
        useless = [m for m in self._kept if is_useless(m)]
        self._kept = [m for m in self._kept if m not in useless]
        for mapping in useless:
            mapping.close()


def _mmap(address: int | None, nbytes: int, prot: int, flags: int, fd: int) -> int:
    found = _libc.mmap(address, nbytes, prot, flags, fd, 0)
    if found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {nbytes} bytes: {os.strerror(code)}")
    return found
