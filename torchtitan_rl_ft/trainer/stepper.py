"""The step protocol of one replica group, on given seams.

    wait for a sealed batch -> quorum -> begin (the ledger) -> forward, backward on this rank's
    view -> sums over the groups -> coverage proof -> commit vote -> optimizer -> report

A refused attempt leaves no trace: parameters, optimizer, scheduler, RNG and data are untouched.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from torchtitan_rl_ft.journal.checkpoints import CheckpointDamaged
from torchtitan_rl_ft.journal.client import (
    BatchWaitTimeout,
    BeginAnswer,
    CommitAnswer,
    LedgerClient,
    LiveBeats,
    Offer,
    Ready,
    Stop,
)
from torchtitan_rl_ft.journal.protocol import PUBLISH, SAVE, BatchRef, CheckpointRef, State
from torchtitan_rl_ft.journal.records import CommitRecord, Decision, SealedBatch
from torchtitan_rl_ft.observability.events import EventSink, Kind
from torchtitan_rl_ft.replica.group import Quorum, ReplicaGroup, trainer_name
from torchtitan_rl_ft.rpc.client import RoleRefused, RoleUnreachable
from torchtitan_rl_ft.trainer import coverage
from torchtitan_rl_ft.trainer.attempt import Attempt, Result, Work
from torchtitan_rl_ft.trainer.flight_record import FlightRecord
from torchtitan_rl_ft.trainer.group_link import GroupLink
from torchtitan_rl_ft.trainer.heal_events import tell_heal
from torchtitan_rl_ft.trainer.lineage import Lineage
from torchtitan_rl_ft.trainer.numeric_watch import NumericWatch
from torchtitan_rl_ft.trainer.presence import PhaseClock
from torchtitan_rl_ft.trainer.publishing import PolicyPublisher
from torchtitan_rl_ft.trainer.refusals import Refusals
from torchtitan_rl_ft.trainer.shares import shares
from torchtitan_rl_ft.trainer.step_metrics import step_metrics
from torchtitan_rl_ft.trainer.train_dumps import TrainDumps

logger = logging.getLogger(__name__)

POLL_S = 20.0  # ranks of a group wait for their first one in a collective: keep it busy
RETRY_DELAY_S = 0.2

CULPRITS_DEADLINE_S = 0.5
"""Of the question who is dead, after a refusal: it is for people, and holds recovery up."""


class NumericStop(Exception):
    """The ledger gave up on a batch whose numbers are not finite."""


class RunStopped(Exception):
    """The ledger says that the run is over, or for now; `outcome`: protocol.OutcomeKind."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


class HealFailed(Exception):
    """A peer's state could not be taken. The group must end: in the quorum it would block the
    others at every step."""


class Model(Protocol):
    """What the protocol does to the model and its optimizer (the trainer)."""

    def restore(self, checkpoint: CheckpointRef | None) -> None:
        """Load the checkpoint, or the initial weights when there is none. Raises
        CheckpointDamaged."""

    def seed_step(self) -> None:
        """Make the step's random numbers a function of run, step and rank."""

    def update(self) -> dict[str, float]:
        """One optimizer and scheduler step; returns the learning rates that were used."""

    def discard(self) -> None:
        """Forget gradients."""

    def committed(self, metrics: dict[str, float]) -> None:
        """A step was committed and counted."""


@dataclass(frozen=True)
class Seams:
    """What a stepper talks to."""

    group: ReplicaGroup
    link: GroupLink
    ledger: LedgerClient
    beats: LiveBeats
    attempt: Attempt
    publisher: PolicyPublisher
    clock: PhaseClock
    events: EventSink
    model: Model
    numbers: NumericWatch
    train_dumps: TrainDumps | None = None
    heal_warn_share: float = 1.0
    flight: FlightRecord | None = None


class Stepper:
    """Drives a group from commit to commit. All ranks of a group call it alike."""

    def __init__(
        self,
        seams: Seams,
        lineage: Lineage,
        *,
        max_refusals: int,
        batch_wait_timeout_s: float,
        poll_s: float = POLL_S,
    ) -> None:
        """`poll_s`: of one question for a batch, shorter than the timeout of the group's
        collectives."""
        self._s, self._lineage = seams, lineage
        self._refusals = Refusals(max_refusals)
        self._batch_wait_timeout_s = batch_wait_timeout_s
        self._poll_s = poll_s
        self._refused_members: list[str] = []  # of the last attempt, when it was refused
        self.policy_version: int | None = None
        """The newest announced policy when this group was last told to save."""

    def attach(self) -> None:
        """Take the state that the ledger names for a new process."""
        self.enter("attach")
        told: set[str] = set()
        while True:  # each damaged checkpoint is named once
            attach, _ = self._s.link.ask(self._s.ledger.attach)
            for reason in attach.skipped:
                if reason not in told:
                    logger.warning("checkpoint skipped: %s", reason)
                    self._s.events.emit(Kind.WARN, cause=f"checkpoint skipped: {reason}")
            told |= set(attach.skipped)
            if self._restore(attach.checkpoint):
                return

    def _restore(self, checkpoint: CheckpointRef | None) -> bool:
        """False: it is damaged, which the ledger knows from now on."""
        try:
            self._s.model.restore(checkpoint)
        except CheckpointDamaged as e:
            assert checkpoint is not None
            path, why = checkpoint.path, str(e)
            self._s.link.ask(lambda: self._s.ledger.unusable(path, why))
            return False
        return True

    def step(self) -> None:
        """Returns when one more step is committed.

        Raises RunStopped, NumericStop, TooManyRefusals, HealFailed, BatchWaitTimeout.
        """
        while not self._try():
            pass

    def enter(self, phase: str) -> None:
        """Enter `phase` of the step after the last commit."""
        self._s.clock.enter(phase, self._lineage.step + 1)
        self._s.beats.update(self._lineage.state, phase)

    def may_save(self) -> bool:
        """Whether this group is the one that saves the state it holds."""
        self.enter("checkpoint")
        state = self._lineage.state
        granted, reason = self._s.link.ask(lambda: self._s.ledger.duty(SAVE, state))
        if granted:
            self.policy_version = self._s.link.ask(self._s.ledger.policy_version)
        else:
            logger.info("not saving step %d: %s", state.step, reason)
        return granted

    def saved(self, state: State, path: str) -> list[str]:
        """The checkpoint of `state` is durable. Returns checkpoints that may be removed."""
        return self._s.link.ask(lambda: self._s.ledger.duty_done(SAVE, state, {"path": path}))

    # One attempt ------------------------------------------------------------------------

    def _try(self) -> bool:
        head = self._wait_for_batch()
        self.enter("quorum")
        quorum = self._form_quorum()
        answer, nonce = self._s.link.ask(lambda: (self._begin(quorum), coverage.draw_nonce()))
        if answer.decision is Decision.STOP:
            raise RunStopped(answer.outcome or "failed", answer.reason)
        if answer.decision is not Decision.GO:
            self._stand_aside(quorum, answer, head)
            return False
        assert answer.batch is not None
        batch = self._s.ledger.batch(answer.batch)
        claim = coverage.Claim(
            self._lineage.step,
            self._lineage.token,
            answer.batch.digest,
            batch.n_samples,
            self._s.attempt.recorded(batch),
            self._s.attempt.board(quorum),
        )
        self._s.model.seed_step()
        result = self._s.attempt.run(Work(claim, batch, quorum, nonce))
        if not result.committed:
            self._refuse(batch, quorum, result)
            return False
        self._commit(batch, answer.batch, quorum, result)
        return True

    def _wait_for_batch(self) -> BatchRef:
        """Wait until the next batch is sealed, doing the duties that come up meanwhile."""
        self.enter("waiting_for_batch")
        end = time.monotonic() + self._batch_wait_timeout_s
        while True:
            match self._s.link.ask(self._poll):
                case Stop(outcome, reason):
                    raise RunStopped(outcome, reason)
                case Ready(batch=batch, heal=heal):
                    if heal:  # no peer may take this state
                        self._s.group.set_step(0)
                    return batch
                case Offer(duties) if PUBLISH in duties:
                    self._publish_if_granted()
                    self.enter("waiting_for_batch")
            if self._s.link.ask(lambda: time.monotonic() > end):
                raise BatchWaitTimeout(
                    f"no batch was sealed for step {self._lineage.step + 1} within "
                    f"recovery.batch_wait_timeout_s = {self._batch_wait_timeout_s:g}"
                )

    def _poll(self) -> Ready | Offer | Stop | None:
        try:
            return self._s.ledger.next_batch(self._lineage.step, self._poll_s, self._lineage.token)
        except BatchWaitTimeout as e:
            logger.info("%s", e)
            return None

    def _form_quorum(self) -> Quorum:
        before = self._lineage.step
        quorum = self._s.group.start_quorum()
        if quorum.must_heal and (error := self._s.group.errored()) is not None:
            raise HealFailed(f"a peer's state could not be taken: {error}") from error
        if quorum.heal is not None:
            tell_heal(
                quorum.heal, self._lineage.step, before, self._s.heal_warn_share, self._s.events
            )
        self._s.events.emit(
            Kind.QUORUM,
            step=self._lineage.step + 1,
            quorum_id=quorum.quorum_id,
            participants=quorum.participants,
            rank=quorum.rank,
            members=[m.split(":")[0] for m in quorum.members],
            **self._left(quorum),
        )
        return quorum

    def _left(self, quorum: Quorum) -> dict[str, Any]:
        """Groups that were in the attempt that was refused last and are in this one no more."""
        now = {trainer_name(m) for m in quorum.members}
        left = [n for m in self._refused_members if (n := trainer_name(m)) not in now]
        self._refused_members = []
        return {"left": left} if left else {}

    def _begin(self, quorum: Quorum) -> BeginAnswer:
        return self._s.ledger.begin(
            self._lineage.state,
            self._lineage.tail,
            participants=quorum.participants,
            quorum_id=quorum.quorum_id,
        )

    def _stand_aside(self, quorum: Quorum, answer: BeginAnswer, head: BatchRef) -> None:
        """This group may not train now. Let the others see it at once, then do as told."""
        logger.warning("standing aside (%s): %s", answer.decision, answer.reason)
        if quorum.participants > 1:
            self._s.attempt.abstain(self._s.ledger.batch(head), quorum)
            self._s.model.discard()
        if answer.decision is Decision.HEAL:
            self._s.group.set_step(0)
        elif answer.decision is Decision.RESTORE and self._restore(answer.checkpoint):
            self._s.group.set_step(self._lineage.step, self._lineage.batches_committed)
        time.sleep(RETRY_DELAY_S)

    def _refuse(self, batch: SealedBatch, quorum: Quorum, result: Result) -> None:
        self._s.model.discard()
        step = self._lineage.step + 1
        failing = self._failing(quorum)
        self._refused_members = quorum.members
        self._s.events.emit(
            Kind.REFUSE,
            step=step,
            cause=result.cause,
            batch=batch.batch_id,
            members=quorum.members,
            failing=failing,
        )
        who = ", ".join(failing) or "no group known to be dead"
        logger.warning("step %d refused: %s: %s", step, who, result.cause)
        if self._s.flight is not None and self._s.group.collective_failed:
            self._s.flight.attempt_failed()
        differs = self._s.numbers.refused(step, quorum, result)
        if not self._s.link.all_agree(not differs):  # one rank's bits are its whole group's
            self._s.group.set_step(0)
        if self._s.link.ask(lambda: result.numeric):
            action = self._s.link.ask(
                lambda: self._s.ledger.refused(step, batch.batch_id, result.cause, numeric=True)
            )
            if action == "stop":
                raise NumericStop(f"step {step}: {result.cause}")
        self._refusals.refused(step, quorum.members, result.cause)

    def _failing(self, quorum: Quorum) -> list[str]:
        """Groups of the quorum whose processes are dead; none where nobody can say so."""
        if not self._s.link.is_speaker:
            return []
        try:
            dead = self._s.ledger.dead_groups(CULPRITS_DEADLINE_S)
        except (RoleUnreachable, RoleRefused):
            return []
        names = [trainer_name(m) for m in quorum.members]
        return [n for n in names if n in {f"trainer-{g}" for g in dead}]

    # Commit and duties ------------------------------------------------------------------

    def _commit(self, batch: SealedBatch, ref: BatchRef, quorum: Quorum, result: Result) -> None:
        # From here on any exception ends the process: torchft's step has advanced, and a state
        # without the update must never be offered to a peer.
        self.enter("optimizer")
        found = self._s.numbers.committed(self._lineage.step + 1, quorum, result)
        rates = self._s.model.update()
        assert result.outcome is not None
        record = self._lineage.next_record(
            batch.batch_id,
            ref.digest,
            result.outcome.nonce,
            participants=quorum.participants,
            quorum_id=quorum.quorum_id,
            shares=shares(quorum, result.outcome.owners, batch.lengths()),
        )
        self._lineage.advance(record, batch.n_tokens)
        metrics = step_metrics(result.outcome, result.grad_norm, rates, self._s.clock.restart())
        metrics |= found
        self._s.model.committed(metrics)
        self._dump(batch, record, result.outcome.recorded, metrics)
        self.enter("report")
        reply = self._s.link.ask(lambda: self._report(record, metrics))
        if reply is not None and reply.status == "refused":
            logger.warning("the ledger refused step %d: %s", record.step, reply.reason)
            self._s.group.set_step(0)
        elif reply is not None and PUBLISH in reply.duties:
            self._publish()
        elif reply is not None and self._s.publisher.every_group_offers:
            self.enter("publish")
            self._s.publisher.offer(record.step, record.token)

    def _dump(
        self,
        batch: SealedBatch,
        record: CommitRecord,
        logprobs: np.ndarray,
        metrics: dict[str, float],
    ) -> None:
        if (dumps := self._s.train_dumps) is not None:
            self.enter("dump")
            self._s.link.tell(lambda: dumps.write(batch, record, logprobs, metrics))

    def _report(self, record: CommitRecord, metrics: dict[str, float]) -> CommitAnswer | None:
        """The ledger's reply; None when it stays silent. The commit is not lost: `begin` shows
        the ledger our tail."""
        try:
            return self._s.ledger.committed(record, metrics)
        except RoleUnreachable as e:
            self._s.events.emit(Kind.WARN, cause=f"commit not reported: {e}", step=record.step)
            return None

    def _publish_if_granted(self) -> None:
        state = self._lineage.state
        granted, reason = self._s.link.ask(lambda: self._s.ledger.duty(PUBLISH, state))
        if granted:
            self._publish()
        else:
            logger.info("not publishing step %d: %s", state.step, reason)
            time.sleep(RETRY_DELAY_S)

    def _publish(self) -> None:
        """A lost publish is offered again, to this group or another, when the lease is over."""
        state = self._lineage.state
        self.enter("publish")
        try:
            version = self._s.publisher.publish(state.step, state.token)
        except RoleUnreachable as e:
            self._s.events.emit(
                Kind.FAULT, cause=f"publish failed: {e}", step=state.step, subject="serving"
            )
            return
        self._s.link.ask(lambda: self._s.ledger.duty_done(PUBLISH, state, {"version": version}))
