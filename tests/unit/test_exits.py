"""Early ends: the pure rule, and the ledger that applies it once for all."""

import json

import pytest
from journal_cases import make_ledger, member, record, seal

from torchtitan_rl_ft.journal.exits import ExitNote, ExitRules, Exits, RequestFile, decide_exit
from torchtitan_rl_ft.journal.protocol import PUBLISH, SAVE, State
from torchtitan_rl_ft.journal.records import GENESIS, Decision
from torchtitan_rl_ft.journal.store import Journal
from torchtitan_rl_ft.observability.events import EventList, Kind

A, B, C = member("a", 0), member("b", 1), member("c", 2)
START = State(0, GENESIS)


def decided(rules, step=7, last_step=20, elapsed_s=0.0, asked=None, requested=lambda: False):
    return decide_exit(
        rules,
        step=step,
        last_step=last_step,
        elapsed_s=elapsed_s,
        asked=asked,
        requested=requested,
    )


@pytest.mark.parametrize(
    ("rules", "now", "why"),
    [
        (ExitRules(), {}, None),
        (ExitRules(), {"asked": "SIGTERM"}, "SIGTERM"),
        (ExitRules(), {"asked": "SIGTERM", "step": 20}, "SIGTERM"),
        (ExitRules(interval=7), {}, "step 7: every 7 steps"),
        (ExitRules(interval=7), {"step": 8}, None),
        (ExitRules(interval=10), {"step": 20}, None),  # the natural end
        (ExitRules(interval=10), {"step": 20, "last_step": None}, "step 20: every 10 steps"),
        (ExitRules(duration_s=6.0), {"elapsed_s": 5.9}, None),
        (ExitRules(duration_s=6.0), {"elapsed_s": 6.0}, "0.10 of 0.1 minutes are over"),
        (ExitRules(autoresume_interval=7), {}, None),
        (
            ExitRules(autoresume_interval=7),
            {"requested": lambda: True},
            "a request to stop was found at step 7",
        ),
    ],
)
def test_why_a_job_stops_after_a_commit(rules, now, why):
    assert decided(rules, **now) == why


def test_a_request_is_looked_for_at_the_interval_only():
    looks = []
    rules = ExitRules(autoresume_interval=5)
    for step in range(1, 12):
        decided(rules, step=step, requested=lambda s=step: bool(looks.append(s)))
    assert looks == [5, 10]


class Run:
    """A ledger on a file; the clock is the test's."""

    def __init__(self, folder, rules=None, last_step=20):
        self.folder, self.rules, self.last_step = folder, rules or ExitRules(), last_step
        self.elapsed_s, self.dead, self.events = 0.0, set(), EventList()
        self.request = RequestFile(folder / "request")
        self.open("job-1")

    def open(self, attempt):
        self.journal = Journal.open(self.folder / "journal", events=self.events)
        exits = Exits(
            self.rules,
            elapsed_s=lambda: self.elapsed_s,
            request=self.request,
            note=ExitNote(self.folder / "exit.json", attempt),
        )
        self.ledger = make_ledger(
            self.journal,
            self.folder,
            self.events,
            exits=exits,
            last_step=self.last_step,
            gone=lambda m: m.uuid in self.dead,
        )

    def reopen(self, attempt):
        self.journal.close()
        self.open(attempt)

    def tip(self):
        return self.journal.tip

    def next(self, who, state=None):
        state = state or self.tip()
        return self.ledger.next_now(state.step, who.uuid, state.token)

    def waits(self, who):
        return (self.next(who) or {"status": "waiting"})["status"] == "waiting"

    def commit(self, *who, nonce=1):
        """Everybody reports the head's commit; the duties granted to the first."""
        if self.journal.head() is None:
            seal(self.journal)
        done = record(self.journal, nonce)
        return [self.ledger.committed(m, done, {"loss": 0.5}) for m in who][0][2]

    def attached(self, *who):
        for m in who:
            self.ledger.attach(m)
            self.ledger.begin(m, self.tip(), None, participants=1, quorum_id=1)
        return self

    def stops(self):
        return [e for e in self.events.events if e["kind"] is Kind.STOP]


@pytest.fixture
def make(tmp_path):
    runs = []

    def made(*args, **keys):
        runs.append(Run(tmp_path, *args, **keys))
        return runs[-1]

    yield made
    for run in runs:
        assert run.journal.audit().problems == []
        run.journal.close()


@pytest.mark.row("H3")
def test_at_the_interval_every_group_stops_and_one_saves(make):
    run = make(ExitRules(interval=2)).attached(A, B)
    run.commit(A, B)
    assert run.ledger.outcome is None
    assert run.commit(A, B) == []  # a policy that nobody is left to use is not published
    for who in (A, B):
        answer = run.next(who)
        assert (answer["status"], answer["outcome"]) == ("stop", "requeue")
    assert run.ledger.duty(A, SAVE, run.tip())[0]
    assert not run.ledger.duty(B, SAVE, run.tip())[0]
    assert not run.ledger.tip_saved()
    run.ledger.duty_done(A, SAVE, run.tip(), {"path": "step-2"})
    assert run.ledger.tip_saved()
    assert [e["step"] for e in run.stops()] == [2]


def test_the_next_job_stops_at_the_next_multiple_and_the_last_step_is_the_end(make):
    run = make(ExitRules(interval=2), last_step=4).attached(A)
    run.commit(A)
    run.commit(A)
    assert run.ledger.outcome.kind == "requeue"
    run.reopen("job-2")
    assert run.ledger.outcome is None
    run.attached(B)
    run.commit(B)
    run.commit(B)
    assert run.ledger.outcome is None  # step 4 of 4: done, not to be started again


@pytest.mark.row("H2")
def test_time_is_the_ledgers_and_the_same_for_all(make):
    run = make(ExitRules(duration_s=6.0)).attached(A, B)
    run.elapsed_s = 5.99
    run.commit(A, B)
    assert run.waits(A)
    assert run.waits(B)
    seal(run.journal)
    assert run.next(A)["status"] == "ready"
    run.elapsed_s = 60.0
    assert run.next(B)["status"] == "ready"  # not in the middle of a step
    run.commit(A, B)
    assert {run.next(who)["outcome"] for who in (A, B)} == {"requeue"}


@pytest.mark.row("H2")
def test_time_that_is_over_between_two_steps_is_not_waited_for_a_batch(make):
    run = make(ExitRules(duration_s=6.0)).attached(A)
    run.elapsed_s = 60.0
    assert run.waits(A)  # a job that is started again and again makes one step at least
    run.commit(A)
    assert run.next(A)["outcome"] == "requeue"
    run.elapsed_s = 0.0
    run.reopen("job-2")
    run.attached(B)
    run.commit(B)
    assert run.waits(B)
    run.elapsed_s = 60.0
    assert run.next(B)["outcome"] == "requeue" and run.tip().step == 2


@pytest.mark.row("H7")
def test_a_request_is_honoured_at_the_interval_once(make, tmp_path):
    run = make(ExitRules(autoresume_interval=2)).attached(A)
    run.commit(A)
    (tmp_path / "request").touch()
    assert run.waits(A)
    run.commit(A)
    assert run.next(A)["outcome"] == "requeue"
    assert not (tmp_path / "request").exists()
    run.reopen("job-2")
    run.attached(B)
    for _ in range(2):
        run.commit(B)
    assert run.ledger.outcome is None and run.tip().step == 4


@pytest.mark.row("H1")
def test_asked_between_two_steps_the_job_stops_at_once(make):
    run = make().attached(A)
    run.commit(A)
    assert run.waits(A)
    assert run.ledger.ask_exit("SIGTERM") == "exit"
    assert run.next(A)["outcome"] == "requeue"


@pytest.mark.row("H1")
def test_asked_in_the_middle_of_a_step_the_job_stops_after_it(make):
    run = make().attached(A, B)
    seal(run.journal)
    assert run.next(A)["status"] == run.next(B)["status"] == "ready"
    run.ledger.ask_exit("SIGTERM")
    assert run.ledger.exit_asked and run.ledger.outcome is None
    verdict = run.ledger.begin(A, run.tip(), None, participants=2, quorum_id=1)
    assert verdict.decision is Decision.GO
    run.commit(A, B)
    assert run.ledger.outcome.kind == "requeue" and run.tip().step == 1


def test_asked_in_a_step_that_is_refused_or_dies_the_job_stops_before_it(make):
    run = make().attached(A, B)
    seal(run.journal)
    run.next(A), run.next(B)
    run.ledger.ask_exit("SIGTERM")
    run.dead.add("b")
    assert run.next(A)["outcome"] == "requeue"  # back at the boundary, nobody else in the step
    assert run.ledger.refused(A, 1, "nan", numeric=True, attempt="x") == "retry"


def test_a_commit_whose_report_was_lost_counts(make):
    run = make(ExitRules(interval=1)).attached(A)
    seal(run.journal)
    seal(run.journal)
    done = record(run.journal)
    state = State(done.step, done.token)
    verdict = run.ledger.begin(A, state, done, participants=1, quorum_id=1)
    assert verdict.decision is Decision.STOP and verdict.outcome == "requeue"


@pytest.mark.row("H1")
def test_one_group_leaves_alone_while_enough_stay(make):
    run = make(ExitRules(min_replica_size=1)).attached(A, B)
    run.commit(A, B)
    assert run.ledger.ask_exit("SIGTERM", 1) == "leave"
    assert run.ledger.ask_exit("SIGTERM", 1) == "leave"  # again: nothing more
    answer = run.next(B)
    assert (answer["status"], answer["outcome"]) == ("stop", "left")
    assert run.waits(A) and run.ledger.outcome is None
    assert [e["replica_id"] for e in run.stops()] == [1]
    again = member("b2", 1)  # the group comes back
    run.attached(again)
    assert run.waits(again)


def test_a_group_in_a_step_leaves_after_it(make):
    run = make().attached(A, B)
    seal(run.journal)
    run.next(A), run.next(B)
    run.ledger.ask_exit("SIGTERM", 1)
    assert run.ledger.begin(B, run.tip(), None, participants=2, quorum_id=1).decision is Decision.GO
    run.commit(A, B)
    assert run.next(B)["outcome"] == "left"


@pytest.mark.row("H1")
@pytest.mark.parametrize(("groups", "minimum"), [(1, 1), (2, 2), (3, 3)])
def test_too_few_would_stay_so_the_job_stops(make, groups, minimum):
    who = (A, B, C)[:groups]
    run = make(ExitRules(min_replica_size=minimum)).attached(*who)
    run.commit(*who)
    assert run.ledger.ask_exit("SIGTERM", 0) == "exit"
    assert {run.next(m)["outcome"] for m in who} == {"requeue"}


def test_when_all_groups_are_told_to_leave_the_last_one_stops_the_job(make):
    """A scheduler that signals every process of a job step."""
    run = make().attached(A, B)
    run.commit(A, B)
    assert run.ledger.ask_exit("SIGTERM", 0) == "leave"
    assert run.ledger.ask_exit("SIGTERM", 1) == "exit"
    assert {run.next(m)["outcome"] for m in (A, B)} == {"requeue"}
    assert run.ledger.duty(B, SAVE, run.tip())[0]


def test_a_group_that_still_heals_holds_nothing_to_stay_with(make):
    run = make().attached(A)
    for _ in range(3):
        run.commit(A)
    run.ledger.attach(B)
    assert run.ledger.ask_exit("SIGTERM", 0) == "exit"


def test_at_the_end_only_the_tip_is_saved_while_somebody_holds_it(make):
    run = make().attached(A, B)
    run.commit(A, B)
    behind = run.tip()
    run.commit(A)
    run.ledger.ask_exit("SIGTERM")
    assert not run.ledger.duty(B, SAVE, behind)[0]
    run.dead.add("a")
    assert run.ledger.duty(B, SAVE, behind)[0]


def test_a_ledger_that_is_killed_after_the_decision_stands_by_it(make, tmp_path):
    run = make(ExitRules(interval=1)).attached(A)
    run.commit(A)
    run.reopen("job-1")
    assert run.ledger.outcome.kind == "requeue"
    assert json.loads((tmp_path / "exit.json").read_text())["step"] == 1
    run.reopen("job-2")
    assert run.ledger.outcome is None


def test_nothing_is_published_once_the_job_stops(make):
    run = make(ExitRules(interval=1)).attached(A)
    run.commit(A)
    assert PUBLISH not in (run.next(A).get("duties") or [])
