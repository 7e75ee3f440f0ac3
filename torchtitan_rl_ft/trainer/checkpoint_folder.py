"""The checkpoint folder as a rank sees it: the same for all, read and removed under a lock."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import socket
import threading
from collections.abc import Generator, Sequence
from pathlib import Path

from torchtitan_rl_ft.journal.checkpoints import MARKER
from torchtitan_rl_ft.run_folder import write_atomic
from torchtitan_rl_ft.trainer.group_link import GroupLink

ID_FILE = ".folder-id"


class FoldersDiffer(Exception):
    """Ranks of one group see different checkpoint folders."""


def require_same_folder(folder: Path, link: GroupLink) -> None:
    """Collective. Each rank tells the random id that it finds in the folder; the group's first one
    puts it there. Raises FoldersDiffer, OSError."""
    written = link.ask(lambda: _folder_id(folder))
    try:
        found = (folder / ID_FILE).read_text()
    except OSError:
        found = ""
    seen = link.gather((f"{socket.gethostname()}:{folder}", found))
    for rank, (where, other) in enumerate(seen):
        if other != written:
            raise FoldersDiffer(
                f"rank 0 and rank {rank} of a replica group see different checkpoint folders, "
                f"{seen[0][0]} and {where}: put job.dump_folder on a file system that all share"
            )


def _folder_id(folder: Path) -> str:
    path, own = folder / ID_FILE, folder / f"{ID_FILE}.{secrets.token_hex(8)}"
    if not path.exists():
        write_atomic(own, secrets.token_hex(8).encode())
        with contextlib.suppress(FileExistsError):  # another group's, at the same time
            os.link(own, path)
        own.unlink()
    return path.read_text()


@contextlib.contextmanager
def reading(checkpoint: Path) -> Generator[None]:
    """Nobody removes the checkpoint meanwhile. Raises FileNotFoundError when it has no marker."""
    fd = os.open(checkpoint / MARKER, os.O_RDONLY)
    try:
        _lock(fd, fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)


class Remover:
    """Removes checkpoint folders from a side thread, the marker first: what is half removed does
    not look complete. A folder that is being read stays until the next time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def remove(self, folders: Sequence[Path]) -> None:
        free = [folder for folder in folders if _withdraw(folder)]
        self.wait()
        if free:
            self._thread = threading.Thread(target=_remove, args=(free,), name="checkpoint-remover")
            self._thread.start()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()


def _withdraw(folder: Path) -> bool:
    """Take the marker away, unless somebody reads the checkpoint."""
    try:
        fd = os.open(folder / MARKER, os.O_RDWR)  # NFS locks need it
    except FileNotFoundError:
        return True
    try:
        _lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / MARKER).unlink(missing_ok=True)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _lock(fd: int, operation: int) -> None:
    """Raises BlockingIOError when another holds it. Does nothing on a file system without locks
    (Lustre by default): there a checkpoint may go while it is read; its reader then ends and is
    started again."""
    try:
        fcntl.flock(fd, operation)
    except OSError as e:
        if e.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise


def _remove(folders: Sequence[Path]) -> None:
    for folder in folders:
        # What is left of it has no marker, and is removed the next time.
        shutil.rmtree(folder, ignore_errors=True)
