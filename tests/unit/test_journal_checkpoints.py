from __future__ import annotations

import json
from pathlib import Path

import pytest
from journal_cases import make_ledger, member, record, seal

from torchtitan_rl_ft.journal.checkpoints import MARKER, checker, finder, flaw, write_marker
from torchtitan_rl_ft.journal.protocol import SAVE, CheckpointRef, State
from torchtitan_rl_ft.journal.records import GENESIS
from torchtitan_rl_ft.journal.store import Journal
from torchtitan_rl_ft.observability.events import EventList


def save(folder: Path, step: int, token: str) -> CheckpointRef:
    path = folder / "checkpoint" / f"step-{step}"
    path.mkdir(parents=True)
    (path / "shard.distcp").write_bytes(b"x" * 100)
    (path / ".metadata").write_bytes(b"m")
    write_marker(path, step, token)
    return CheckpointRef(step, token, str(path))


@pytest.mark.row("E9")
def test_a_checkpoint_is_whole_or_says_why_not(tmp_path: Path) -> None:
    ref = save(tmp_path, 5, "t5")
    path, complete = Path(ref.path), checker(tmp_path)
    assert complete(ref) is None
    assert complete(CheckpointRef(5, "t5", "checkpoint/step-5")) is None  # in the run folder
    assert (
        complete(CheckpointRef(5, "other", ref.path)) == f"{MARKER} is of step 5 of another history"
    )
    (path / "shard.distcp").write_bytes(b"x" * 60)
    assert complete(ref) == "shard.distcp has 60 bytes, not 100"
    (path / "shard.distcp").unlink()
    assert complete(ref) == "shard.distcp is missing"
    (path / MARKER).write_text('{"step": 5')
    assert complete(ref) == f"{MARKER} is damaged"
    (path / MARKER).unlink()
    assert complete(ref) == f"no {MARKER}: it was not finished"
    assert flaw(tmp_path / "none", 5, "t5") == "the folder is gone"


@pytest.mark.row("E9")
def test_a_marker_counts_although_its_notice_was_lost(tmp_path: Path) -> None:
    events = EventList()
    with Journal.open(tmp_path / "journal", events=events) as journal:
        ledger = make_ledger(
            journal,
            tmp_path,
            events,
            why_incomplete=checker(tmp_path),
            find_checkpoints=finder(tmp_path / "checkpoint"),
        )
        states = [State(0, GENESIS)]
        for _ in range(4):
            seal(journal)
            done = record(journal)
            ledger.committed(member("a"), done, {})
            states.append(State(done.step, done.token))
        told = save(tmp_path, 2, states[2].token)
        ledger.duty_done(member("a"), SAVE, states[2], {"path": told.path})
        save(tmp_path, 3, states[3].token)  # killed before it was told
        save(tmp_path, 1, "of a superseded history")
        (tmp_path / "checkpoint" / "latest").write_text("4")  # a tracker file means nothing
        torn = tmp_path / "checkpoint" / "step-4"
        torn.mkdir()
        (torn / MARKER).write_text(json.dumps(["not", "ours"]))
        answer = make_ledger(
            journal,
            tmp_path,
            events,
            why_incomplete=checker(tmp_path),
            find_checkpoints=finder(tmp_path / "checkpoint"),
            gone=lambda m: m.uuid == "a",
        ).attach(member("b"))
        assert answer.start == "restore" and answer.checkpoint is not None
        assert answer.checkpoint.step == 3
        assert [c.step for c in journal.checkpoints] == [3, 2]
        assert journal.freed_through == 2
