"""The step protocol of one group on scripted seams: what is done on each answer, in what order."""

from types import SimpleNamespace

import numpy as np
import pytest
from test_policy_loss import SAMPLES, sealed

from torchtitan_rl_ft.journal.checkpoints import CheckpointDamaged
from torchtitan_rl_ft.journal.client import BeginAnswer, CommitAnswer, Offer, Ready, Stop
from torchtitan_rl_ft.journal.protocol import PUBLISH, AttachAnswer, BatchRef, CheckpointRef, State
from torchtitan_rl_ft.journal.records import Decision
from torchtitan_rl_ft.observability.events import EventList, Kind
from torchtitan_rl_ft.replica.group import Quorum
from torchtitan_rl_ft.rpc.client import RoleUnreachable
from torchtitan_rl_ft.trainer import stepper as module
from torchtitan_rl_ft.trainer.attempt import Result
from torchtitan_rl_ft.trainer.coverage import Outcome
from torchtitan_rl_ft.trainer.group_link import GroupLink
from torchtitan_rl_ft.trainer.lineage import Lineage
from torchtitan_rl_ft.trainer.presence import PhaseClock
from torchtitan_rl_ft.trainer.refusals import TooManyRefusals
from torchtitan_rl_ft.trainer.stepper import HealFailed, NumericStop, RunStopped, Seams, Stepper

REF = BatchRef(1, "cd" * 32)
OWNERS = np.arange(len(SAMPLES)) % 2
OUTCOME = Outcome(groups=2, nonce=11, nonfinite=0, loss=0.5, stats=np.ones(6), owners=OWNERS)
COMMITTED = Result(True, "", False, OUTCOME, 0.25)
REFUSED = Result(False, "a peer died", False, None, 0.25)
NOT_FINITE = Result(False, "not finite", True, OUTCOME, float("nan"))
GO = BeginAnswer(Decision.GO, "", REF, None, None)


class Script:
    """Records every call of every seam in one list; answers come from queues."""

    def __init__(self, **answers):
        self.calls, self.answers = [], {k: list(v) for k, v in answers.items()}

    def seam(self, name, *methods, **defaults):
        def make(method):
            key = f"{name}.{method}"

            def call(*args, **kwargs):
                self.calls.append(key)
                queue = self.answers.get(key)
                answer = queue.pop(0) if queue else defaults.get(method)
                if isinstance(answer, Exception) and method != "errored":
                    raise answer
                return answer

            return call

        return SimpleNamespace(**{m: make(m) for m in (*methods, *defaults)})

    def count(self, key):
        return self.calls.count(key)


def build(monkeypatch, participants=2, max_refusals=3, every_group_offers=False, **answers):
    monkeypatch.setattr(module, "RETRY_DELAY_S", 0.0)
    script = Script(**{k.replace("__", "."): v for k, v in answers.items()})
    events = EventList()
    quorum = Quorum(participants, 0, 5, ["a:1", "b:2"][:participants])
    publisher = script.seam("publisher", "offer", publish=7)
    publisher.every_group_offers = every_group_offers
    seams = Seams(
        group=script.seam("group", "set_step", start_quorum=quorum, errored=None),
        link=GroupLink(),
        ledger=script.seam(
            "ledger",
            "duty_done",
            "attach",
            "unusable",
            next_batch=Ready(1, REF),
            batch=sealed(SAMPLES),
            begin=GO,
            committed=CommitAnswer("committed", "", ()),
            duty=(True, ""),
            refused="retry",
            dead_groups=set(),
        ),
        beats=script.seam("beats", "update"),
        attempt=script.seam("attempt", "abstain", run=COMMITTED, recorded=0, board=(0, 0)),
        publisher=publisher,
        clock=PhaseClock(events),
        events=events,
        model=script.seam("model", "restore", "seed_step", "discard", "committed", update={}),
        numbers=script.seam("numbers", committed={}, refused=False),
    )
    lineage = Lineage()
    made = Stepper(seams, lineage, max_refusals=max_refusals, batch_wait_timeout_s=5.0)
    return made, lineage, script, events


def kinds(events):
    return [e["kind"] for e in events.events]


def test_a_commit_updates_then_reports_and_grows_the_lineage(monkeypatch):
    made, lineage, script, _ = build(monkeypatch)
    made.step()
    assert lineage.step == 1 and lineage.tail.prev_token == "genesis"
    assert lineage.tail.token == lineage.token
    order = [c for c in script.calls if c in ("attempt.run", "model.update", "ledger.committed")]
    assert order == ["attempt.run", "model.update", "ledger.committed"]
    assert lineage.tokens_seen == sealed(SAMPLES).n_tokens


@pytest.mark.row("G4")
def test_a_refused_attempt_leaves_no_trace_and_is_tried_again(monkeypatch):
    made, lineage, script, events = build(monkeypatch, attempt__run=[REFUSED, COMMITTED])
    made.step()
    assert lineage.step == 1
    assert script.count("model.update") == 1
    assert script.count("group.start_quorum") == 2
    assert script.count("ledger.begin") == 2
    assert Kind.REFUSE in kinds(events)


@pytest.mark.scenario("O-2")
def test_a_refusal_names_the_dead_group_and_who_is_gone_then(monkeypatch):
    whole = Quorum(2, 0, 5, ["torchtitan_ft_00000:x", "torchtitan_ft_00001:y"])
    rest = Quorum(1, 0, 6, ["torchtitan_ft_00000:x"])
    made, _, _, events = build(
        monkeypatch,
        attempt__run=[REFUSED, REFUSED, COMMITTED],
        group__start_quorum=[whole, whole, rest],
        ledger__dead_groups=[{1}, RoleUnreachable("rollout")],
    )
    made.step()
    refusals = [e for e in events.events if e["kind"] == Kind.REFUSE]
    assert [e["failing"] for e in refusals] == [["trainer-1"], []]
    assert all("a peer died" in e["cause"] for e in refusals)
    quorums = [e.get("left") for e in events.events if e["kind"] == Kind.QUORUM]
    assert quorums == [None, None, ["trainer-1"]]


@pytest.mark.row("G5")
@pytest.mark.scenario("Q-2")
def test_the_same_members_refusing_again_and_again_end_the_group(monkeypatch):
    made, lineage, script, _ = build(monkeypatch, attempt__run=[REFUSED] * 9)
    with pytest.raises(TooManyRefusals, match="a peer died.*max_commit_retries = 3"):
        made.step()
    assert script.count("attempt.run") == 4 and lineage.step == 0


@pytest.mark.row("I1")
def test_numbers_that_are_not_finite_stop_the_run_when_the_ledger_says_so(monkeypatch):
    made, lineage, script, _ = build(
        monkeypatch, attempt__run=[NOT_FINITE] * 2, ledger__refused=["retry", "stop"]
    )
    with pytest.raises(NumericStop, match="not finite"):
        made.step()
    assert lineage.step == 0 and script.count("model.update") == 0


def test_a_group_on_another_history_abstains_heals_and_does_not_train(monkeypatch):
    heal = BeginAnswer(Decision.HEAL, "another token", None, None, None)
    made, _, script, _ = build(monkeypatch, ledger__begin=[heal, GO])
    made.step()
    first = script.calls[: script.calls.index("group.set_step") + 1]
    assert "attempt.abstain" in first and "attempt.run" not in first


def test_alone_there_is_nobody_to_abstain_for(monkeypatch):
    wait = BeginAnswer(Decision.WAIT, "a living group is ahead", None, None, None)
    made, _, script, _ = build(monkeypatch, participants=1, ledger__begin=[wait, GO])
    made.step()
    assert script.count("attempt.abstain") == 0


def test_restore_loads_what_the_ledger_names(monkeypatch):
    restore = BeginAnswer(Decision.RESTORE, "", None, CheckpointRef(4, "tok", "/x"), None)
    made, _, script, _ = build(monkeypatch, ledger__begin=[restore, GO])
    made.step()
    assert script.calls.index("model.restore") < script.calls.index("group.set_step")
    assert script.calls.index("group.set_step") < script.calls.index("attempt.run")


def test_a_commit_off_the_chain_heals_at_the_next_quorum(monkeypatch):
    refused = CommitAnswer("refused", "does not continue the chain", ())
    made, _, script, _ = build(monkeypatch, ledger__committed=[refused])
    made.step()
    assert script.calls[-1] == "group.set_step"


def test_a_silent_ledger_does_not_lose_the_commit(monkeypatch):
    made, lineage, _, events = build(monkeypatch, ledger__committed=[RoleUnreachable("rollout")])
    made.step()
    assert lineage.step == 1 and lineage.tail is not None
    assert Kind.WARN in kinds(events)


def test_the_granted_duty_of_publishing_is_done_and_told(monkeypatch):
    granted = CommitAnswer("committed", "", (PUBLISH,))
    made, _, script, _ = build(monkeypatch, ledger__committed=[granted])
    made.step()
    assert script.calls.index("publisher.publish") < script.calls.index("ledger.duty_done")


@pytest.mark.parametrize("every_group_offers", [True, False])
def test_a_group_without_the_duty_offers_what_it_committed_where_every_group_does(
    monkeypatch, every_group_offers
):
    made, _, script, _ = build(monkeypatch, every_group_offers=every_group_offers)
    made.step()
    assert script.count("publisher.offer") == every_group_offers
    assert script.count("publisher.publish") == 0


def test_what_the_ledger_refused_or_has_not_heard_of_is_not_offered(monkeypatch):
    for answer in (CommitAnswer("refused", "off the chain", ()), RoleUnreachable("rollout")):
        made, _, script, _ = build(monkeypatch, every_group_offers=True, ledger__committed=[answer])
        made.step()
        assert script.count("publisher.offer") == 0


def test_an_offered_duty_is_asked_for_before_it_is_done(monkeypatch):
    made, _, script, _ = build(
        monkeypatch,
        ledger__next_batch=[Offer((PUBLISH,)), Offer((PUBLISH,)), Ready(1, REF)],
        ledger__duty=[(False, "held by another"), (True, "")],
    )
    made.step()
    assert script.count("publisher.publish") == 1


def test_a_lost_publish_is_a_fault_event_not_a_crash(monkeypatch):
    made, _, script, events = build(
        monkeypatch,
        ledger__committed=[CommitAnswer("committed", "", (PUBLISH,))],
        publisher__publish=[RoleUnreachable("serving")],
    )
    made.step()
    assert Kind.FAULT in kinds(events) and script.count("ledger.duty_done") == 0


def test_the_end_of_the_run_and_a_failed_heal_are_told_apart(monkeypatch):
    made, _, _, _ = build(monkeypatch, ledger__next_batch=[Stop("done", "6 steps")])
    with pytest.raises(RunStopped) as stopped:
        made.step()
    assert stopped.value.outcome == "done"
    behind = Quorum(2, 1, 5, ["a:1", "b:2"], must_heal=True)
    made, _, script, _ = build(
        monkeypatch, group__start_quorum=[behind], group__errored=[OSError("refused")]
    )
    with pytest.raises(HealFailed, match="refused"):
        made.step()
    assert script.count("ledger.begin") == 0


@pytest.mark.row("E9")
def test_a_checkpoint_that_proves_damaged_is_told_and_the_one_before_is_taken(monkeypatch):
    newer, older = CheckpointRef(4, "t4", "/x4"), CheckpointRef(2, "t2", "/x2")
    skipped = ("/x4: damaged",)
    made, _, script, events = build(
        monkeypatch,
        ledger__attach=[
            (AttachAnswer("restore", newer), State(5, "t5")),
            (AttachAnswer("restore", older, skipped), State(5, "t5")),
        ],
        model__restore=[CheckpointDamaged("a shard is not what was written"), None],
    )
    made.attach()
    assert [c for c in script.calls if c in ("model.restore", "ledger.unusable")] == [
        "model.restore",
        "ledger.unusable",
        "model.restore",
    ]
    assert [e["cause"] for e in events.events if e["kind"] == Kind.WARN] == [
        "checkpoint skipped: /x4: damaged"
    ]


def test_a_group_that_is_not_behind_survives_a_process_group_that_does_not_form(monkeypatch):
    """A joiner died while all connected: that attempt is refused, the next quorum is without it."""
    made, lineage, script, events = build(
        monkeypatch, attempt__run=[REFUSED], group__errored=[OSError("no such peer")]
    )
    made.step()
    assert lineage.step == 1 and script.count("group.start_quorum") == 2
    assert Kind.REFUSE in kinds(events)
