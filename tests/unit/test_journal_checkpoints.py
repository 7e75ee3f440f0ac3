from __future__ import annotations

import json
from pathlib import Path

import pytest
from journal_cases import make_ledger, member, record, seal

from torchtitan_rl_ft.journal.checkpoints import (
    MARKER,
    CheckpointUnusable,
    Marker,
    checker,
    damage,
    file_names,
    finder,
    flaw,
    folder_name,
    mark_files,
    read_marker,
    write_marker,
)
from torchtitan_rl_ft.journal.protocol import SAVE, CheckpointRef, State
from torchtitan_rl_ft.journal.records import GENESIS
from torchtitan_rl_ft.journal.store import Journal
from torchtitan_rl_ft.observability.events import EventList


def save(folder: Path, step: int, token: str) -> CheckpointRef:
    path = folder / "checkpoint" / folder_name(step, token)
    path.mkdir(parents=True)
    (path / "shard.distcp").write_bytes(b"x" * 100)
    (path / ".metadata").write_bytes(b"m")
    write_marker(path, Marker(step, token, "m", files=mark_files(path, file_names(path))))
    return CheckpointRef(step, token, str(path))


@pytest.mark.row("E9")
def test_a_checkpoint_is_whole_or_says_why_not(tmp_path: Path) -> None:
    ref = save(tmp_path, 5, "t5")
    path, complete = Path(ref.path), checker(tmp_path)
    assert complete(ref) is None
    assert complete(CheckpointRef(5, "t5", "checkpoint/step-5-t5")) is None  # in the run folder
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
def test_contents_that_changed_are_named_by_file(tmp_path: Path) -> None:
    path = Path(save(tmp_path, 5, "t5").path)
    marker = read_marker(path)
    assert set(marker.files) == {"shard.distcp", ".metadata"}
    assert damage(path, marker.files) is None
    (path / "shard.distcp").write_bytes(b"x" * 50 + b"y" + b"x" * 49)  # same size
    assert flaw(path, 5, "t5") is None
    why = damage(path, marker.files)
    assert why == "shard.distcp is not what was written: its SHA-256 differs"


def test_a_marker_of_another_format_is_no_torn_one(tmp_path: Path) -> None:
    path = Path(save(tmp_path, 5, "t5").path)
    told = json.loads((path / MARKER).read_bytes())
    for other in ({**told, "format": 2}, {k: v for k, v in told.items() if k != "format"}):
        (path / MARKER).write_text(json.dumps(other))
        assert flaw(path, 5, "t5") is None  # else an older one would be taken without a word
        with pytest.raises(CheckpointUnusable, match="not of format 1.*initial_load_path"):
            read_marker(path)
    del told["files"]
    (path / MARKER).write_text(json.dumps(told))
    assert flaw(path, 5, "t5") == f"{MARKER} is damaged"


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
        torn = tmp_path / "checkpoint" / "step-4-0000"
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
