from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from journal_cases import accept, issue, make_batch, record, seal

from torchtitan_rl_ft.journal import database
from torchtitan_rl_ft.journal.audit import audit
from torchtitan_rl_ft.journal.errors import (
    JournalBusy,
    JournalCorrupt,
    JournalError,
    JournalFenced,
    JournalStateError,
    JournalWriteError,
)
from torchtitan_rl_ft.journal.protocol import BatchRef, CheckpointRef, State
from torchtitan_rl_ft.journal.records import GENESIS, SealedBatch
from torchtitan_rl_ft.journal.store import Journal, NewGroup
from torchtitan_rl_ft.observability.events import EventList, Kind


def reopen(folder: Path, **kwargs) -> Journal:
    return Journal.open(folder / "journal", events=EventList(), **kwargs)


def commit(journal: Journal, nonce: int = 1) -> None:
    journal.commit(record(journal, nonce), reporter="a", metrics={"loss": 1.0})


@pytest.fixture(params=[True, False], ids=["file", "memory"])
def journal(request: pytest.FixtureRequest, tmp_path: Path):
    with reopen(tmp_path, durable=request.param) as opened:
        yield opened
        assert opened.audit().problems == []


def test_a_groups_life(journal: Journal) -> None:
    ids = issue(journal, 4)
    assert [g.group_id for g in journal.pending()] == ids == [1, 2, 3, 4]
    assert journal.pending()[1].prompt == {"q": 1}
    accept(journal, ids[:3])
    journal.drop(ids[3], "too long")
    groups = journal.accepted()
    assert [g.group_id for g in groups] == ids[:3] and groups[0].meta == {"reward": 1.0}
    np.testing.assert_array_equal(groups[0].samples["tokens"], [0, 1, 2])
    info = journal.seal(make_batch(ids[:2]), ids[:2])
    assert (info.batch_id, info.step, info.samples) == (1, 1, 4)
    assert journal.head() == info.ref and journal.sealed_ahead == 1
    assert journal.counts() == {
        "issued": 4,
        "pending": 0,
        "accepted": 1,
        "sealed": 2,
        "trained": 0,
        "dropped": {"too long": 1},
    }
    commit(journal)
    assert journal.counts()["trained"] == 2 and journal.head() is None


def test_seal_counts_the_groups_dropped_since_the_batch_before(journal: Journal) -> None:
    for told in (1, 0):
        ids = issue(journal, 3)
        accept(journal, ids)
        if told:
            journal.drop(ids[2], "stale")
        info = journal.seal(make_batch(ids[:2]), ids[:2])
        assert journal.batch(info.batch_id).meta["dropped_groups"] == told


@pytest.mark.parametrize("durable", [True, False])
def test_illegal_moves_change_nothing(tmp_path: Path, durable: bool) -> None:
    with reopen(tmp_path, durable=durable) as journal:
        (a, b) = issue(journal, 2)
        with pytest.raises(JournalStateError, match="'0:0' was issued before"):
            journal.issue([NewGroup({}, "new"), NewGroup({}, "0:0")], 9)
        assert journal.cursor() == 2 and len(journal.pending()) == 2
        with pytest.raises(JournalStateError, match="group 9 is unknown, not pending"):
            accept(journal, [9])
        accept(journal, [a])
        with pytest.raises(JournalStateError, match="group 1 is accepted"):
            accept(journal, [a])
        with pytest.raises(JournalStateError, match="needs a reason"):
            journal.drop(a, "")
        with pytest.raises(JournalStateError, match="group 2 is pending, not accepted"):
            journal.seal(make_batch([a, b]), [a, b])
        with pytest.raises(JournalStateError, match="not those of the named groups"):
            journal.seal(make_batch([a, b]), [a])
        assert journal.next_batch_id() == 1 and journal.plan == {}
        journal.seal(make_batch([a]), [a])
        with pytest.raises(JournalStateError, match="group 1 is sealed"):
            journal.drop(a, "late")
        with pytest.raises(JournalStateError, match="does not continue the tip"):
            bad = record(journal)
            journal.commit(
                type(bad)(**{**bad.to_json(), "prev_token": "x"}), reporter="a", metrics={}
            )
        with pytest.raises(JournalStateError, match="cannot rewind"):
            journal.rewind(0, reason="r", member="a")
        assert journal.audit().ok


@pytest.mark.row("E2")
def test_all_is_there_after_reopening(tmp_path: Path) -> None:
    with reopen(tmp_path) as journal:
        seal(journal)
        seal(journal)
        commit(journal)
        ids = issue(journal, 2)
        journal.accept(ids[0], {"tokens": np.zeros(2, np.int32)}, cursor={"at": 6})
        before = (journal.plan, journal.tip, journal.counts(), journal.batch_bytes(2))
        journal.add_checkpoint(CheckpointRef(1, journal.tip.token, "step-1"))
        journal.add_published(3, journal.tip)
        owner = journal.owner
    with reopen(tmp_path) as journal:
        assert (journal.plan, journal.tip, journal.counts(), journal.batch_bytes(2)) == before
        assert journal.cursor() == {"at": 6} and journal.published() == (3, journal.tip)
        assert list(journal.checkpoints) == [CheckpointRef(1, journal.tip.token, "step-1")]
        assert journal.owner == owner + 1
        assert journal.audit().ok


@pytest.mark.row("E6")
def test_rewind_supersedes_and_replays_the_same_batches(journal: Journal) -> None:
    refs = [seal(journal).ref for _ in range(3)]
    for nonce in range(3):
        commit(journal, nonce)
    first = journal.tokens[1]
    journal.rewind(1, reason="restart", member="a")
    assert journal.tip == State(1, first) and journal.head() == refs[1]
    assert journal.counts()["sealed"] == 4 and journal.counts()["trained"] == 2
    commit(journal, 7)
    found = journal.audit()
    assert found.ok and found.superseded == 2
    assert [(row.step, row.batch_id) for row in found.history] == [(1, 1), (2, 2)]
    assert journal.era == 1 and len(journal.commits_after(0)) == 4


def test_a_dropped_batch_leaves_the_plan_and_later_ones_move_up(journal: Journal) -> None:
    refs = [seal(journal).ref for _ in range(4)]
    commit(journal)
    journal.drop_batch(2, "numeric")
    assert journal.plan == {1: refs[0], 2: refs[2], 3: refs[3]}
    assert journal.counts()["dropped"] == {"numeric": 2}
    with pytest.raises(JournalStateError, match="not waiting"):
        journal.drop_batch(2, "again")
    with pytest.raises(JournalStateError, match="not waiting"):
        journal.drop_batch(1, "trained")
    commit(journal)
    assert seal(journal).step == 4


@pytest.mark.row("E7")
def test_batches_are_freed_up_to_the_boundary(journal: Journal) -> None:
    for _ in range(4):
        seal(journal)
    for _ in range(3):
        commit(journal)
    assert journal.free_through(2) == 2 and journal.freed_through == 2
    with pytest.raises(JournalStateError, match="batch 2 is freed"):
        journal.batch_bytes(2)
    assert journal.batch_info(2)[1] == 4
    assert journal.free_through(1) == 0
    with pytest.raises(JournalStateError, match="cannot rewind from step 3 to 1"):
        journal.rewind(1, reason="r", member="a")
    journal.rewind(2, reason="r", member="a")
    assert journal.batch(3).batch_id == 3
    assert journal.free_through(9) == 0  # never beyond what is trained


def test_events_tell_what_is_on_disk(tmp_path: Path) -> None:
    events = EventList()
    with Journal.open(tmp_path / "journal", events=events) as journal:
        seal(journal)
        seal(journal)
        journal.drop(issue(journal, 1)[0], "filtered")
        commit(journal)
        journal.rewind(0, reason="alone", member="a")
        journal.add_checkpoint(CheckpointRef(0, GENESIS, "p"))
        journal.add_checkpoint(CheckpointRef(0, GENESIS, "p"))
        journal.add_published(1, journal.tip)
    assert [e["kind"] for e in events.events] == [
        Kind.SEAL,
        Kind.SEAL,
        Kind.DROP,
        Kind.COMMIT,
        Kind.SUPERSEDE,
        Kind.CHECKPOINT,
        Kind.PUBLISH,
    ]
    assert events.events[2] == {"kind": Kind.DROP, "cause": "filtered", "group": 5}
    assert events.events[4]["from_step"] == 1 and events.events[4]["to_step"] == 0


# Ownership ----------------------------------------------------------------------------------


@pytest.mark.row("E10")
def test_a_second_owner_is_refused(tmp_path: Path) -> None:
    code = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from torchtitan_rl_ft.journal.store import Journal
        from torchtitan_rl_ft.observability.events import EventList
        Journal.open(Path(sys.argv[1]), events=EventList())
        """
    )
    command = [sys.executable, "-c", code, str(tmp_path / "journal")]
    with reopen(tmp_path):
        with pytest.raises(JournalBusy, match="already open in this process"):
            reopen(tmp_path)
        other = subprocess.run(command, capture_output=True, text=True)
        assert other.returncode != 0
        assert "JournalBusy" in other.stderr and "is in use by process" in other.stderr
    assert subprocess.run(command).returncode == 0


@pytest.mark.row("E10")
def test_an_owner_that_was_replaced_cannot_write(tmp_path: Path) -> None:
    """Where locks do not reach (another host's mount), the owner number fences."""
    with reopen(tmp_path) as journal:
        ids = issue(journal, 1)
        with sqlite3.connect(tmp_path / "journal" / "journal.sqlite") as other:
            other.execute("UPDATE meta SET value = '99' WHERE key = 'owner'")
        with pytest.raises(JournalFenced, match="taken over"):
            accept(journal, ids)
        assert journal.pending()[0].group_id == ids[0]


# Damage -------------------------------------------------------------------------------------


def test_garbage_is_refused_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "journal" / "journal.sqlite"
    path.parent.mkdir()
    path.write_bytes(b"no database at all " * 100)
    with pytest.raises(JournalCorrupt, match=r"journal\.sqlite is not a readable journal"):
        reopen(tmp_path)
    with pytest.raises(JournalCorrupt, match="not a readable journal"):
        audit(path.parent)
    assert path.read_bytes().startswith(b"no database")
    path.unlink()
    reopen(tmp_path).close()  # the lock was given back


def test_another_programs_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal" / "journal.sqlite"
    path.parent.mkdir()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE bookmarks (url)")
    with pytest.raises(JournalCorrupt, match="another program's database"):
        reopen(tmp_path)


def test_another_format_is_refused(tmp_path: Path) -> None:
    reopen(tmp_path).close()
    with sqlite3.connect(tmp_path / "journal" / "journal.sqlite") as other:
        other.execute("PRAGMA user_version = 7")
    with pytest.raises(JournalCorrupt, match="journal format 7"):
        reopen(tmp_path)


@pytest.mark.row("E8")
def test_a_cut_database_is_a_clear_error(tmp_path: Path) -> None:
    with reopen(tmp_path) as journal:
        for _ in range(20):
            seal(journal, 8)
    path = tmp_path / "journal" / "journal.sqlite"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(JournalCorrupt, match="journal.sqlite"):
        reopen(tmp_path)


@pytest.mark.row("E8")
@pytest.mark.scenario("L-1")
def test_a_cut_last_record_is_discarded_and_the_rest_is_kept(tmp_path: Path) -> None:
    """kill -9 leaves the log behind; its end may be torn at any byte."""
    writer = textwrap.dedent(
        """
        import os, sys
        sys.path.insert(0, sys.argv[2])
        from pathlib import Path
        from journal_cases import seal
        from torchtitan_rl_ft.journal.store import Journal
        from torchtitan_rl_ft.observability.events import EventList
        journal = Journal.open(Path(sys.argv[1]), events=EventList())
        for _ in range(3):
            seal(journal)
        os._exit(9)
        """
    )
    here = str(Path(__file__).parent)
    subprocess.run([sys.executable, "-c", writer, str(tmp_path / "journal"), here])
    log = tmp_path / "journal" / "journal.sqlite-wal"
    whole = log.read_bytes()
    log.write_bytes(whole[: len(whole) - 100])
    with reopen(tmp_path) as journal:
        assert len(journal.plan) == 2 and len(journal.accepted()) == 2
        assert journal.audit().ok


def test_a_damaged_payload_is_found(tmp_path: Path) -> None:
    with reopen(tmp_path) as journal:
        seal(journal)
    with sqlite3.connect(tmp_path / "journal" / "journal.sqlite") as other:
        payload = bytearray(other.execute("SELECT payload FROM batches").fetchone()[0])
        payload[-1] ^= 1
        other.execute("UPDATE batches SET payload = ?", (bytes(payload),))
    with reopen(tmp_path) as journal:
        with pytest.raises(JournalCorrupt, match="batch 1 does not match its digest"):
            journal.batch_bytes(1)
        assert "batch 1: digest" in journal.audit().problems[0]


def test_a_full_disk_is_named_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    with reopen(tmp_path) as journal:
        ids = issue(journal, 2)
        accept(journal, ids)
        pages = journal._db.one("PRAGMA page_count")
        assert pages is not None
        journal._db.one(f"PRAGMA max_page_count={pages[0]}")  # SQLite's own "disk is full"
        big = make_batch(ids, samples_per_group=4000)
        with pytest.raises(JournalWriteError, match=r"journal\.sqlite: database or disk is full"):
            journal.seal(big, ids)
        assert journal.plan == {} and len(journal.accepted()) == 2
        journal._db.one("PRAGMA max_page_count=1000000")
        assert journal.seal(big, ids).step == 1
        assert journal.audit().ok


def test_a_write_waits_for_another_program_and_names_what_holds_it_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 1.0)
    with contextlib.closing(Journal.open(tmp_path, events=EventList())) as journal:
        other = sqlite3.connect(tmp_path / "journal.sqlite", isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(JournalWriteError, match="another program has had it locked for 1 s"):
            issue(journal, 1)
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(issue, journal, 1)
            with pytest.raises(TimeoutError):
                waits.result(0.2)
            other.execute("ROLLBACK")
            assert waits.result(10.0)
        other.close()


def test_a_write_that_the_system_refuses_is_named(tmp_path: Path) -> None:
    """The operating system's own limit, in a process of its own, as a full disk would be met."""
    code = textwrap.dedent(
        """
        import resource, sys
        sys.path.insert(0, sys.argv[2])
        from pathlib import Path
        from journal_cases import accept, issue, make_batch
        from torchtitan_rl_ft.journal.errors import JournalWriteError
        from torchtitan_rl_ft.journal.store import Journal
        from torchtitan_rl_ft.observability.events import EventList
        journal = Journal.open(Path(sys.argv[1]), events=EventList())
        ids = issue(journal, 2)
        accept(journal, ids)
        size = 600_000
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        try:
            journal.seal(make_batch(ids, samples_per_group=9000), ids)
        except JournalWriteError as e:
            print(e)
        assert journal.plan == {} and len(journal.accepted()) == 2
        journal.drop(ids[0], "small enough")
        """
    )
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", code, str(tmp_path / "journal"), here]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "cannot write" in done.stdout and "journal.sqlite" in done.stdout
    with reopen(tmp_path) as journal:
        assert journal.counts()["dropped"] == {"small enough": 1}
        assert journal.audit().ok


def test_a_read_only_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("a file in the way")
    with pytest.raises(JournalWriteError, match="cannot create .*journal"):
        reopen(tmp_path)


# Audit --------------------------------------------------------------------------------------


def test_audit_reads_the_file_while_it_is_written(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="there is no journal in"):
        audit(tmp_path)
    with reopen(tmp_path) as journal:
        seal(journal)
        commit(journal)
        found = audit(tmp_path / "journal")
        assert found.ok and found.counts["trained"] == 2
        assert found.history[0].participants == 2 and found.history[0].samples == 4
    assert audit(tmp_path / "journal").ok


@pytest.mark.parametrize(
    ("sql", "problem"),
    [
        ("DELETE FROM groups WHERE id = 3", "group 3 is nowhere"),
        ("UPDATE groups SET batch_id = 2 WHERE id = 5", "batch 2: its samples are not those"),
        ("DELETE FROM commits WHERE step = 1", "commit of step 2: step 1 was to come"),
        ("UPDATE commits SET prev_token = 'x' WHERE step = 2", "its previous token is not"),
        ("UPDATE commits SET digest = 'x' WHERE step = 2", "is not as it was sealed"),
        ("DELETE FROM commits WHERE superseded_by = 1", "that are left are those of steps []"),
        ("UPDATE rewinds SET to_step = 2, from_step = 3", "that are left are those of steps [2]"),
        ("UPDATE commits SET superseded_by = 9 WHERE superseded_by = 1", "no rewind accounts"),
        ("UPDATE commits SET id = 9 WHERE step = 1", "committed before the step ahead of it"),
        ("UPDATE commits SET shares = '[]' WHERE step = 2", "0 groups have a share, 2 took part"),
        ("UPDATE commits SET participants = 3 WHERE step = 2", "2 groups have a share, 3 took"),
        ("UPDATE commits SET batch_id = 3 WHERE step = 2", "batch 3 is not as it was sealed"),
        (
            """UPDATE commits SET shares = '[["trainer-0", 2, 9], ["trainer-1", 1, 5]]'""",
            "3 samples of 14 tokens were trained, its batch has 4 of",
        ),
        ("DELETE FROM plan WHERE step = 3", "the plan is not the sealed batches"),
        ("UPDATE batches SET payload = NULL WHERE id = 3", "has lost its bytes"),
        ("UPDATE meta SET value = 9 WHERE key = 'freed_through'", "freed up to step 9"),
    ],
)
def test_audit_finds(tmp_path: Path, sql: str, problem: str) -> None:
    with reopen(tmp_path) as journal:
        for _ in range(3):
            seal(journal)
        commit(journal, 1)
        commit(journal, 2)
        journal.rewind(1, reason="r", member="a")
        commit(journal, 3)
        issue(journal, 1)
        journal.free_through(1)
    path = tmp_path / "journal" / "journal.sqlite"
    assert audit(path.parent).ok
    with sqlite3.connect(path) as other:
        other.execute(sql)
    assert any(problem in p for p in audit(path.parent).problems), audit(path.parent).problems


def test_a_sealed_batch_survives_its_bytes() -> None:
    batch = make_batch([1, 2])
    back = SealedBatch.from_bytes(batch.to_bytes())
    assert back.meta == batch.meta and json.dumps(back.meta)
    for name, array in batch.arrays.items():
        np.testing.assert_array_equal(back.arrays[name], array)
    assert BatchRef(1, "x") != BatchRef(2, "x")
