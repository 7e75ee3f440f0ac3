"""How a job may start in its run folder."""

from __future__ import annotations

import itertools
import sqlite3
from pathlib import Path

import pytest
from config_jobs import job

from torchtitan_rl_ft.config import start_state
from torchtitan_rl_ft.config.start_state import Found, Start, Wish, decide, observe
from torchtitan_rl_ft.journal import checkpoints, database
from torchtitan_rl_ft.run_folder import RunFolder

FRESH, RESUME, REATTACH, REFUSE = Start.FRESH, Start.RESUME, Start.REATTACH, Start.REFUSE

# (checkpoint, journal, session alive) -> without and with auto_continue_train; the same table is
# in docs/configuration.md.
TABLE = {
    (False, False, False): (FRESH, FRESH),
    (False, False, True): (REFUSE, REATTACH),
    (False, True, False): (REFUSE, RESUME),
    (False, True, True): (REFUSE, REATTACH),
    (True, False, False): (REFUSE, REFUSE),
    (True, False, True): (REFUSE, REFUSE),
    (True, True, False): (REFUSE, RESUME),
    (True, True, True): (REFUSE, REATTACH),
}


def found(checkpoint: bool, journal: bool, session_alive: bool) -> Found:
    return Found("/runs/a", checkpoint, journal, session_alive)


def wish(auto: bool, must: bool = False, journaling: bool = True) -> Wish:
    return Wish(auto, must, journaling)


@pytest.mark.row("H4")
@pytest.mark.parametrize(("state", "starts"), TABLE.items())
def test_table(state: tuple[bool, bool, bool], starts: tuple[Start, Start]) -> None:
    for auto, start in zip((False, True), starts, strict=True):
        decision = decide(found(*state), wish(auto))
        assert decision.start is start
        assert "/runs/a" in decision.reason


@pytest.mark.parametrize("state", [s for s, starts in TABLE.items() if starts[0] is REFUSE])
def test_a_refusal_says_how_to_mend_it(state: tuple[bool, bool, bool]) -> None:
    reason = decide(found(*state), wish(False)).reason
    assert "recovery.auto_continue_train = true" in reason
    assert "job.dump_folder" in reason


@pytest.mark.row("H4")
def test_a_checkpoint_can_be_demanded() -> None:
    for journal, session in itertools.product((False, True), repeat=2):
        decision = decide(found(False, journal, session), wish(True, must=True))
        assert decision.start is REFUSE
        assert "recovery.exit_on_missing_checkpoint" in decision.reason
    assert decide(found(True, True, False), wish(True, must=True)).start is RESUME


def test_a_lone_checkpoint_is_enough_without_journaling() -> None:
    assert decide(found(True, False, False), wish(True, journaling=False)).start is RESUME
    assert decide(found(False, True, False), wish(True, journaling=False)).start is FRESH
    assert "checkpoint.initial_load_path" in decide(found(True, False, False), wish(True)).reason


# What is in the folder ------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def look(tmp_path: Path, folder: Path) -> tuple[bool, bool, bool]:
    state = observe(job(tmp_path, "", "--dump_folder", str(folder)))
    assert state.path == str(folder)
    return state.checkpoint, state.journal, state.session_alive


def test_a_folder_that_is_not_there_is_empty(tmp_path: Path, folder: Path) -> None:
    assert look(tmp_path, folder) == (False, False, False)


def test_logs_of_a_run_that_never_came_up_do_not_count(tmp_path: Path, folder: Path) -> None:
    job(tmp_path, "", "--dump_folder", str(folder)).write()
    (folder / "logs" / "serving").mkdir(parents=True)
    (folder / "checkpoint").mkdir()
    (folder / "journal").mkdir()
    assert look(tmp_path, folder) == (False, False, False)


def test_a_torn_checkpoint_does_not_count(tmp_path: Path, folder: Path) -> None:
    step = folder / "checkpoint" / "step-5"
    step.mkdir(parents=True)
    (step / ".metadata").touch()
    assert look(tmp_path, folder) == (False, False, False)
    (step / "commit.json").touch()
    assert look(tmp_path, folder) == (True, False, False)


def test_a_journal_counts_once_something_is_in_it(tmp_path: Path, folder: Path) -> None:
    path = folder / "journal" / "journal.sqlite"
    path.parent.mkdir(parents=True)
    path.touch()
    assert look(tmp_path, folder)[1] is False
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE groups (id INTEGER PRIMARY KEY)")
    assert look(tmp_path, folder)[1] is False
    with sqlite3.connect(path) as db:
        db.execute("INSERT INTO groups VALUES (1)")
    assert look(tmp_path, folder)[1] is True


def test_a_damaged_journal_is_not_taken_for_none(tmp_path: Path, folder: Path) -> None:
    path = folder / "journal" / "journal.sqlite"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no database at all, but long enough to look like one" * 100)
    assert look(tmp_path, folder)[1] is True


def test_a_living_session_is_seen(tmp_path: Path, folder: Path) -> None:
    RunFolder(folder).register("serving", "http://127.0.0.1:1")
    assert look(tmp_path, folder) == (False, False, True)


def test_the_names_are_the_journals() -> None:
    names = (start_state.CHECKPOINT_MARKER, start_state.JOURNAL_FILE)
    assert names == (checkpoints.MARKER, database.FILE_NAME)


def test_a_real_journal_is_read(tmp_path: Path, folder: Path) -> None:
    (folder / "journal").mkdir(parents=True)
    path = folder / "journal" / database.FILE_NAME
    journal = database.Database(path)
    assert look(tmp_path, folder)[1] is False
    with journal.write() as db:
        db.execute(
            "INSERT INTO groups (id, prompt, state, issued_wall_s, changed_wall_s) "
            "VALUES (1, 'p', 'pending', 0, 0)"
        )
    assert look(tmp_path, folder)[1] is True  # also while its writer is at work
    journal.close()
