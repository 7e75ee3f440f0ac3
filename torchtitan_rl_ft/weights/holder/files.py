"""A holder's folder in the memory file system: one folder for each version, and files that are free
to be used again, whose pages are there already."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import re
import shutil
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import psutil

from torchtitan_rl_ft.run_folder import write_atomic
from torchtitan_rl_ft.weights.holder.leftovers import (
    LOCK_FILE,
    OWNER_FILE,
    locked,
    remove_leftovers,
)
from torchtitan_rl_ft.weights.holder.settings import HolderSettings, Key, user_memory
from torchtitan_rl_ft.weights.image import WEIGHTS_FILE
from torchtitan_rl_ft.weights.pieces import Piece, Range, piece_from_json

PIECES_FILE = "pieces.jsonl"

SPARES = 1
"""Files that are kept for the next version; the others are removed."""

WATCH_S = 1.0

_SPARE = "spare-"
_UNFINISHED = ".unfinished-"
_SEGMENTS = "ucx_shm_posix_*"  # of UCX, which a predecessor was killed too early to unlink
_PLAIN = re.compile(r"[A-Za-z0-9]+")
_BLOCK_BYTES = 512  # stat(2), st_blocks


class NoMemory(Exception):
    """The memory file system has no room for a version."""


class HolderRuns(Exception):
    """Another process is this holder."""


class NotOwned(Exception):
    """Somebody else could read or change what is in the memory of this user's runs."""


class MemoryRemoved(Exception):
    """Somebody has removed this holder's folder: what it holds has no name any more."""


def free_bytes(folder: str | Path) -> int:
    """What is in a file system in memory is memory: it may promise more than there is, and the
    kernel then kills processes. Raises OSError."""
    return min(shutil.disk_usage(folder).free, psutil.virtual_memory().available)


class HolderFiles:
    """Raises OSError, throughout."""

    def __init__(self, settings: HolderSettings) -> None:
        self._settings = settings
        self.folder = settings.folder

    def open(self, timeout_s: float = 5.0) -> None:
        """Make the folder this process's own; what other runs of this user left behind is removed.
        A predecessor may be dying. Raises HolderRuns, NotOwned."""
        _own(user_memory(self._settings.weights.memory_folder))
        end_s = time.monotonic() + timeout_s
        while (lock := self._taken()) is None:
            if time.monotonic() > end_s:
                raise HolderRuns(f"{self.folder} belongs to another process")
            time.sleep(0.05)
        self._lock = lock
        for unfinished in self.folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(unfinished)
        for segment in self.folder.glob(_SEGMENTS):
            segment.unlink()
        remove_leftovers(user_memory(self._settings.weights.memory_folder))
        owner = json.dumps(asdict(self._settings.owner))
        write_atomic(self.folder / OWNER_FILE, owner.encode())  # without it, it would stay for ever

    def _taken(self) -> int | None:
        """The folder's lock; None when it is not to be had now, or when the folder, of a dead
        predecessor, was removed by another holder before it was locked."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self.folder / LOCK_FILE
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with contextlib.suppress(FileNotFoundError):
                if locked(lock) and os.path.samestat(os.fstat(lock), os.stat(path)):
                    return lock
            os.close(lock)
        return None

    async def watch(self, every_s: float = WATCH_S) -> None:
        """For as long as the folder is there. Raises MemoryRemoved: a new process makes it again,
        and has its versions anew."""
        with contextlib.suppress(FileNotFoundError):
            while os.path.samestat(os.fstat(self._lock), os.stat(self.folder / LOCK_FILE)):
                await asyncio.sleep(every_s)
        raise MemoryRemoved(f"{self.folder} was removed by somebody")

    # Versions ---------------------------------------------------------------------------

    def found(self) -> dict[Key, Path]:
        """What an earlier life of this holder left, the oldest first; spares are not in it."""
        versions = []
        for folder in self.folder.glob("step-*"):
            key = _key_of(folder)
            if key is None or not (folder / WEIGHTS_FILE).is_file():
                shutil.rmtree(folder)
            else:
                versions.append(((folder / PIECES_FILE).stat().st_mtime_ns, key, folder))
        return {key: folder for _, key, folder in sorted(versions)}

    def take(self, key: Key, nbytes: int, ranges: Iterable[Range]) -> Path:
        """A folder for a version with a weights file of `nbytes`, of which `ranges` will be written
        and have their memory now, so that no write ever meets a lack of it. A spare file is used
        where there is one. Raises NoMemory."""
        folder = self._folder_name(key)
        temp = self.folder / f"{_UNFINISHED}{folder.name}"
        shutil.rmtree(temp, ignore_errors=True)
        spares = self._spares()
        try:
            if spares:
                spares[-1].rename(temp)
            else:
                temp.mkdir(mode=0o700)
            self._allocate(temp / WEIGHTS_FILE, nbytes, list(ranges), key)
            line = json.dumps({"step": key.step, "token": key.token})
            (temp / PIECES_FILE).write_text(f"{line}\n")
            temp.rename(folder)
        except BaseException as e:
            shutil.rmtree(temp, ignore_errors=True)
            if isinstance(e, OSError) and e.errno == errno.ENOSPC:  # of a small file
                raise NoMemory(
                    f"{self.folder} has no room for {key}: {e}; see weights.memory_folder"
                ) from None
            raise
        return folder

    def release(self, folder: Path) -> None:
        """The version is not needed any more, its file may be used again, if nobody removed it."""
        if not folder.exists():
            return
        number = 1 + max((int(s.name.removeprefix(_SPARE)) for s in self._spares()), default=0)
        for file in folder.iterdir():
            if file.name != WEIGHTS_FILE:
                file.unlink()
        folder.rename(self.folder / f"{_SPARE}{number}")
        for spare in self._spares()[:-SPARES]:
            shutil.rmtree(spare)

    def _folder_name(self, key: Key) -> Path:
        """Tokens differ in their first characters, nearly always."""
        short = key.token[:8] if _PLAIN.fullmatch(key.token[:8]) else "token"
        name = f"step-{key.step}-{short}"
        while (self.folder / name).exists():
            name += "x"
        return self.folder / name

    def _spares(self) -> list[Path]:
        """The one to be taken first is the last."""
        found = [s for s in self.folder.glob(f"{_SPARE}*") if (s / WEIGHTS_FILE).is_file()]
        return sorted(found, key=lambda s: int(s.name.removeprefix(_SPARE)))

    def _allocate(self, path: Path, nbytes: int, ranges: list[Range], key: Key) -> None:
        """Raises NoMemory."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, nbytes)
            there = os.fstat(fd).st_blocks * _BLOCK_BYTES
            if there >= nbytes:
                return
            needed = sum(end - start for start, end in ranges)
            free = free_bytes(self.folder)
            try:
                if needed - there > free:
                    raise NoMemory
                for start, end in ranges:
                    os.posix_fallocate(fd, start, end - start)
            except (NoMemory, OSError) as e:
                why = "" if isinstance(e, NoMemory) else f" ({e})"
                raise NoMemory(
                    f"{self.folder} has no room for {key}: it needs {needed / 1e9:.2f} GB, "
                    f"{(free + there) / 1e9:.2f} GB are free{why}; see weights.memory_folder"
                ) from None
        finally:
            os.close(fd)


# What is known to be whole --------------------------------------------------------------


def note_pieces(folder: Path, pieces: Iterable[Piece]) -> None:
    """Pieces that were checked; a later life of this holder need not get them again."""
    with open(folder / PIECES_FILE, "a") as f:
        f.writelines(f"{json.dumps(piece.to_json())}\n" for piece in pieces)


def noted_pieces(folder: Path) -> list[Piece]:
    """What `note_pieces` noted, up to a line that was cut off."""
    pieces = []
    with contextlib.suppress(ValueError, TypeError):
        for line in (folder / PIECES_FILE).read_text().splitlines()[1:]:
            pieces.append(piece_from_json(json.loads(line)))
    return pieces


def _key_of(folder: Path) -> Key | None:
    try:
        with open(folder / PIECES_FILE) as f:
            fields = json.loads(f.readline())
        return Key(int(fields["step"]), str(fields["token"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _own(folder: Path) -> None:
    """The file system is everybody's. Raises NotOwned, OSError."""
    folder.mkdir(mode=0o700, exist_ok=True)
    stat = folder.lstat()
    if stat.st_uid != os.getuid() or not folder.is_dir() or folder.is_symlink():
        raise NotOwned(f"{folder} belongs to somebody else: set weights.memory_folder")
    folder.chmod(0o700)
