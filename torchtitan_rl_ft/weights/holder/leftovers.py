"""What holders have left in memory, and its end. Standard library only, for serving/warden.py."""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
from pathlib import Path

from torchtitan_rl_ft.run_folder import ProcessId
from torchtitan_rl_ft.weights.holder.settings import run_memory, user_memory

LOCK_FILE = "lock"
OWNER_FILE = "owner.json"


def remove_run(memory_folder: str, run_id: str) -> None:
    """At the end of a run, when its holders have ended."""
    shutil.rmtree(run_memory(memory_folder, run_id), ignore_errors=True)
    with contextlib.suppress(OSError):
        user_memory(memory_folder).rmdir()


def remove_leftovers(memory: Path) -> list[Path]:
    """Remove what holders left in `memory`, of all runs of a user, whose owners, and they
    themselves, are dead. Returns the folders."""
    removed = []
    for holder in sorted(memory.glob("*/*/")):
        if _is_dead(holder):
            shutil.rmtree(holder, ignore_errors=True)
            removed.append(holder)
            with contextlib.suppress(OSError):  # others of the run are there
                holder.parent.rmdir()
    with contextlib.suppress(OSError):
        memory.rmdir()
    return removed


def _is_dead(holder: Path) -> bool:
    try:
        owner = ProcessId(**json.loads((holder / OWNER_FILE).read_text()))
        with open(holder / LOCK_FILE, "rb") as lock:
            return not owner.alive() and locked(lock.fileno())
    except (OSError, ValueError, TypeError):
        return False  # one that is being made or removed


def locked(fd: int) -> bool:
    """Lock it for as long as it is open."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
