"""How a job may start in its run folder. The decision is a pure function and a table
(docs/configuration.md shows the same one)."""

from __future__ import annotations

import contextlib
import socket
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from torchtitan_rl_ft.config.debug_mode import DebugMode, debug_mode, journaling
from torchtitan_rl_ft.config.resolve import Resolved
from torchtitan_rl_ft.config.session_identity import identify
from torchtitan_rl_ft.run_folder import ProcessId, RoleAddress, RunFolder
from torchtitan_rl_ft.session_folder import SessionFolder, SessionUnreadable

# The journal's names; configuration lies below it, so a test keeps them equal.
CHECKPOINT_MARKER = "commit.json"
JOURNAL_FILE = "journal.sqlite"


class Start(StrEnum):
    FRESH = "fresh"  # step 0
    RESUME = "resume"  # from checkpoint and journal, with new engines
    REATTACH = "reattach"  # as resume, with the engines of the living session
    REFUSE = "refuse"


@dataclass(frozen=True)
class Found:
    """What is in the run folder."""

    path: str
    checkpoint: bool
    """At least one complete checkpoint."""

    journal: bool
    """A journal that holds something."""

    session_alive: bool
    """Something of the job's serving session lives: its owner, its serving role, an engine."""


@dataclass(frozen=True)
class Wish:
    """What the configuration asks for."""

    auto_continue: bool
    exit_on_missing_checkpoint: bool
    journaling: bool
    debugging: bool = False
    """A debug mode: it has no history to go on with."""

    @classmethod
    def of(cls, resolved: Resolved) -> Wish:
        recovery = resolved.sections.recovery
        return cls(
            recovery.auto_continue_train,
            recovery.exit_on_missing_checkpoint,
            journaling(resolved.sections.rollout),
            debug_mode(resolved.sections.rollout) is not DebugMode.NONE,
        )


@dataclass(frozen=True)
class StartDecision:
    start: Start
    reason: str
    """For people; how to mend it when refused."""


def decide(found: Found, wish: Wish) -> StartDecision:
    """Pure; see the table in docs/configuration.md."""
    where = f"run folder {found.path}"
    if wish.debugging or not wish.auto_continue:
        holds = [
            name
            for name, there in (
                ("a checkpoint", found.checkpoint),
                ("a journal", found.journal),
                ("a living serving session", found.session_alive),
            )
            if there
        ]
        if not holds:
            return StartDecision(Start.FRESH, f"{where} holds no earlier run")
        earlier = f"{where} holds {' and '.join(holds)} of an earlier run"
        if wish.debugging:
            return _refuse(
                f"{earlier}, which a debug mode must not touch: set job.dump_folder to another "
                "folder" + (" (or end the session: torchtitan stop)" if found.session_alive else "")
            )
        return _refuse(
            f"{earlier}: set recovery.auto_continue_train = true to go on with it, or "
            "job.dump_folder to another folder"
            + ("; `torchtitan stop` ends the session" if found.session_alive else "")
        )
    if not found.checkpoint and wish.exit_on_missing_checkpoint:
        return _refuse(
            f"{where} holds no complete checkpoint, and recovery.exit_on_missing_checkpoint = true "
            "forbids a start without one"
        )
    if found.checkpoint and wish.journaling and not found.journal:
        return _refuse(
            f"{where} holds a checkpoint but no journal, so the place of the checkpoint in its "
            "history is unknown: give the checkpoint to a new job.dump_folder with "
            "checkpoint.initial_load_path, or set rollout.journal = false"
        )
    if found.session_alive:
        return StartDecision(Start.REATTACH, f"{where}: going on with the living serving session")
    if found.checkpoint:
        return StartDecision(Start.RESUME, f"{where}: from its newest complete checkpoint")
    if found.journal and wish.journaling:
        return StartDecision(Start.RESUME, f"{where}: its journal, from the initial weights")
    return StartDecision(Start.FRESH, f"{where} holds nothing to go on with")


def _refuse(reason: str) -> StartDecision:
    return StartDecision(Start.REFUSE, reason)


def observe(resolved: Resolved) -> Found:
    """Look into the run folder of a job, which is empty when it does not exist, and for its
    session. Raises SessionUnreadable."""
    folder = resolved.run_folder
    return Found(
        path=str(folder.path),
        checkpoint=_has_checkpoint(folder.path / resolved.get("checkpoint.folder")),
        journal=_has_journal(folder.journal / JOURNAL_FILE),
        session_alive=living_serving(folder) is not None
        or SessionFolder(identify(resolved).id).living(),
    )


def living_serving(folder: RunFolder) -> RoleAddress | None:
    """The serving role that lives in this folder. Not one of another host: it could not be reached
    from here (roles listen on the loopback), and a host that is lost never takes its name back. Not
    one that works in another folder: its name came here with a copy of that one."""
    serving = folder.role("serving")
    if serving is None or serving.host != socket.gethostname() or not serving.alive():
        return None
    for session in SessionFolder.all():
        with contextlib.suppress(SessionUnreadable):
            record = session.read()
            if record is not None and record.serving.id == ProcessId(
                serving.pid, serving.start_time
            ):
                return serving if RunFolder(record.run_folder).path == folder.path else None
    return serving


def _has_checkpoint(folder: Path) -> bool:
    # The marker is written last: a folder without it is a torn save.
    return any(folder.glob(f"step-*/{CHECKPOINT_MARKER}"))


def _has_journal(path: Path) -> bool:
    """True unless the journal is missing or was never written to by a run."""
    if not path.exists():
        return False
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5.0)) as db:
            return bool(db.execute("SELECT EXISTS (SELECT 1 FROM groups)").fetchone()[0])
    except sqlite3.OperationalError as e:
        # Created, but not even its tables: its writer was stopped at once.
        return "no such table" not in str(e)
    except sqlite3.DatabaseError:
        return True  # damaged: the journal itself says how to mend that
