"""The ledger: the journal, who lives, and the exactly-once rules, applied.

The rollout role owns the one instance. Methods are plain calls on its event loop's thread;
`service.py` puts them behind HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torchtitan_rl_ft.journal import protocol
from torchtitan_rl_ft.journal.checkpoint_register import CheckpointRegister
from torchtitan_rl_ft.journal.checkpoints import Found
from torchtitan_rl_ft.journal.duties import LEASE_S, Duties
from torchtitan_rl_ft.journal.exits import LEFT, REQUEUE, Exits
from torchtitan_rl_ft.journal.members import LIVE_TTL_S, Members, process_gone
from torchtitan_rl_ft.journal.protocol import (
    PUBLISH,
    SAVE,
    Adopt,
    AttachAnswer,
    BatchRef,
    CheckpointRef,
    LedgerView,
    Outcome,
    OutcomeKind,
    Refusals,
    Rewind,
    State,
    Verdict,
)
from torchtitan_rl_ft.journal.records import GENESIS, CommitRecord, Decision, Member
from torchtitan_rl_ft.journal.step_metrics import StepMetrics
from torchtitan_rl_ft.journal.store import Journal
from torchtitan_rl_ft.observability.events import EventSink, Kind

RECHECK_S = 0.5  # how soon a long poll notices that a duty's holder has died


class Ledger:
    """Authority on the run's history. See `protocol.py` for the rules."""

    def __init__(
        self,
        journal: Journal,
        *,
        events: EventSink,
        metrics_path: Path,
        why_incomplete: Callable[[CheckpointRef], str | None],
        find_checkpoints: Callable[[], Sequence[Found]] = tuple,
        keep_checkpoints: int = 0,
        last_step: int | None = None,
        max_numeric_refusals: int = 3,
        at_numeric_limit: Literal["drop", "stop"] = "stop",
        publishes: bool = True,
        exits: Exits | None = None,
        lease_s: float = LEASE_S,
        live_ttl_s: float = LIVE_TTL_S,
        of_run: Callable[[], Mapping[str, Any]] = dict,
        mono_s: Callable[[], float] = time.monotonic,
        gone: Callable[[Member], bool] = process_gone,
    ) -> None:
        """`why_incomplete` says why a checkpoint cannot be loaded, `find_checkpoints` which folders
        there are (checkpoints.py), the newest `keep_checkpoints` of which stay (0: all); no step
        beyond `last_step` is begun. Without `publishes` nobody serves policies, so nobody is asked
        to publish one. `exits`: when the job stops early. `of_run`: what each
        line of the metrics tells of the whole run."""
        self.journal = journal
        self._events, self._mono_s = events, mono_s
        self._last_step = last_step
        self._checkpoints = CheckpointRegister(
            journal, flaw=why_incomplete, find=find_checkpoints, keep=keep_checkpoints
        )
        self._checkpoints.begin_after_newest()
        self._max_numeric_refusals = max_numeric_refusals
        self._at_numeric_limit: Literal["drop", "stop"] = at_numeric_limit
        self._publishes = publishes
        self._members = Members(journal.members(), ttl_s=live_ttl_s, mono_s=mono_s, gone=gone)
        self._metrics = StepMetrics(metrics_path, journal, of_run)
        self._metrics.flush()
        self._duties = Duties(journal, self._members, lease_s=lease_s, mono_s=mono_s)
        self._refusals = Refusals()
        # uuid -> (attempt, action)
        self._answered: dict[str, tuple[str, protocol.RefusedAction]] = {}
        self._last_verdict: dict[str, str] = {}
        self._outcome: Outcome | None = None
        self._exits = exits or Exits()
        self._committed: tuple[State, float] | None = None  # the newest, and when
        self._on_published: Callable[[int, float], None] = lambda version, push_s: None
        self._awaited: tuple[str, State] | None = None
        self._pulse = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        journal.on_change(self._notify)
        if (reason := self._exits.settled()) is not None:
            self.set_outcome(REQUEUE, reason)

    # What the rollout role uses -------------------------------------------------------------

    @property
    def outcome(self) -> Outcome | None:
        return self._outcome

    def set_outcome(self, kind: OutcomeKind, reason: str) -> None:
        """The run is over: `next` and `begin` answer stop from now on. The first one stays."""
        if self._outcome is None:
            self._outcome = Outcome(kind, reason)
        self._metrics.flush(final=True)
        self._notify()

    def on_published(self, told: Callable[[int, float], None]) -> None:
        """`told(version, push_s)`: a policy was announced, so many seconds after its commit."""
        self._on_published = told

    # Early ends ---------------------------------------------------------------------------

    @property
    def exit_asked(self) -> bool:
        """The job is to stop at the next step boundary: nothing new is begun."""
        return self._exits.asked is not None

    def ask_exit(self, reason: str, replica_id: int | None = None) -> Literal["exit", "leave"]:
        """The whole job shall stop at the next step boundary or, when enough others hold the
        state, the one group. May be asked again and again. Raises JournalError, OSError."""
        if replica_id is not None and self._ask_leave(replica_id, reason):
            return "leave"
        self._exits.ask(reason)
        self.try_exit()
        self._notify()
        return "exit"

    def _ask_leave(self, replica_id: int, reason: str) -> bool:
        views = {m.uuid: m for m in self._members.views() if m.alive}
        groups: dict[int, set[str]] = {}
        for uuid, view in views.items():
            # One behind: it has voted for the tip, its report is on its way.
            holds = view.state is not None and view.state.step >= self.journal.tip.step - 1
            group = self._members.replica_of(uuid)
            if group == replica_id or holds:
                groups.setdefault(group, set()).add(uuid)
        own = groups.pop(replica_id, set())
        new = any(self._exits.leaves(uuid) is None for uuid in own)
        if not self._exits.ask_leave(own, groups, reason):
            return False
        if new:
            step = self.journal.tip.step
            self._events.emit(Kind.STOP, cause=reason, step=step, replica_id=replica_id)
        return True

    def try_exit(self) -> None:
        """Stop a job that was asked to, or has used its time up, when nobody is in the middle of
        a step."""
        if self._outcome is not None:
            return
        reason = self._exits.due_between_steps(self.journal.tip.step, self._last_step)
        if reason is not None and self._exits.idle(self._members.living()):
            self._requeue(reason)

    def _exit_if_due(self) -> None:
        """After a commit."""
        if self._outcome is None:
            reason = self._exits.due(self.journal.tip.step, self._last_step)
            if reason is not None:
                self._requeue(reason)

    def _requeue(self, reason: str) -> None:
        step = self.journal.tip.step
        self._exits.settle(step, reason)
        self._events.emit(Kind.STOP, cause=reason, step=step)
        self.set_outcome(REQUEUE, reason)

    def tip_saved(self) -> bool:
        """Is there a complete checkpoint of the tip, or nothing to save yet?"""
        tip = self.journal.tip
        return tip.fresh or self._checkpoints.saved(tip)

    def fail(self, reason: str) -> None:
        """The journal itself broke: stop the run without writing any more."""
        if self._outcome is None:
            self._outcome = Outcome("failed", reason)
        self._notify()

    def publish_awaited(self, by: str) -> None:
        """Serving, with the owner `by`, takes no request before that one's trainer has published.
        What was published for the tip earlier is published again, once for each owner: by the
        journal alone nothing would be due."""
        tip = self.journal.tip
        if self._awaited == (by, tip):
            return
        self._awaited = by, tip
        self._duties.reopen(PUBLISH, tip)

    async def changed(self, timeout_s: float) -> None:
        """Return at the next change of journal or outcome, or after `timeout_s`."""
        self._loop = asyncio.get_running_loop()
        pulse = self._pulse
        # Not wait_for: Python 3.11's can lose a cancellation that arrives with the wake-up.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await pulse.wait()

    def _notify(self) -> None:
        """Wake all waiters; also from a thread that used the journal."""
        if self._loop is not None and self._loop.is_running():
            self._loop.call_soon_threadsafe(self._swap_pulse)

    def _swap_pulse(self) -> None:
        self._pulse.set()
        self._pulse = asyncio.Event()

    def _plan(self) -> Mapping[int, BatchRef]:
        """What may be trained: batches that an earlier start of the run sealed for steps beyond
        the present end stay where they are."""
        plan = self.journal.plan
        if self._last_step is None:
            return plan
        end = max(self._last_step, self.journal.tip.step)
        return {step: batch for step, batch in plan.items() if step <= end}

    def view(self) -> LedgerView:
        return LedgerView(
            tokens=self.journal.tokens,
            plan=self._plan(),
            members=self._members.views(),
            checkpoints=self.journal.checkpoints,
            why_incomplete=self._checkpoints.why_incomplete,
            freed_through=self.journal.freed_through,
            known_history=self.journal.known_history,
            outcome=self._outcome,
        )

    # What trainers ask ----------------------------------------------------------------------

    def attach(self, member: Member) -> AttachAnswer:
        """A new process asks what to load."""
        self._checkpoints.note_unreported(self.view().on_chain)
        gone = [*self._members.succeeded_by(member), *self._members.forget_dead()]
        self.journal.forget_members(gone)
        self.journal.add_member(member)
        self._members.holds(member, State(0, GENESIS), "starting")
        answer = protocol.decide_attach(self.view(), member.uuid)
        if protocol.holders_after(self.view(), member.uuid, 0):
            return answer  # it heals from a peer
        return dataclasses.replace(
            answer, skipped=(*answer.skipped, *self._checkpoints.left_behind(answer))
        )

    def unusable(self, member: Member, path: str, reason: str) -> None:
        """A trainer found a checkpoint damaged while it loaded it: it is not offered again."""
        if self._checkpoints.unusable(path, reason):
            self._events.emit(Kind.WARN, cause=f"checkpoint {path}: {reason}", uuid=member.uuid)

    def next_now(self, step: int, uuid: str, token: str = "") -> dict[str, Any] | None:
        """The answer to `next` if there is one yet."""
        self._exits.rests(uuid)
        self.try_exit()
        if self._outcome is not None:
            return {
                "status": "stop",
                "reason": self._outcome.reason,
                "outcome": self._outcome.kind,
            }
        if (reason := self._exits.leaves(uuid)) is not None:
            return {"status": "stop", "reason": reason, "outcome": LEFT}
        view = self.view()
        batch = protocol.decide_next(view, step)
        if batch is not None:
            self._exits.begins(uuid)
            return {
                "status": "ready",
                "batch_id": batch.batch_id,
                "digest": batch.digest,
                "step": self._step_of(batch),
                "heal": bool(token) and protocol.must_heal(view, State(step, token)),
            }
        if duties := self._offers(step, uuid):
            return {"status": "waiting", "duties": duties}
        return None

    async def next(self, step: int, uuid: str, timeout_s: float, token: str = "") -> dict[str, Any]:
        """Long poll for the batch after `step`."""
        end = self._mono_s() + timeout_s
        while True:
            answer = self.next_now(step, uuid, token)
            left = end - self._mono_s()
            if answer is not None:
                return answer
            if left <= 0:
                return {"status": "waiting", "duties": []}
            await self.changed(min(left, RECHECK_S))

    def _step_of(self, batch: BatchRef) -> int:
        plan = self.journal.plan
        return next(step for step in range(len(plan), 0, -1) if plan[step] == batch)

    def _offers(self, step: int, uuid: str) -> list[str]:
        state = self.journal.tip
        if not self._publishes or step != state.step or uuid not in self._members:
            return []
        if not protocol.publish_due(self.view(), state, uuid, self._duties.view(PUBLISH, state)):
            return []
        return [PUBLISH] if self._duties.offer(uuid, state) else []

    def begin(
        self,
        member: Member,
        state: State,
        tail: CommitRecord | None,
        *,
        participants: int,
        quorum_id: int,
    ) -> Verdict:
        """May this process train the next batch?"""
        self._members.holds(member, state, "begin")
        verdict = protocol.decide_begin(self.view(), member.uuid, state, tail)
        for effect in verdict.effects:
            match effect:
                case Adopt(record):
                    self.journal.commit(record, reporter=member.uuid, metrics=None, adopted=True)
                    self._metrics.flush()
                    self._exit_if_due()
                case Rewind(to_step):
                    self.journal.rewind(to_step, reason=verdict.reason, member=member.uuid)
        if verdict.decision is Decision.GO and self._outcome is not None:  # by what was adopted
            verdict = protocol.decide_begin(self.view(), member.uuid, state, tail)
        self._tell(member, state, verdict, participants, quorum_id)
        return verdict

    def _tell(
        self, member: Member, state: State, verdict: Verdict, participants: int, quorum_id: int
    ) -> None:
        """Emit an answer other than GO, once while it stays the same."""
        text = f"{verdict.decision}: {verdict.reason}"
        if verdict.decision is Decision.GO:
            self._last_verdict.pop(member.uuid, None)
        elif self._last_verdict.get(member.uuid) != text:
            self._last_verdict[member.uuid] = text
            self._events.emit(
                Kind.BEGIN,
                cause=verdict.reason,
                step=state.step,
                decision=str(verdict.decision),
                replica_id=member.replica_id,
                uuid=member.uuid,
                token=state.token,
                participants=participants,
                quorum_id=quorum_id,
            )

    def committed(
        self, member: Member, record: CommitRecord, metrics: dict[str, Any]
    ) -> tuple[protocol.CommitStatus, str, list[str]]:
        """A group reports a commit: (status, reason, duties granted to it)."""
        state = State(record.step, record.token)
        self._members.holds(member, state, "committed")
        self._exits.rests(member.uuid)
        status, reason = protocol.decide_commit(self.view(), record)
        if status == "committed":
            self.journal.commit(record, reporter=member.uuid, metrics=metrics)
            self._committed = state, self._mono_s()
        elif status == "confirmed":
            self.journal.confirm(record, reporter=member.uuid, metrics=metrics)
        else:
            return status, reason, []
        self._metrics.flush()
        if status == "committed":
            self._exit_if_due()
        going_on = self._outcome is None or self._outcome.kind != REQUEUE
        granted = self._publishes and going_on and self.duty(member, PUBLISH, state)[0]
        return status, reason, [PUBLISH] if granted else []

    def duty(self, member: Member, kind: str, state: State) -> tuple[bool, str]:
        """Ask for a duty."""
        known = self._duties.view(kind, state)
        granted, reason = protocol.decide_duty(self.view(), kind, state, member.uuid, known)
        if granted:
            self._duties.grant(kind, state, member.uuid)
        return granted, reason

    def duty_done(
        self, member: Member, kind: str, state: State, result: dict[str, Any]
    ) -> list[str]:
        """A duty's work is durable. Returns paths of checkpoints that the caller may remove. Raises
        KeyError when `result` lacks what the kind needs."""
        removable: list[str] = []
        if kind == PUBLISH:
            version = int(result["version"])
            self.journal.add_published(version, state)
            if self._committed is not None and self._committed[0] == state:
                self._on_published(version, self._mono_s() - self._committed[1])
        elif kind == SAVE:
            checkpoint = CheckpointRef(state.step, state.token, result["path"])
            self.journal.add_checkpoint(checkpoint, saved_by=member.replica_id)
            being_saved = self._duties.in_hand(SAVE) - {state}
            on_chain = self.view().on_chain
            removable = self._checkpoints.superfluous(on_chain, being_saved)
            self._checkpoints.free_covered(on_chain, removable)
        else:
            raise KeyError(f"no such duty: {kind}")
        self._duties.finish(kind, state, member.uuid)
        return removable

    def live(self, member: Member, state: State, phase: str) -> None:
        """A beat: renews the member's life and its leases."""
        if member.uuid not in self._members:
            self.journal.add_member(member)
        self._members.beats(member, state, phase)
        self._duties.renew(member.uuid)

    def refused(
        self, member: Member, batch_id: int, cause: str, *, numeric: bool, attempt: str
    ) -> protocol.RefusedAction:
        """A group did not commit. `attempt` names the refusal, so that a repeated request
        counts once."""
        head = self.journal.head()
        if self._outcome is not None:
            return "retry" if self._outcome.kind == REQUEUE else "stop"
        if head is None or head.batch_id != batch_id:
            return "retry"  # others went on: `begin` tells what to do
        answered = self._answered.get(member.uuid)
        if answered is not None and answered[0] == attempt:
            return answered[1]
        self._refusals, action, reason = protocol.decide_refused(
            self._refusals,
            batch_id=batch_id,
            uuid=member.uuid,
            members=self._members.living(),
            numeric=numeric,
            limit=self._max_numeric_refusals,
            at_limit=self._at_numeric_limit,
        )
        self._answered[member.uuid] = (attempt, action)
        if action == "drop":
            self.journal.drop_batch(batch_id, f"{reason}: {cause}")
        elif action == "stop":
            self._events.emit(Kind.FAULT, cause=f"{reason}: {cause}", subject=f"batch {batch_id}")
            self.set_outcome("failed", f"{reason}: {cause}")
        return action

    def status(self) -> dict[str, Any]:
        tip, head, published = self.journal.tip, self.journal.head(), self.journal.published()
        return {
            "tip": {"step": tip.step, "token": tip.token},
            "head": None if head is None else {"batch_id": head.batch_id, "digest": head.digest},
            "sealed_ahead": self.journal.sealed_ahead,
            "published": None
            if published is None
            else {"version": published[0], "step": published[1].step},
            "freed_through": self.journal.freed_through,
            "rewinds": self.journal.era,
            "counts": self.journal.counts(),
            "members": self._members.status(),
            "outcome": None
            if self._outcome is None
            else {"outcome": self._outcome.kind, "reason": self._outcome.reason},
        }
