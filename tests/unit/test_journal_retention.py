"""Which checkpoints are kept, offered and named as skipped: the ledger on real folders."""

from __future__ import annotations

import shutil
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
from torchtitan_rl_ft.journal.ledger import Ledger
from torchtitan_rl_ft.journal.protocol import SAVE, State
from torchtitan_rl_ft.journal.records import GENESIS
from torchtitan_rl_ft.journal.store import Journal
from torchtitan_rl_ft.observability.events import EventList, Kind

A = member("a")


class Run:
    """A ledger with one trainer, which saves real folders."""

    def __init__(self, path: Path, journal: Journal, keep: int = 2) -> None:
        self.path, self.journal, self.keep, self.events = path, journal, keep, EventList()
        self.states = [State(0, GENESIS)]
        self.dead: set[str] = set()
        self.ledger = self.open()

    def open(self) -> Ledger:
        return make_ledger(
            self.journal,
            self.path,
            self.events,
            why_incomplete=checker(self.path),
            find_checkpoints=finder(self.path / "checkpoint"),
            keep_checkpoints=self.keep,
            gone=lambda m: m.uuid in self.dead,
        )

    def commit(self, n: int) -> None:
        for _ in range(n):
            seal(self.journal)
            done = record(self.journal)
            self.ledger.committed(A, done, {})
            self.states.append(State(done.step, done.token))

    def folder(self, state: State) -> Path:
        return self.path / "checkpoint" / folder_name(state.step, state.token)

    def write(self, state: State, whole: bool = True) -> Path:
        path = self.folder(state)
        path.mkdir(parents=True)
        (path / "shard").write_bytes(b"x" * 100)
        if whole:
            files = mark_files(path, file_names(path))
            write_marker(path, Marker(state.step, state.token, "m", files=files))
        return path

    def save(self, step: int) -> list[str]:
        """As a trainer does: ask, write, tell, and remove what may go."""
        state = self.states[step]
        assert self.ledger.duty(A, SAVE, state)[0]
        path = self.write(state)
        removable = self.ledger.duty_done(A, SAVE, state, {"path": str(path)})
        for each in removable:
            shutil.rmtree(each)
        return sorted(Path(each).name for each in removable)

    def kept(self) -> list[int]:
        return sorted(found.step for found in finder(self.path / "checkpoint")())


@pytest.fixture
def run(tmp_path):
    with Journal.open(tmp_path / "journal", events=EventList()) as journal:
        yield Run(tmp_path, journal)


@pytest.mark.scenario("C-1")
def test_two_are_kept_and_batches_are_freed_up_to_the_older_of_them(run):
    for step in range(1, 31):
        run.commit(1)
        run.save(step)
        assert run.kept() == list(range(max(1, step - 1), step + 1))
        assert run.journal.freed_through == max(1, step - 1)
    assert run.journal.audit().problems == []


def test_the_only_complete_ones_stay_whatever_is_torn(run):
    run.commit(6)
    torn = run.write(run.states[1], whole=False)
    assert run.save(2) == []
    assert run.kept() == [1, 2]
    assert run.save(3) == [torn.name]  # two are complete
    (run.folder(run.states[3]) / "shard").write_bytes(b"")
    assert run.save(4) == [run.folder(run.states[3]).name]  # the complete ones are 2 and 4
    (run.folder(run.states[2]) / "shard").write_bytes(b"")
    (run.folder(run.states[4]) / "shard").write_bytes(b"")
    assert run.save(5) == []  # the only complete one, and what may tell why
    assert run.kept() == [2, 4, 5]


def test_one_that_another_group_is_writing_stays(run):
    run.commit(5)
    other = member("b", 1)
    assert run.ledger.duty(other, SAVE, run.states[2])[0]
    run.write(run.states[2], whole=False)
    run.save(3)
    run.save(4)
    run.save(5)
    assert run.kept() == [2, 4, 5]


def test_all_are_kept_where_no_number_is_given(tmp_path):
    with Journal.open(tmp_path / "journal", events=EventList()) as journal:
        run = Run(tmp_path, journal, keep=0)
        run.commit(4)
        assert [run.save(step) for step in (1, 2, 3, 4)] == [[]] * 4
        assert run.journal.freed_through == 1


@pytest.mark.row("H4")
@pytest.mark.row("E9")
@pytest.mark.scenario("C-4")
def test_resume_takes_the_newest_complete_one_and_names_what_it_skips(run):
    run.commit(25)
    run.save(5)
    run.save(10)
    truncated = run.write(run.states[15])
    (truncated / "shard").write_bytes(b"x" * 60)
    unfinished = run.write(run.states[20], whole=False)
    superseded = run.write(State(21, "another history"))
    damaged = run.write(run.states[25])
    (damaged / MARKER).write_text("{")
    (run.path / "checkpoint" / "latest").write_text("25")
    run.dead.add("a")
    answer = run.open().attach(member("b"))
    assert answer.start == "restore" and answer.checkpoint is not None
    assert answer.checkpoint.step == 10
    assert sorted(answer.skipped) == sorted(
        [
            f"{truncated}: shard has 60 bytes, not 100",
            f"{unfinished}: no {MARKER}: it was not finished",
            f"{superseded}: step 21 of a superseded history",
            f"{damaged}: {MARKER} is damaged",
        ]
    )


@pytest.mark.row("E9")
def test_one_that_proves_damaged_is_not_offered_again_nor_counted(run):
    run.commit(6)
    run.save(2)
    run.save(4)
    assert run.journal.freed_through == 2
    run.dead.add("a")
    b = member("b")
    answer = run.ledger.attach(b)
    assert answer.checkpoint is not None and answer.checkpoint.step == 4
    for _ in range(2):  # each group finds out for itself
        run.ledger.unusable(b, answer.checkpoint.path, "shard is not what was written")
    again = run.ledger.attach(b)
    assert again.checkpoint is not None and again.checkpoint.step == 2
    assert again.skipped == (f"{answer.checkpoint.path}: shard is not what was written",)
    assert len([e for e in run.events.events if e["kind"] == Kind.WARN]) == 1


@pytest.mark.row("E10")
def test_each_rollback_is_a_branch_of_its_own_and_old_files_stay_as_they_were(tmp_path):
    with Journal.open(tmp_path / "journal", events=EventList()) as journal:
        run = Run(tmp_path, journal, keep=0)
        run.commit(4)
        run.save(2)
        contents: dict[Path, bytes] = {}
        for branch in range(3):
            if branch:
                journal.rewind(2, reason="restart", member="a")
                for nonce in (10 * branch, 10 * branch + 1):
                    done = record(journal, nonce)
                    run.ledger.committed(A, done, {})
                    run.states[done.step] = State(done.step, done.token)
            run.save(3)
            found = {p: p.read_bytes() for p in (tmp_path / "checkpoint").glob("step-3-*/*")}
            assert contents.items() <= found.items()
            contents = found
        assert len({path.parent for path in contents}) == 3
        run.dead.add("a")
        answer = run.open().attach(member("b"))
        assert answer.checkpoint is not None
        assert Path(answer.checkpoint.path).name == run.folder(run.states[3]).name
        assert answer.skipped == ()
        found = journal.audit()
        assert found.ok and found.superseded == 4 and len(found.history) == 4


def test_a_run_folder_that_was_moved_is_gone_on_with(tmp_path):
    with Journal.open(tmp_path / "old/journal", events=EventList()) as journal:
        run = Run(tmp_path / "old", journal)
        run.commit(4)
        run.save(2)
    (tmp_path / "old").rename(tmp_path / "new")
    with Journal.open(tmp_path / "new/journal", events=EventList()) as journal:
        run = Run(tmp_path / "new", journal)
        run.dead.add("a")
        answer = run.ledger.attach(member("b"))
    assert answer.checkpoint is not None
    assert answer.checkpoint.step == 2 and str(tmp_path / "new") in answer.checkpoint.path
