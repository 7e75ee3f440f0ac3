"""Memory that a peer writes into: a mapping that can be taken away from it at any moment.

By way of libc: Python's mmap knows no MAP_FIXED.
"""

from __future__ import annotations

import ctypes
import mmap
import os
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


class Mapping:
    """A file, mapped shared and writable at `address`. Nothing in this process may look at it
    through this mapping: it can go away. Raises OSError."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.nbytes = nbytes
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.address = _mmap(
                None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd
            )
        finally:
            os.close(fd)

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

    def close(self) -> None:
        """Only after a push that ended well on both sides."""
        if _libc.munmap(self.address, self.nbytes) != 0:
            raise OSError(ctypes.get_errno(), "munmap failed")


def _mmap(address: int | None, nbytes: int, prot: int, flags: int, fd: int) -> int:
    found = _libc.mmap(address, nbytes, prot, flags, fd, 0)
    if found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {nbytes} bytes: {os.strerror(code)}")
    return found
