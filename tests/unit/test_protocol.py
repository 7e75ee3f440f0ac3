"""Each rule of journal/protocol.py on plain views."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchtitan_rl_ft.journal.protocol import (
    PUBLISH,
    SAVE,
    Adopt,
    AttachAnswer,
    BatchRef,
    CheckpointRef,
    DutyView,
    LedgerView,
    MemberView,
    Outcome,
    Refusals,
    Rewind,
    State,
    decide_attach,
    decide_begin,
    decide_commit,
    decide_duty,
    decide_next,
    decide_refused,
    publish_due,
)
from torchtitan_rl_ft.journal.records import GENESIS, CommitRecord, Decision

TOKENS = (GENESIS, "t1", "t2", "t3")
PLAN = {k: BatchRef(k, f"d{k}") for k in range(1, 6)}
VIEW = LedgerView(tokens=TOKENS, plan=PLAN, known_history=True)  # at step 3, batch 4 is next
FRESH = State(0, GENESIS)


def commit(step: int, prev: str, token: str, batch: int | None = None) -> CommitRecord:
    b = batch or step
    return CommitRecord(step, b, f"d{b}", prev, token, participants=2, quorum_id=1)


def lives(uuid: str, step: int | None = None, token: str = "", alive: bool = True) -> MemberView:
    return MemberView(uuid, alive, None if step is None else State(step, token))


def checkpoint(step: int, token: str) -> CheckpointRef:
    return CheckpointRef(step, token, f"step-{step}")


# begin --------------------------------------------------------------------------------------


def test_at_the_tip_goes() -> None:
    verdict = decide_begin(VIEW, "a", State(3, "t3"), commit(3, "t2", "t3"))
    assert (verdict.decision, verdict.batch, verdict.effects) == (Decision.GO, PLAN[4], ())


def test_the_first_step_of_a_run_goes() -> None:
    view = LedgerView(plan=PLAN)
    assert decide_begin(view, "a", FRESH, None).batch == PLAN[1]


def test_waits_while_the_batch_is_not_sealed() -> None:
    view = replace(VIEW, plan={k: PLAN[k] for k in (1, 2, 3)})
    verdict = decide_begin(view, "a", State(3, "t3"), None)
    assert verdict.decision is Decision.WAIT and "step 4 is not sealed" in verdict.reason


def test_a_lost_report_is_adopted() -> None:
    tail = commit(4, "t3", "t4")
    verdict = decide_begin(VIEW, "a", State(4, "t4"), tail)
    assert (verdict.decision, verdict.batch) == (Decision.GO, PLAN[5])
    assert verdict.effects == (Adopt(tail),)


def test_a_lost_report_is_adopted_also_when_there_is_nothing_to_train_next() -> None:
    view = replace(VIEW, plan={k: PLAN[k] for k in range(1, 5)})
    tail = commit(4, "t3", "t4")
    verdict = decide_begin(view, "a", State(4, "t4"), tail)
    assert verdict.decision is Decision.WAIT and verdict.effects == (Adopt(tail),)
    over = replace(view, outcome=Outcome("drained", "signal"))
    verdict = decide_begin(over, "a", State(4, "t4"), tail)
    assert verdict.decision is Decision.STOP and verdict.effects == (Adopt(tail),)
    assert verdict.outcome == "drained"


@pytest.mark.parametrize(
    "tail",
    [
        None,
        commit(4, "tX", "t4"),  # continues another history
        commit(4, "t3", "tY"),  # not the record of this state
        commit(4, "t3", "t4", batch=5),  # another batch
        commit(5, "t3", "t4"),
    ],
)
def test_ahead_without_a_chain_heals(tail: CommitRecord | None) -> None:
    view = replace(VIEW, members=[lives("b", 3, "t3")])
    verdict = decide_begin(view, "a", State(4, "t4"), tail)
    assert verdict.decision is Decision.HEAL and "heal from b" in verdict.reason


def test_another_token_heals_from_a_living_holder() -> None:
    view = replace(VIEW, members=[lives("a", 3, "fork"), lives("b", 2, "t2")])
    assert decide_begin(view, "a", State(3, "fork"), None).decision is Decision.HEAL


@pytest.mark.parametrize(
    "other",
    [
        lives("b", 3, "t3", alive=False),
        lives("b", 3, "fork2"),
        lives("b", 0, GENESIS),  # fresh: nothing to heal from
    ],
)
def test_another_token_without_a_holder_restores(other: MemberView) -> None:
    view = replace(VIEW, members=[other], checkpoints=[checkpoint(2, "t2")])
    verdict = decide_begin(view, "a", State(3, "fork"), None)
    assert (verdict.decision, verdict.checkpoint) == (Decision.RESTORE, checkpoint(2, "t2"))
    assert verdict.effects == ()


def test_another_token_without_holder_or_checkpoint_takes_the_initial_weights() -> None:
    verdict = decide_begin(VIEW, "a", State(3, "fork"), None)
    assert (verdict.decision, verdict.checkpoint) == (Decision.RESTORE, None)


def test_a_trainer_of_another_run_is_stopped() -> None:
    verdict = decide_begin(LedgerView(plan=PLAN), "a", State(3, "t3"), None)
    assert verdict.decision is Decision.STOP and "another run" in verdict.reason
    assert verdict.outcome == "failed"


@pytest.mark.parametrize(
    "other",
    [
        lives("b", 3, "t3"),
        lives("b", 2, "t2"),
        lives("b", 4, "unreported"),  # its report may be on the way
        lives("b"),  # has not spoken since the ledger started
    ],
)
def test_behind_waits_for_a_living_later_holder(other: MemberView) -> None:
    view = replace(VIEW, members=[lives("a", 1, "t1"), other], checkpoints=[checkpoint(3, "t3")])
    for state in (State(1, "t1"), FRESH):
        verdict = decide_begin(view, "a", state, None)
        assert verdict.decision is Decision.WAIT and "b lives" in verdict.reason
        assert verdict.effects == ()


@pytest.mark.parametrize(
    "other",
    [
        lives("b", 3, "t3", alive=False),
        lives("b", 3, "fork"),
        lives("b", 1, "t1"),
        lives("b", 0, GENESIS),
        lives("a", 3, "t3"),  # the caller's own older beat
    ],
)
def test_behind_and_alone_rewinds(other: MemberView) -> None:
    view = replace(VIEW, members=[other], checkpoints=[checkpoint(3, "t3")])
    verdict = decide_begin(view, "a", State(1, "t1"), commit(1, GENESIS, "t1"))
    assert (verdict.decision, verdict.batch) == (Decision.GO, PLAN[2])
    assert verdict.effects == (Rewind(1),)


def test_behind_the_freed_batches_cannot_rewind() -> None:
    view = replace(VIEW, freed_through=2, checkpoints=[checkpoint(2, "t2")])
    verdict = decide_begin(view, "a", State(1, "t1"), None)
    assert (verdict.decision, verdict.checkpoint) == (Decision.RESTORE, checkpoint(2, "t2"))
    assert decide_begin(view, "a", State(2, "t2"), None).effects == (Rewind(2),)


def test_a_fresh_state_restores_the_newest_complete_checkpoint() -> None:
    broken = {"step-3": "no marker"}
    view = replace(
        VIEW,
        checkpoints=[checkpoint(3, "fork"), checkpoint(3, "t3"), checkpoint(2, "t2")],
        why_incomplete=lambda c: broken.get(c.path),
    )
    verdict = decide_begin(view, "a", FRESH, None)
    assert (verdict.decision, verdict.checkpoint) == (Decision.RESTORE, checkpoint(2, "t2"))
    assert "superseded history" in verdict.reason and "no marker" in verdict.reason
    assert verdict.effects == ()


@pytest.mark.row("E6")
def test_a_fresh_state_with_nothing_left_replays_from_the_start() -> None:
    verdict = decide_begin(VIEW, "a", FRESH, None)
    assert (verdict.decision, verdict.batch) == (Decision.GO, PLAN[1])
    assert verdict.effects == (Rewind(0),)


def test_a_fresh_state_with_its_batches_freed_and_no_checkpoint_is_stopped() -> None:
    view = replace(VIEW, freed_through=2, checkpoints=[], members=[])
    verdict = decide_begin(view, "a", FRESH, None)
    assert verdict.decision is Decision.STOP and "up to step 2 were freed" in verdict.reason


def test_nothing_begins_after_the_end() -> None:
    view = replace(VIEW, outcome=Outcome("done", "all steps"))
    for state in (State(3, "t3"), State(1, "t1"), State(9, "fork")):
        verdict = decide_begin(view, "a", state, None)
        assert verdict.decision is Decision.STOP
        assert (verdict.outcome, verdict.reason, verdict.effects) == ("done", "all steps", ())


# attach -------------------------------------------------------------------------------------


def test_attach() -> None:
    saved = replace(VIEW, checkpoints=[checkpoint(3, "t3"), checkpoint(1, "t1")])
    assert decide_attach(LedgerView(), "a") == AttachAnswer("fresh")
    assert decide_attach(VIEW, "a") == AttachAnswer("fresh")
    assert decide_attach(saved, "a") == AttachAnswer("restore", checkpoint(3, "t3"))
    torn = replace(saved, why_incomplete=lambda c: "torn" if c.step == 3 else None)
    assert decide_attach(torn, "a") == AttachAnswer(
        "restore", checkpoint(1, "t1"), ("step-3: torn",)
    )
    living = replace(saved, members=[lives("b", 2, "t2")])
    assert decide_attach(living, "a") == AttachAnswer("fresh")
    fresh_peer = replace(saved, members=[lives("b", 0, GENESIS)])
    assert decide_attach(fresh_peer, "a").start == "restore"


# committed ----------------------------------------------------------------------------------


@pytest.mark.row("E5")
def test_commit_reports() -> None:
    assert decide_commit(VIEW, commit(4, "t3", "t4"))[0] == "committed"
    assert decide_commit(VIEW, commit(3, "t2", "t3"))[0] == "confirmed"
    assert decide_commit(VIEW, commit(1, GENESIS, "t1"))[0] == "confirmed"
    status, why = decide_commit(VIEW, commit(3, "t2", "fork"))
    assert status == "refused" and "the ledger is at step 3" in why
    status, why = decide_commit(VIEW, commit(4, "fork", "t4"))
    assert status == "refused" and "it continues fork, the tip is t3" in why
    status, why = decide_commit(VIEW, commit(4, "t3", "t4", batch=5))
    assert status == "refused" and "batch 5 is not the batch of step 4" in why
    assert decide_commit(VIEW, commit(6, "t5", "t6"))[0] == "refused"


def test_next() -> None:
    assert decide_next(VIEW, 3) == decide_next(VIEW, 0) == PLAN[4]
    assert decide_next(VIEW, 4) == PLAN[5]
    waiting = replace(VIEW, plan={k: PLAN[k] for k in (1, 2, 3)}, members=[lives("a", 3, "t3")])
    assert decide_next(waiting, 3) is None and decide_next(waiting, 0) is None
    assert decide_next(LedgerView(), 0) is None
    unreported = replace(VIEW, plan={k: PLAN[k] for k in (1, 2, 3, 4)})
    assert decide_next(unreported, 4) == PLAN[4]  # begin will adopt it


@pytest.mark.parametrize(
    ("other", "waits"),
    [
        (lives("b", 3, "t3"), True),
        (lives("b"), True),
        (lives("b", 4, "unreported"), True),
        (lives("b", 3, "t3", alive=False), False),
        (lives("b", 3, "fork"), False),
        (lives("b", 2, "t2"), False),
    ],
)
def test_when_the_tip_died_unpublished_the_rest_need_not_wait(
    other: MemberView, waits: bool
) -> None:
    view = replace(VIEW, plan={k: PLAN[k] for k in (1, 2, 3)})
    view = replace(view, members=[lives("a", 1, "t1"), other])
    assert decide_next(view, 1) == (None if waits else PLAN[3])


# duties -------------------------------------------------------------------------------------


def held(holder: str = "b", alive: bool = True, left_s: float = 30, done: bool = False) -> DutyView:
    return DutyView(holder, alive, left_s, done)


@pytest.mark.parametrize(
    ("kind", "state", "duty", "granted", "reason"),
    [
        (PUBLISH, State(3, "t3"), None, True, "granted"),
        (PUBLISH, State(3, "t3"), held("a"), True, "held by the caller"),
        (PUBLISH, State(3, "t3"), held(), False, "held by b"),
        (PUBLISH, State(3, "t3"), held(alive=False), True, "it is dead"),
        (PUBLISH, State(3, "t3"), held(left_s=0), True, "its lease is over"),
        (PUBLISH, State(3, "t3"), held(alive=False, done=True), False, "done"),
        (PUBLISH, State(2, "t2"), None, False, "overtaken"),
        (SAVE, State(2, "t2"), None, True, "granted"),
        (SAVE, State(3, "fork"), None, False, "not in the ledger's history"),
        ("paint", State(3, "t3"), None, False, "no such duty"),
    ],
)
def test_duty(kind: str, state: State, duty: DutyView | None, granted: bool, reason: str) -> None:
    answer, why = decide_duty(VIEW, kind, state, "a", duty)
    assert answer is granted and reason in why


def test_publish_is_offered_to_who_can_do_it() -> None:
    tip = State(3, "t3")
    assert publish_due(VIEW, tip, "a", None)
    assert publish_due(VIEW, tip, "a", held("a"))  # waiting, so its own try has failed
    assert publish_due(VIEW, tip, "a", held(alive=False))
    assert not publish_due(VIEW, tip, "a", held())
    assert not publish_due(VIEW, tip, "a", held("a", done=True))
    assert not publish_due(VIEW, State(2, "t2"), "a", None)


# refused ------------------------------------------------------------------------------------


def refuse(before: Refusals, uuid: str = "a", members: str = "ab", numeric: bool = True):
    return decide_refused(
        before,
        batch_id=4,
        uuid=uuid,
        members=frozenset(members),
        numeric=numeric,
        limit=3,
        at_limit="drop",
    )


@pytest.mark.scenario("N-1")
def test_numeric_refusals_are_counted_per_attempt_not_per_group() -> None:
    counts, reason = Refusals(), ""
    for attempt in range(3):
        for uuid in "ab":
            counts, action, reason = refuse(counts, uuid)
            assert action == ("drop" if attempt == 2 else "retry"), (attempt, uuid)
    assert "batch 4 was refused 3 times" in reason


def test_other_refusals_do_not_count() -> None:
    counts = Refusals()
    for _ in range(9):
        counts, action, _ = refuse(counts, numeric=False)
        assert action == "retry"
    assert counts.counts == {}


def test_another_member_starts_the_count_anew() -> None:
    counts, _, _ = refuse(Refusals())
    counts, _, _ = refuse(counts)
    counts, action, _ = refuse(counts, members="abc")
    assert action == "retry" and counts.counts == {"a": 1}
    _, action, _ = refuse(replace(counts, batch_id=3))
    assert action == "retry"
