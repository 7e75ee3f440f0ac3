from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from journal_cases import issue, make_ledger, member, record, seal

from torchtitan_rl_ft.journal.errors import JournalWriteError
from torchtitan_rl_ft.journal.ledger import Ledger
from torchtitan_rl_ft.journal.members import Members, process_gone
from torchtitan_rl_ft.journal.protocol import PUBLISH, SAVE, State, Verdict
from torchtitan_rl_ft.journal.records import GENESIS, CommitRecord, Decision, Member
from torchtitan_rl_ft.journal.step_metrics import REQUIRED
from torchtitan_rl_ft.journal.store import Journal
from torchtitan_rl_ft.observability.events import EventList, Kind
from torchtitan_rl_ft.run_folder import ProcessId

A, B, C = member("a", 0), member("b", 1), member("c", 2)
START = State(0, GENESIS)


@dataclass
class Run:
    """A ledger on a file with a clock that stands still."""

    folder: Path
    options: dict = field(default_factory=dict)
    now: float = 1000.0
    dead: set[str] = field(default_factory=set)
    events: EventList = field(default_factory=EventList)

    def __post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        self.journal = Journal.open(self.folder / "journal", events=self.events)
        self.ledger: Ledger = make_ledger(
            self.journal,
            self.folder,
            self.events,
            mono_s=lambda: self.now,
            gone=lambda m: m.uuid in self.dead,
            **self.options,
        )

    def reopen(self) -> None:
        self.journal.close()
        self.open()

    def lines(self) -> list[dict]:
        text = (self.folder / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def kinds(self, kind: Kind) -> list[dict]:
        return [e for e in self.events.events if e["kind"] is kind]

    def commit(self, who: Member = A, nonce: int = 1, **metrics: float) -> CommitRecord:
        done = record(self.journal, nonce)
        assert self.ledger.committed(who, done, {"loss": 0.5, **metrics})[0] == "committed"
        return done

    def begin(self, who: Member, state: State, tail: CommitRecord | None = None) -> Verdict:
        return self.ledger.begin(who, state, tail, participants=1, quorum_id=1)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    assert made.journal.audit().problems == []
    made.journal.close()


def after(done: CommitRecord) -> State:
    return State(done.step, done.token)


# Metrics ------------------------------------------------------------------------------------


def test_metrics_lines_join_report_and_batch(run: Run) -> None:
    seal(run.journal)
    run.commit(**{"time/step_s": 0.2, "reward/mean": 9.0})
    (line,) = run.lines()
    assert set(REQUIRED) <= set(line)
    assert line["loss"] == 0.5 and line["time/step_s"] == 0.2
    assert line["reward/mean"] == 9.0  # the reporter's word goes before the batch's
    assert line["reward/std"] == 0.1 and line["dropped_groups"] == 0 and line["samples"] == 4
    assert line["grad_norm"] is None


@pytest.mark.row("K3")
def test_metrics_lines_are_written_once_also_across_a_restart(run: Run) -> None:
    for _ in range(4):
        seal(run.journal)
    first = run.commit()
    run.ledger.committed(B, first, {"loss": 7.0})
    run.commit()
    path = run.folder / "metrics.jsonl"
    whole = path.read_bytes()
    run.reopen()
    assert path.read_bytes() == whole
    # Killed between the journal and the file, with half a line written.
    run.commit()
    path.write_bytes(path.read_bytes()[: len(whole) + 9])
    run.reopen()
    assert [(x["step"], x["commit"], x["loss"]) for x in run.lines()] == [
        (1, 1, 0.5),
        (2, 2, 0.5),
        (3, 3, 0.5),
    ]
    # The whole file lost.
    path.unlink()
    run.reopen()
    assert [x["step"] for x in run.lines()] == [1, 2, 3]


def test_each_line_tells_what_is_known_of_the_whole_run(run: Run) -> None:
    told = iter([{"ettr/strict": None}, {"ettr/strict": 0.5, "loss": 9.0}])
    run.options["of_run"] = lambda: next(told)
    run.reopen()
    seal(run.journal), seal(run.journal)
    run.commit(), run.commit()
    assert [(x["ettr/strict"], x["loss"]) for x in run.lines()] == [(None, 0.5), (0.5, 0.5)]


def test_a_lost_reports_line_waits_for_another_group(run: Run) -> None:
    seal(run.journal), seal(run.journal), seal(run.journal)
    lost = record(run.journal)
    assert run.begin(A, after(lost), lost).decision is Decision.GO
    assert run.journal.tip == after(lost) and run.lines() == []
    assert run.ledger.committed(B, lost, {"loss": 3.0})[0] == "confirmed"
    assert [x["loss"] for x in run.lines()] == [3.0]
    # Nobody tells: the next commit, or the end, waits no longer.
    lost = record(run.journal)
    run.begin(A, after(lost), lost)
    run.commit()
    assert [x["loss"] for x in run.lines()] == [3.0, None, 0.5]
    (adopted,) = {e["step"] for e in run.kinds(Kind.COMMIT) if e["cause"]} - {1}
    assert adopted == 2
    seal(run.journal)
    lost = record(run.journal)
    run.begin(A, after(lost), lost)
    run.ledger.set_outcome("drained", "signal")
    assert len(run.lines()) == 4


@pytest.mark.parametrize("line", ["no json", "[1, 2]", "[" * 100_000, "null"])
def test_a_metrics_file_of_garbage_is_named(run: Run, line: str) -> None:
    (run.folder / "metrics.jsonl").write_text(f"{line}\n")
    with pytest.raises(JournalWriteError, match=r"metrics\.jsonl has a line that is not JSON"):
        run.reopen()
    (run.folder / "metrics.jsonl").unlink()
    run.journal.close()
    run.open()


# Duties -------------------------------------------------------------------------------------


def test_the_publish_duty_moves_when_its_holder_dies(run: Run) -> None:
    run.ledger.attach(A), run.ledger.attach(B)
    seal(run.journal)
    done = record(run.journal)
    tip = after(done)
    assert run.ledger.committed(A, done, {})[2] == [PUBLISH]
    assert run.ledger.committed(A, done, {})[2] == [PUBLISH]  # the reply was lost
    assert run.ledger.committed(B, done, {})[2] == []
    assert run.ledger.next_now(1, "b") is None
    run.dead.add("a")
    assert run.ledger.next_now(1, "b") == {"status": "waiting", "duties": [PUBLISH]}
    assert run.ledger.next_now(1, "b") is None  # offered a moment ago
    granted, why = run.ledger.duty(B, PUBLISH, tip)
    assert granted and "taken over from a: it is dead" in why
    run.ledger.duty_done(B, PUBLISH, tip, {"version": 5})
    assert run.journal.published() == (5, tip) and run.journal.version_of(tip) == 5
    assert run.ledger.duty(B, PUBLISH, tip) == (False, "done")
    assert run.ledger.next_now(1, "b") is None


def test_a_holder_that_waits_is_offered_its_own_duty_again(run: Run) -> None:
    """It tried and failed, say because serving was away; its beats keep the lease alive."""
    run.ledger.attach(A)
    assert run.ledger.duty(A, PUBLISH, START)[0]
    for _ in range(50):
        run.now += 2
        run.ledger.live(A, START, "waiting_for_batch")
    assert run.ledger.next_now(0, "a") == {"status": "waiting", "duties": [PUBLISH]}


def test_a_lease_ends_without_beats_and_lives_with_them(run: Run) -> None:
    run.ledger.attach(A), run.ledger.attach(B)
    assert run.ledger.duty(A, PUBLISH, START)[0]
    for _ in range(40):
        run.now += 2
        run.ledger.live(A, START, "publish")
        run.ledger.live(B, START, "waiting_for_batch")
        assert run.ledger.duty(B, PUBLISH, START) == (False, "held by a")
    run.reopen()  # the ledger forgot the lease's time, not its holder
    run.ledger.live(B, START, "waiting_for_batch")
    assert run.ledger.duty(B, PUBLISH, START) == (False, "held by a")
    run.now += 11
    assert run.ledger.duty(B, PUBLISH, START)[0]  # silent for longer than a life


def test_after_a_rewind_the_tip_is_published_anew(run: Run) -> None:
    seal(run.journal), seal(run.journal)
    first = run.commit(A)
    run.ledger.duty_done(A, PUBLISH, after(first), {"version": 2})
    second = run.commit(A)
    run.ledger.duty_done(A, PUBLISH, after(second), {"version": 3})
    run.dead.add("a")
    assert run.begin(B, after(first), first).decision is Decision.GO
    assert run.journal.tip == after(first)
    assert run.ledger.duty(B, PUBLISH, after(first))[0]


@pytest.mark.row("D7")
@pytest.mark.scenario("W-2")
def test_a_new_owner_of_serving_has_the_tip_published_again(run: Run) -> None:
    """Once for each owner, whatever the journal says of earlier ones; by one holder."""
    seal(run.journal)
    tip = after(run.commit(A))
    run.ledger.duty_done(A, PUBLISH, tip, {"version": 2})
    assert run.ledger.next_now(1, "a") is None
    run.dead.add("a")
    run.reopen()
    run.ledger.attach(B)
    run.ledger.attach(C)
    run.ledger.live(B, tip, "waiting")
    run.ledger.live(C, tip, "waiting")
    assert run.ledger.next_now(1, "b") is None  # served already, as far as the journal knows

    run.ledger.publish_awaited("job-2")
    assert run.ledger.next_now(1, "b") == {"status": "waiting", "duties": [PUBLISH]}
    assert run.ledger.duty(B, PUBLISH, tip)[0]
    assert run.ledger.duty(C, PUBLISH, tip) == (False, "held by b")
    run.ledger.publish_awaited("job-2")  # told again meanwhile
    run.ledger.duty_done(B, PUBLISH, tip, {"version": 3})
    run.ledger.publish_awaited("job-2")  # an answer that was late
    assert run.ledger.duty(B, PUBLISH, tip) == (False, "done")
    run.ledger.publish_awaited("job-3")
    assert run.ledger.duty(B, PUBLISH, tip)[0]


@pytest.mark.row("E7")
def test_a_durable_checkpoint_frees_what_the_oldest_complete_one_covers(tmp_path: Path) -> None:
    gone: set[str] = set()
    run = Run(
        tmp_path, {"why_incomplete": lambda c: "the folder is gone" if c.path in gone else None}
    )
    commits = []
    for _ in range(6):
        seal(run.journal)
        commits.append(run.commit())
        if len(commits) in (2, 4):
            state = after(commits[-1])
            assert run.ledger.duty(A, SAVE, state)[0]
            assert run.ledger.duty(B, SAVE, state) == (False, "held by a")
            run.ledger.duty_done(A, SAVE, state, {"path": f"step-{state.step}"})
    assert run.journal.freed_through == 2
    gone.add("step-2")  # keep-latest purged it
    run.ledger.duty_done(A, SAVE, after(commits[5]), {"path": "step-6"})
    assert run.journal.freed_through == 4
    assert [e["step"] for e in run.kinds(Kind.CHECKPOINT)] == [2, 4, 6]
    run.dead |= {"a"}
    answer = run.ledger.attach(C)
    assert answer.start == "restore" and answer.checkpoint is not None
    assert answer.checkpoint.path == "step-6"
    gone.add("step-6")
    answer = run.ledger.attach(C)
    assert answer.checkpoint is not None and answer.checkpoint.path == "step-4"
    assert answer.skipped == ("step-6: the folder is gone",)
    run.journal.close()


# Life ---------------------------------------------------------------------------------------


def test_a_member_lives_by_its_beats_and_its_process() -> None:
    now, dead = [0.0], set()
    members = Members([A], mono_s=lambda: now[0], gone=lambda m: m.uuid in dead)
    assert members.alive("a") and not members.alive("b")
    now[0] = 10.5
    assert not members.alive("a")
    members.holds(A, State(3, "t3"))
    assert members.alive("a")
    members.beats(A, State(2, "t2"), "late")  # a beat that overtook nothing
    assert members.views()[0].state == State(3, "t3")
    members.beats(A, State(4, "t4"), "publish")
    assert members.views()[0].state == State(4, "t4")
    dead.add("a")
    assert not members.alive("a") and members.living() == frozenset()
    assert members.forget_dead() == ["a"] and "a" not in members


def test_a_process_of_this_host_is_looked_up() -> None:
    me = ProcessId.current()
    here = Member(0, "u", me.pid, me.start_time, socket.gethostname())
    assert not process_gone(here)
    assert process_gone(replace(here, start_time=me.start_time - 100))  # its pid was reused
    assert not process_gone(replace(here, start_time=0.0, host="elsewhere"))


def test_nobody_is_dead_just_because_the_ledger_was(run: Run) -> None:
    """After a restart of the rollout role members get time to speak before history goes back."""
    run.ledger.attach(A), run.ledger.attach(B)
    seal(run.journal), seal(run.journal)
    first = run.commit(A)
    run.commit(A, nonce=2)
    run.now += 100
    run.reopen()
    verdict = run.begin(B, after(first), first)
    assert verdict.decision is Decision.WAIT and "a lives" in verdict.reason
    assert run.begin(B, after(first), first).decision is Decision.WAIT
    assert len(run.kinds(Kind.BEGIN)) == 1  # told once
    run.now += 10.5
    assert run.begin(B, after(first), first).decision is Decision.GO
    assert run.kinds(Kind.SUPERSEDE)[0]["from_step"] == 2


@pytest.mark.row("E10")
def test_a_fork_is_refused_and_heals(run: Run) -> None:
    """Two quorums trained the same batch: one history wins, the other heals."""
    run.ledger.attach(A), run.ledger.attach(B)
    seal(run.journal), seal(run.journal)
    mine, theirs = record(run.journal, 1), record(run.journal, 2)
    assert run.ledger.committed(A, mine, {})[0] == "committed"
    status, why, duties = run.ledger.committed(B, theirs, {})
    assert status == "refused" and "the ledger is at step 1" in why and duties == []
    assert run.begin(B, after(theirs), theirs).decision is Decision.HEAL
    answer = run.ledger.next_now(1, "b", theirs.token)
    assert answer is not None and answer["status"] == "ready" and answer["heal"]
    assert run.ledger.next_now(1, "a", mine.token)["heal"] is False
    assert run.ledger.next_now(0, "c", GENESIS)["heal"] is False
    assert [c.record.token for c in run.journal.commits_after(0)] == [mine.token]


# Numeric refusals ---------------------------------------------------------------------------


def refuse(run: Run, who: Member, batch_id: int, attempt: str, numeric: bool = True) -> str:
    return run.ledger.refused(who, batch_id, "nan in grad", numeric=numeric, attempt=attempt)


@pytest.mark.scenario("N-1")
def test_numeric_refusals_stop_the_run(run: Run) -> None:
    run.ledger.attach(A), run.ledger.attach(B)
    seal(run.journal)
    for attempt in "12":
        for who in (A, B):
            assert refuse(run, who, 1, attempt) == "retry"
            assert refuse(run, who, 1, attempt) == "retry"  # the reply was lost
    assert refuse(run, A, 1, "x", numeric=False) == "retry"
    assert refuse(run, A, 1, "3") == "stop"
    assert refuse(run, B, 1, "3") == "stop"
    assert run.ledger.outcome is not None and run.ledger.outcome.kind == "failed"
    assert "refused 3 times on numeric grounds: nan in grad" in run.ledger.outcome.reason
    verdict = run.begin(A, START)
    assert verdict.decision is Decision.STOP and verdict.outcome == "failed"
    assert len(run.kinds(Kind.FAULT)) == 1


def test_numeric_refusals_drop_the_batch_where_so_set(tmp_path: Path) -> None:
    run = Run(tmp_path, {"at_numeric_limit": "drop", "max_numeric_refusals": 2})
    run.ledger.attach(A)
    seal(run.journal), seal(run.journal)
    assert [refuse(run, A, 1, x) for x in "12"] == ["retry", "drop"]
    assert refuse(run, B, 1, "2") == "retry"  # begin tells it of the next batch
    assert run.begin(A, START).batch.batch_id == 2  # type: ignore[union-attr]
    (dropped,) = run.kinds(Kind.DROP)
    assert dropped["batch"] == 1 and dropped["groups"] == [1, 2]
    run.journal.close()


# The end ------------------------------------------------------------------------------------


async def test_the_outcome_ends_long_polls(run: Run) -> None:
    waiting = asyncio.create_task(run.ledger.next(0, "a", 30.0))
    await asyncio.sleep(0.05)
    run.ledger.set_outcome("done", "trained all steps")
    run.ledger.set_outcome("failed", "too late to say so")
    answer = await asyncio.wait_for(waiting, 2.0)
    assert answer == {"status": "stop", "reason": "trained all steps", "outcome": "done"}


async def test_a_change_in_another_thread_wakes_waiters(run: Run) -> None:
    waiting = asyncio.create_task(run.ledger.changed(30.0))
    await asyncio.sleep(0.05)
    await asyncio.to_thread(issue, run.journal, 1)
    await asyncio.wait_for(waiting, 2.0)


def test_no_step_beyond_the_last_one_is_begun(tmp_path: Path) -> None:
    """A run that is resumed with fewer steps finds batches sealed beyond its end."""
    run = Run(tmp_path, options={"last_step": 1})
    for _ in range(3):
        seal(run.journal)
    done = run.commit()
    assert run.ledger.next_now(1, A.uuid) == {"status": "waiting", "duties": [PUBLISH]}
    assert run.begin(A, after(done), done).decision is Decision.WAIT
    assert run.journal.sealed_ahead == 2
    assert run.journal.audit().problems == []
