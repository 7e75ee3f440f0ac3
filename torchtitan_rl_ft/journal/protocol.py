"""Who may train what: the exactly-once rules, as pure functions of plain views.

The ledger is the authority on history. History is a chain of commits; a trainer's state is
named by `(step, token)` and is *on the chain* when the chain has that token at that step. A
state also carries its last commit record (its `tail`), so that a lost report can be adopted.

The caller applies the returned effects to the journal before it answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torchtitan_rl_ft.journal.records import GENESIS, CommitRecord, Decision

PUBLISH, SAVE = "publish", "save"


@dataclass(frozen=True)
class State:
    """What a trainer holds: the state after `step` commits, named by `token`."""

    step: int
    token: str

    @property
    def fresh(self) -> bool:
        return self.step == 0


@dataclass(frozen=True)
class BatchRef:
    batch_id: int
    digest: str


@dataclass(frozen=True)
class CheckpointRef:
    step: int
    token: str
    path: str


@dataclass(frozen=True)
class MemberView:
    """A trainer process. `state` is None until it has spoken to this life of the ledger."""

    uuid: str
    alive: bool
    state: State | None = None


OutcomeKind = Literal["done", "failed", "drained", "requeue", "left"]


@dataclass(frozen=True)
class Outcome:
    kind: OutcomeKind
    reason: str


def never_incomplete(checkpoint: CheckpointRef) -> str | None:
    return None


@dataclass(frozen=True)
class LedgerView:
    """What the decisions depend on.

    tokens[k] is the token after k commits on the living chain (tokens[0] is GENESIS); plan maps
    a step to its sealed batch, also beyond the tip; `why_incomplete` says why a checkpoint
    cannot be loaded (None: it can) and is asked only when the answer matters; batches of steps
    up to `freed_through` are gone; `known_history` is True once anything was ever committed.
    """

    tokens: Sequence[str] = (GENESIS,)
    plan: Mapping[int, BatchRef] = field(default_factory=dict)
    members: Sequence[MemberView] = ()
    checkpoints: Sequence[CheckpointRef] = ()  # newest first
    why_incomplete: Callable[[CheckpointRef], str | None] = never_incomplete
    freed_through: int = 0
    known_history: bool = False
    outcome: Outcome | None = None

    @property
    def tip(self) -> State:
        return State(len(self.tokens) - 1, self.tokens[-1])

    @property
    def head(self) -> BatchRef | None:
        """The batch to train next, once it is sealed."""
        return self.plan.get(len(self.tokens))

    def on_chain(self, state: State) -> bool:
        return state.step < len(self.tokens) and self.tokens[state.step] == state.token

    def others(self, uuid: str) -> list[MemberView]:
        return [m for m in self.members if m.alive and m.uuid != uuid]


# Effects ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Adopt:
    """Append a commit whose report was lost."""

    record: CommitRecord


@dataclass(frozen=True)
class Rewind:
    """Supersede all commits after `to_step`; their batches stay planned."""

    to_step: int


Effect = Adopt | Rewind


@dataclass(frozen=True)
class Verdict:
    """The answer to `begin`."""

    decision: Decision
    reason: str
    effects: tuple[Effect, ...] = ()
    batch: BatchRef | None = None  # GO
    checkpoint: CheckpointRef | None = None  # RESTORE; None: the initial weights
    outcome: OutcomeKind | None = None  # STOP


def _stop(outcome: OutcomeKind, reason: str, effects: tuple[Effect, ...] = ()) -> Verdict:
    return Verdict(Decision.STOP, reason, effects, outcome=outcome)


# begin --------------------------------------------------------------------------------------


def decide_begin(view: LedgerView, uuid: str, state: State, tail: CommitRecord | None) -> Verdict:
    """May the process `uuid`, which holds `state`, train the next batch?

    PROTOCOL rules 4 and 5, in this order: a lost report is adopted; the tip goes; a state
    behind waits for a living holder of a later one, else the ledger comes back to it; a state
    of another history heals from a living holder, else restores.
    """
    if continues(view, state, tail):
        assert tail is not None
        adopted = (Adopt(tail),)
        return _go(view, state.step + 1, "a lost report was adopted", adopted)
    if view.outcome is not None:
        return _stop(view.outcome.kind, view.outcome.reason)
    if not view.on_chain(state):
        return _off_chain(view, uuid, state)
    if state.step == view.tip.step:
        return _go(view, state.step + 1, "at the tip")
    if ahead := holders_after(view, uuid, state.step):
        return Verdict(
            Decision.WAIT, f"{ahead[0].uuid} lives and is ahead of step {state.step}: heal from it"
        )
    if state.fresh:
        return _fresh_and_alone(view)
    return _behind_and_alone(view, state)


def continues(view: LedgerView, state: State, tail: CommitRecord | None) -> bool:
    """True when `state` is the tip plus the one commit that `tail` tells of."""
    return (
        tail is not None
        and state == State(tail.step, tail.token)
        and tail.step == view.tip.step + 1
        and tail.prev_token == view.tip.token
        and view.plan.get(tail.step) == BatchRef(tail.batch_id, tail.digest)
    )


def holders_after(view: LedgerView, uuid: str, step: int) -> list[MemberView]:
    """Living others that hold, or may hold, a state of this history later than `step`.

    One that has not spoken since the ledger started counts; so does one just beyond the tip,
    whose report may be on its way: its own `begin` will settle it.
    """

    def later(m: MemberView) -> bool:
        if m.state is None:
            return True
        if m.state.step <= step:
            return False
        return view.on_chain(m.state) or m.state.step == view.tip.step + 1

    return [m for m in view.others(uuid) if later(m)]


def donors(view: LedgerView, uuid: str) -> list[MemberView]:
    """Living others that a process of another history can heal from."""

    def donor(m: MemberView) -> bool:
        if m.state is None:
            return True
        return view.on_chain(m.state) and (not m.state.fresh or view.tip.step == 0)

    return [m for m in view.others(uuid) if donor(m)]


SUPERSEDED = "step {step} of a superseded history"


def newest_complete(view: LedgerView) -> tuple[CheckpointRef | None, list[str]]:
    """The newest checkpoint of this history that can be loaded, and why newer ones cannot."""
    skipped = []
    for checkpoint in view.checkpoints:
        if not view.on_chain(State(checkpoint.step, checkpoint.token)):
            skipped.append(f"{checkpoint.path}: {SUPERSEDED.format(step=checkpoint.step)}")
        elif checkpoint.step < view.freed_through:
            skipped.append(f"{checkpoint.path}: the batches after step {checkpoint.step} are freed")
        elif why := view.why_incomplete(checkpoint):
            skipped.append(f"{checkpoint.path}: {why}")
        else:
            return checkpoint, skipped
    return None, skipped


def _go(view: LedgerView, step: int, reason: str, effects: tuple[Effect, ...] = ()) -> Verdict:
    if view.outcome is not None:
        return _stop(view.outcome.kind, view.outcome.reason, effects)
    batch = view.plan.get(step)
    if batch is None:
        return Verdict(Decision.WAIT, f"the batch of step {step} is not sealed yet", effects)
    return Verdict(Decision.GO, reason, effects, batch=batch)


def _off_chain(view: LedgerView, uuid: str, state: State) -> Verdict:
    what = f"step {state.step} ({state.token[:8]}) is not in the ledger's history"
    if donor := donors(view, uuid):
        return Verdict(Decision.HEAL, f"{what}: heal from {donor[0].uuid}")
    if not view.known_history:
        return _stop(
            "failed",
            f"{what}, which is empty: this trainer belongs to another run, or the journal of "
            "this one was lost",
        )
    return _restore(view, what)


def _fresh_and_alone(view: LedgerView) -> Verdict:
    """A fresh state never takes the history back while something of it is left."""
    verdict = _restore(view, "nothing of this history lives")
    if verdict.decision is Decision.RESTORE and verdict.checkpoint is None:
        why = "nothing of this history lives and no checkpoint is complete: replay from the start"
        return _go(view, 1, why, (Rewind(0),))
    return verdict


def _behind_and_alone(view: LedgerView, state: State) -> Verdict:
    why = f"no living holder of a step after {state.step}"
    if state.step < view.freed_through:
        return _restore(view, f"{why}, and the batches after it are freed")
    return _go(view, state.step + 1, why, (Rewind(state.step),))


def _restore(view: LedgerView, why: str) -> Verdict:
    checkpoint, skipped = newest_complete(view)
    if checkpoint is not None:
        reason = f"{why}: load {checkpoint.path}"
        return Verdict(Decision.RESTORE, "; ".join([reason, *skipped]), checkpoint=checkpoint)
    if view.freed_through > 0:
        text = (
            f"{why}, no checkpoint can be loaded, and the batches up to step "
            f"{view.freed_through} were freed when one was complete"
        )
        return _stop("failed", "; ".join([text, *skipped]))
    return Verdict(Decision.RESTORE, "; ".join([f"{why}: the initial weights", *skipped]))


# attach -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttachAnswer:
    """What a new trainer loads. "fresh": the initial weights; it heals from a living group."""

    start: Literal["fresh", "restore"]
    checkpoint: CheckpointRef | None = None
    skipped: tuple[str, ...] = ()


def decide_attach(view: LedgerView, uuid: str) -> AttachAnswer:
    """Never a checkpoint while a group of this history lives."""
    if view.tip.step == 0 or holders_after(view, uuid, 0):
        return AttachAnswer("fresh")
    checkpoint, skipped = newest_complete(view)
    if checkpoint is None:
        return AttachAnswer("fresh", None, tuple(skipped))
    return AttachAnswer("restore", checkpoint, tuple(skipped))


# committed ----------------------------------------------------------------------------------

CommitStatus = Literal["committed", "confirmed", "refused"]


def decide_commit(view: LedgerView, record: CommitRecord) -> tuple[CommitStatus, str]:
    """The first report of the next step commits it, the same one again confirms it."""
    state = State(record.step, record.token)
    if view.on_chain(state):
        return "confirmed", "already committed"
    if continues(view, state, record):
        return "committed", "continues the tip"
    if record.step != view.tip.step + 1:
        return "refused", f"the ledger is at step {view.tip.step}, this is step {record.step}"
    if record.prev_token != view.tip.token:
        return "refused", f"it continues {record.prev_token[:8]}, the tip is {view.tip.token[:8]}"
    return "refused", f"batch {record.batch_id} is not the batch of step {record.step}"


# next ---------------------------------------------------------------------------------------


def decide_next(view: LedgerView, step: int) -> BatchRef | None:
    """The batch a trainer at `step` may prefetch; None while there is nothing to begin.

    A trainer behind waits for the head batch too: it will heal. Two have something to begin at
    once: one beyond the tip, whose report was lost; and all, when the tip died with its holders
    before its policy was published. No batch will be sealed on that policy, so `begin` has to take
    the history back, or a checkpoint.
    """
    if step > view.tip.step:
        return view.plan.get(step + 1) or view.head
    if view.head is None and view.tip.step > 0 and not tip_lives(view):
        return view.plan[view.tip.step]
    return view.head


def tip_lives(view: LedgerView) -> bool:
    """Does a living process hold, or may it hold, the tip or the step after it?"""
    return any(
        m.state is None or m.state == view.tip or m.state.step == view.tip.step + 1
        for m in view.members
        if m.alive
    )


def must_heal(view: LedgerView, state: State) -> bool:
    """True when `begin` would not take `state`, so that it must not be offered to peers.

    torchft heals towards the largest step, whatever its history: a process that slept through a
    rewind would otherwise spread its superseded state. One beyond the tip is for `begin` to
    judge, by its tail.
    """
    return not view.on_chain(state) and state.step != view.tip.step + 1


# duties -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DutyView:
    """A duty that was granted before."""

    holder: str
    holder_alive: bool
    lease_left_s: float
    done: bool

    @property
    def free(self) -> bool:
        return not self.done and (not self.holder_alive or self.lease_left_s <= 0)


def decide_duty(
    view: LedgerView, kind: str, state: State, uuid: str, duty: DutyView | None
) -> tuple[bool, str]:
    """One holder per (kind, state), until it is done, dead or its lease is over."""
    if kind not in (PUBLISH, SAVE):
        return False, f"no such duty: {kind}"
    if not view.on_chain(state):
        return False, f"step {state.step} ({state.token[:8]}) is not in the ledger's history"
    if kind == PUBLISH and state != view.tip:
        return False, f"overtaken: the ledger is at step {view.tip.step}"
    if kind == SAVE and view.outcome is not None and state != view.tip and tip_lives(view):
        return False, f"the run ends at step {view.tip.step}, which others hold"
    if duty is None:
        return True, "granted"
    if duty.done:
        return False, "done"
    if duty.holder == uuid:
        return True, "held by the caller"
    if duty.free:
        why = "its lease is over" if duty.holder_alive else "it is dead"
        return True, f"taken over from {duty.holder}: {why}"
    return False, f"held by {duty.holder}"


def publish_due(view: LedgerView, state: State, uuid: str, duty: DutyView | None) -> bool:
    """Should `uuid`, which holds `state` and waits, be offered the publish duty?

    Its holder too: one that waits for a batch is not publishing, so its try has failed.
    """
    if state != view.tip or (duty is not None and duty.done):
        return False
    return duty is None or duty.free or duty.holder == uuid


# refused ------------------------------------------------------------------------------------

RefusedAction = Literal["retry", "drop", "stop"]


@dataclass(frozen=True)
class Refusals:
    """Numeric refusals of one batch by each member, while `members` stayed the same."""

    batch_id: int = 0
    members: frozenset[str] = frozenset()
    counts: Mapping[str, int] = field(default_factory=dict)


def decide_refused(
    before: Refusals,
    *,
    batch_id: int,
    uuid: str,
    members: frozenset[str],
    numeric: bool,
    limit: int,
    at_limit: Literal["drop", "stop"],
) -> tuple[Refusals, RefusedAction, str]:
    """A group did not commit `batch_id`. Only numeric causes count, and only while the living
    members are the same: a joiner that comes and goes must not end healthy groups."""
    if before.batch_id != batch_id or before.members != members:
        before = Refusals(batch_id, members)
    if not numeric:
        return before, "retry", "not a numeric cause"
    count = before.counts.get(uuid, 0) + 1
    after = Refusals(batch_id, members, {**before.counts, uuid: count})
    if count < limit:
        return after, "retry", f"numeric refusal {count} of {limit}"
    return after, at_limit, f"batch {batch_id} was refused {count} times on numeric grounds"
