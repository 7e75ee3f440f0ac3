"""`rollout.journal = false`: a checkpoint alone says where a run goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from journal_cases import make_ledger, member, record, seal

from torchtitan_rl_ft.journal.checkpoints import (
    MARKER,
    Marker,
    checker,
    file_names,
    finder,
    folder_name,
    mark_files,
    write_marker,
)
from torchtitan_rl_ft.journal.errors import JournalStateError
from torchtitan_rl_ft.journal.ledger import Ledger
from torchtitan_rl_ft.journal.protocol import SAVE, BatchRef, State
from torchtitan_rl_ft.journal.records import GENESIS, Decision
from torchtitan_rl_ft.journal.store import Journal
from torchtitan_rl_ft.observability.events import EventList

A, B = member("a", 0), member("b", 1)


def save(folder: Path, step: int, token: str) -> Path:
    path = folder / "checkpoint" / folder_name(step, token)
    path.mkdir(parents=True)
    (path / "shard.distcp").write_bytes(b"x" * 100)
    batch = {"id": 10 + step, "digest": f"d{step}"}
    write_marker(path, Marker(step, token, "m", batch, files=mark_files(path, file_names(path))))
    return path


@contextmanager
def started(folder: Path, durable: bool = False) -> Iterator[Ledger]:
    """The ledger of a job's start in `folder`."""
    events = EventList()
    with Journal.open(folder / "journal", events=events, durable=durable) as journal:
        yield make_ledger(
            journal,
            folder,
            events,
            why_incomplete=checker(folder),
            find_checkpoints=finder(folder / "checkpoint"),
            keep_checkpoints=2,
        )


def test_the_newest_complete_checkpoint_is_gone_on_from(tmp_path: Path) -> None:
    save(tmp_path, 2, "two")
    newest = save(tmp_path, 4, "four")
    torn = save(tmp_path, 6, "six")
    (torn / MARKER).unlink()
    with started(tmp_path) as ledger:
        answer = ledger.attach(A)
        assert answer.start == "restore" and answer.checkpoint is not None
        assert answer.checkpoint.path == str(newest)
        assert answer.skipped == (f"{torn}: no {MARKER}: it was not finished",)
        state = State(4, "four")
        ledger.live(A, state, "waiting_for_batch")
        assert ledger.begin(A, state, None, participants=1, quorum_id=1).decision is Decision.WAIT
        info = seal(ledger.journal)
        assert (info.step, info.batch_id) == (5, 15)
        verdict = ledger.begin(A, state, None, participants=1, quorum_id=1)
        assert (verdict.decision, verdict.batch) == (Decision.GO, info.ref)
        done = record(ledger.journal)
        assert ledger.committed(A, done, {"loss": 0.5})[0] == "committed"
        path = save(tmp_path, 5, done.token)
        removable = ledger.duty_done(A, SAVE, State(5, done.token), {"path": str(path)})
        assert [Path(p).name for p in removable] == ["step-2-two"]
        rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert [(row["step"], row["commit"]) for row in rows] == [(5, 1)]
        # Another group comes: it takes the living one's state.
        assert ledger.attach(B).start == "fresh"


def test_a_checkpoint_that_proves_damaged_gives_way_to_the_one_before(tmp_path: Path) -> None:
    older, newest = save(tmp_path, 2, "two"), save(tmp_path, 4, "four")
    with started(tmp_path) as ledger:
        assert ledger.attach(A).checkpoint is not None
        ledger.unusable(A, str(newest), "its SHA-256 differs")
        answer = ledger.attach(A)
        assert answer.checkpoint is not None and answer.checkpoint.path == str(older)
        assert any("its SHA-256 differs" in reason for reason in answer.skipped), answer.skipped
        ledger.unusable(A, str(older), "its SHA-256 differs too")
        assert ledger.attach(A).start == "fresh"
        assert ledger.journal.tip == State(0, GENESIS) and seal(ledger.journal).step == 1


def test_groups_that_outlive_the_rollout_role_come_back_to_the_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 4, "four")
    with started(tmp_path) as ledger:
        verdict = ledger.begin(A, State(5, "five"), None, participants=1, quorum_id=1)
        assert verdict.decision is Decision.RESTORE and verdict.checkpoint is not None
        assert verdict.checkpoint.step == 4
        at_it = ledger.begin(B, State(4, "four"), None, participants=1, quorum_id=1)
        assert at_it.decision is Decision.WAIT  # for a batch


def test_of_two_histories_of_one_step_the_later_is_gone_on_from(tmp_path: Path) -> None:
    for name, written_s in (("aaa", 2000.0), ("zzz", 1000.0)):
        os.utime(save(tmp_path, 4, name) / MARKER, (written_s, written_s))
    with started(tmp_path) as ledger:
        assert ledger.journal.tip == State(4, "aaa")


def test_a_journal_that_is_kept_says_itself_where_the_run_stands(tmp_path: Path) -> None:
    save(tmp_path, 4, "four")
    with started(tmp_path, durable=True) as ledger:
        assert ledger.journal.tip == State(0, GENESIS)
        (skipped,) = ledger.attach(A).skipped or ("",)
        assert "superseded" in skipped
    with started(tmp_path / "other") as ledger:
        seal(ledger.journal)
        with pytest.raises(JournalStateError, match="goes on from step 0"):
            ledger.journal.begin_after(State(4, "four"), BatchRef(14, "d4"))
