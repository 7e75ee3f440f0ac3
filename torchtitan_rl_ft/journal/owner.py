"""One living owner per journal folder."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar

from torchtitan_rl_ft.journal.errors import JournalBusy, JournalWriteError
from torchtitan_rl_ft.run_folder import ProcessId


class OwnerLock:
    """An exclusive lock on `folder/owner.lock` that ends with the process, also by kill -9.

    A POSIX record lock: a forked child (a process pool) does not keep it when its parent
    dies, as it would keep a `flock`. Such a lock does not exclude the same process, so the
    folders held here are remembered.
    """

    _held: ClassVar[set[Path]] = set()
    _guard: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, folder: Path) -> None:
        """Raises JournalBusy, JournalWriteError."""
        self._folder = folder.resolve()
        path = self._folder / "owner.lock"
        with self._guard:
            if self._folder in self._held:
                raise JournalBusy(f"{self._folder} is already open in this process")
            try:
                self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except OSError as e:
                raise JournalWriteError(f"cannot open {path}: {e.strerror}") from e
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                owner = _describe(os.pread(self._fd, 4096, 0))
                os.close(self._fd)
                raise JournalBusy(
                    f"{self._folder} is in use by {owner}: a run folder has one living job. "
                    "End that job, or give this one another job.dump_folder"
                ) from e
            try:
                self._announce()
            except OSError as e:
                os.close(self._fd)
                raise JournalWriteError(f"cannot write {path}: {e.strerror}") from e
            self._held.add(self._folder)
            self._released = False

    def _announce(self) -> None:
        owner = {**asdict(ProcessId.current()), "host": socket.gethostname()}
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(owner).encode(), 0)

    def release(self) -> None:
        """Again: nothing. The number of a closed file may be another file's by then."""
        with self._guard:
            if not self._released:
                self._released = True
                self._held.discard(self._folder)
                os.close(self._fd)


def _describe(owner: bytes) -> str:
    try:
        known = json.loads(owner)
        return f"process {known['pid']} on {known['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
