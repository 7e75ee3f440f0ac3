"""Ends the engines of a session when nobody is left to do it.

    python -I -S warden.py SESSION_FOLDER

One process per session, started by the serving role and outliving it. It looks at session.json
once a second. When the session has no living owner for longer than its time to live and its serving
role is dead, or is alive and has let the time pass (it hangs), every recorded process is killed, by
pid and start time, and the session folder is removed. It ends when the folder has gone.

Standard library only, run by path and without site-packages: small, started in some 30 ms, and
nothing that it needs can be changed under it by an environment.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from torchtitan_rl_ft.run_folder import ProcessId  # noqa: E402
from torchtitan_rl_ft.session_folder import (  # noqa: E402
    HostProcess,
    SessionBusy,
    SessionFolder,
    SessionRecord,
    SessionUnreadable,
    boot_s,
)
from torchtitan_rl_ft.weights.holder.leftovers import remove_leftovers  # noqa: E402

POLL_S = 1.0
HANGING_S = 30.0
"""How much later than it should a living serving role may dispose of its session."""
KILL_TIMEOUT_S = 10.0


def due_in_s(
    record: SessionRecord, orphaned_boot_s: float | None, now_boot_s: float
) -> float | None:
    """Seconds until the session is to be ended from here; None while it is in good hands.

    `orphaned_boot_s`: when it was first seen without a living owner.
    """
    if orphaned_boot_s is None:
        return None
    since = orphaned_boot_s
    if record.unowned_since_boot_s is not None:
        since = min(since, record.unowned_since_boot_s)
    hanging = HANGING_S if record.serving.alive() is not False else 0.0
    return since + record.retain_ttl_s + hanging - now_boot_s


def owned(record: SessionRecord) -> bool:
    """Whether somebody looks after the session, or may do so."""
    keeper: HostProcess | None = record.serving if record.by_hand else record.owner
    return keeper is not None and keeper.alive() is not False


def watch(folder: SessionFolder) -> None:
    """Until the session is gone, by itself or by us."""
    orphaned_boot_s: float | None = None
    said = ""
    while True:
        try:
            record = folder.read()
        except SessionUnreadable as e:
            said = say(str(e), said)
            time.sleep(POLL_S)
            continue
        if record is None:
            return
        if owned(record):
            orphaned_boot_s = None
        elif orphaned_boot_s is None:
            orphaned_boot_s = boot_s()
        due_s = due_in_s(record, orphaned_boot_s, boot_s())
        if due_s is not None and due_s <= 0:
            try:
                if end(folder, record):
                    return
            except (SessionBusy, SessionUnreadable) as e:
                said = say(str(e), said)
        time.sleep(POLL_S)


def say(line: str, before: str) -> str:
    """Write `line` to the log unless it is what was said `before`; returns it."""
    if line != before:
        print(line, flush=True)
    return line


def end(folder: SessionFolder, record: SessionRecord) -> bool:
    """Kill what the session holds and forget it. False when it was taken up meanwhile. Raises
    SessionBusy, SessionUnreadable."""
    if record.serving.alive():  # it hangs
        kill({record.serving.id}, KILL_TIMEOUT_S)
    with folder.serving_lock():
        if folder.read() != record:
            return False
        holds = folder.engine_holds()
        kill({p for hold in holds for p in hold.processes}, KILL_TIMEOUT_S)
        for hold in holds:
            shutil.rmtree(hold.scratch, ignore_errors=True)
            for segment in hold.shared_memory:
                segment.unlink(missing_ok=True)
        memory = folder.memory()
        folder.remove()
        if memory is not None:
            remove_leftovers(memory.parent)
        print(f"session {folder.id}: ended after its retention", flush=True)
        return True


def kill(known: Iterable[ProcessId], timeout_s: float) -> None:
    """SIGKILL `known`, what is below them and in the sessions that they led."""
    targets = set(known)
    leaders = {t.pid for t in targets if t.alive() or not _exists(t.pid)}
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        targets |= _family({t.pid for t in targets if t.alive()}, leaders)
        living = [t for t in targets if t.alive()]
        if not living:
            return
        for target in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(target.pid, signal.SIGKILL)
        time.sleep(0.05)


def _family(parents: set[int], leaders: set[int]) -> set[ProcessId]:
    """Living children of `parents` and members of the sessions of `leaders`."""
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            pid = int(entry.name)
            stat = (entry / "stat").read_text()
            parent, session = stat[stat.rindex(")") + 2 :].split()[1:4:2]
            if int(parent) in parents or int(session) in leaders:
                found.add(ProcessId.of(pid))
    return {p for p in found if p.pid != os.getpid()}


def _exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def main(argv: list[str]) -> None:
    folder = SessionFolder.at(Path(argv[0]))
    fd = os.open(folder.path / "warden.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # the session has one
    watch(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
