"""The RL trainer: TorchTitan's fault-tolerant trainer fed from the journal.

One call of `train_step` is one committed step, however many attempts it takes:

    wait for a sealed batch -> quorum -> begin (the ledger) -> forward, backward on this rank's
    view -> sums over the groups -> coverage proof -> commit vote -> optimizer -> report

A refused attempt leaves no trace: parameters, optimizer, scheduler, RNG and data are untouched.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.dataloader import DataloaderExhaustedError
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.experiments.torchft.trainer import FaultTolerantTrainer

from torchtitan_rl_ft.config.sections import RecoverySection, RLSection, RolloutSection
from torchtitan_rl_ft.exit_codes import ExitCode
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
from torchtitan_rl_ft.journal.records import (
    GENESIS,
    CommitRecord,
    Decision,
    SealedBatch,
    next_token,
)
from torchtitan_rl_ft.observability.events import Kind
from torchtitan_rl_ft.platform import torchtitan_cpu
from torchtitan_rl_ft.replica.group import Quorum, ReplicaGroup
from torchtitan_rl_ft.replica.live_state import LiveState
from torchtitan_rl_ft.rpc.client import RoleClient, RoleUnreachable
from torchtitan_rl_ft.run_folder import ATTEMPT_ENV
from torchtitan_rl_ft.trainer import coverage
from torchtitan_rl_ft.trainer.addresses import find_run, require_roles, role_url, set_lighthouse
from torchtitan_rl_ft.trainer.attempt import Attempt, Placement, Result, Work
from torchtitan_rl_ft.trainer.checkpoint import RLCheckpointManager
from torchtitan_rl_ft.trainer.group_link import GroupLink
from torchtitan_rl_ft.trainer.policy_loss import PolicyLoss
from torchtitan_rl_ft.trainer.presence import PhaseClock, event_sink, this_member
from torchtitan_rl_ft.trainer.publishing import PolicyPublisher
from torchtitan_rl_ft.trainer.reference import ReferencePolicy, load_hf_weights
from torchtitan_rl_ft.trainer.refusals import Refusals
from torchtitan_rl_ft.trainer.rows import MicroBatch
from torchtitan_rl_ft.trainer.sealed_batches import SealedBatchLoader
from torchtitan_rl_ft.trainer.step_metrics import step_metrics

logger = logging.getLogger(__name__)

LEDGER_DEADLINE_S = 60.0
POLL_S = 20.0  # ranks of a group wait for their first one in a collective: keep it busy
RETRY_DELAY_S = 0.2


class NumericStop(Exception):
    """The ledger gave up on a batch whose numbers are not finite."""


class RunStopped(Exception):
    """The ledger says that the run is over; `outcome` is done, failed or drained."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


class RLFaultTolerantTrainer(FaultTolerantTrainer):
    """See the module. Hooks into TorchTitan: `init_distributed`, `train`, `train_step`,
    `should_continue_training`, `state_dict`, `close`, and the components in Config."""

    @dataclass(kw_only=True, slots=True)
    class Config(FaultTolerantTrainer.Config):
        fault_tolerance: ReplicaGroup.Config = field(default_factory=ReplicaGroup.Config)
        dataloader: SealedBatchLoader.Config = field(default_factory=SealedBatchLoader.Config)
        checkpoint: RLCheckpointManager.Config = field(default_factory=RLCheckpointManager.Config)
        loss: PolicyLoss.Config = field(default_factory=PolicyLoss.Config)
        rl: RLSection = field(default_factory=RLSection)
        rollout: RolloutSection = field(default_factory=RolloutSection)
        recovery: RecoverySection = field(default_factory=RecoverySection)

    config: Config
    ft_manager: ReplicaGroup
    checkpointer: RLCheckpointManager

    def __init__(self, config: Config) -> None:
        self.run_folder = find_run(config.dump_folder)
        if ATTEMPT_ENV not in os.environ:  # started by hand: nobody is about to start them
            require_roles(self.run_folder, ("rollout", "serving"))
        self._token = self.run_folder.token()
        if config.fault_tolerance.enable:
            set_lighthouse(self.run_folder)
        # This group's history: see journal/records.py.
        self.committed_step = 0
        self.history = GENESIS
        self.tail: CommitRecord | None = None
        super().__init__(config)
        torchtitan_cpu.prepare_model(self.model_parts)
        self.state = LiveState(self.model_parts, self.optimizers, self.lr_schedulers, self)
        self.stopped: RunStopped | None = None
        self.link = GroupLink()
        self._connect()
        self._build_step()
        self._reference = self._build_reference() if config.rl.kl_coef > 0 else None
        self.checkpointer.bind(self)

    # Set-up -----------------------------------------------------------------------------

    def init_distributed(self) -> ParallelDims:
        parallel_dims = super().init_distributed()
        # TorchTitan's fault-tolerant trainer predates this call of the base trainer.
        dist_utils.set_spmd_backend(self.config.parallelism.spmd_backend)
        return parallel_dims

    def _connect(self) -> None:
        self.member = this_member(self.config.fault_tolerance.replica_id)
        self.events = event_sink(
            self.run_folder, self.member.replica_id, speaks=self.link.is_speaker
        )
        self.clock = PhaseClock(self.events)
        self.ledger = LedgerClient(self._client("rollout"), self.member, LEDGER_DEADLINE_S)
        self._beats = LiveBeats(LedgerClient(self._client("rollout"), self.member))

    def _client(self, role: str) -> RoleClient:
        return RoleClient(role, lambda: role_url(self.run_folder, role), self._token)

    def _build_step(self) -> None:
        config = self.config
        parallel_dims = self.parallel_dims
        mesh = parallel_dims.get_mesh("batch") if parallel_dims.dp_enabled else None
        placement = Placement(
            rank=mesh.get_local_rank() if mesh is not None else 0,
            degree=mesh.size() if mesh is not None else 1,
            group=mesh.get_group() if mesh is not None else None,
        )
        assert isinstance(self.loss_fn, PolicyLoss)
        self._attempt = Attempt(
            group=self.ft_manager,
            placement=placement,
            parameters=self._parameters(),
            loss=self.loss_fn,
            forward_backward=self._forward_backward,
            clip=self._clip,
            enter=self._enter,
            rows=config.training.local_batch_size,
            seq_len=config.training.seq_len,
            # Graph capture and compiled code want one shape; eager code is faster on short rows.
            fixed_rows=config.compile.enable or not config.training.disable_cuda_graphs,
        )
        self._rank_seed = placement.rank
        spec = config.model_spec
        assert spec is not None and spec.state_dict_adapter is not None
        self._adapter = spec.state_dict_adapter(self.model_config, config.hf_assets_path)
        self._publisher = PolicyPublisher(
            model_parts=self.model_parts,
            adapter=self._adapter,
            assets=Path(config.hf_assets_path),
            folder=self.run_folder.weights,
            serving=self._client("serving"),
            link=self.link,
        )
        self._refusals = Refusals(config.fault_tolerance.max_commit_retries)

    def _build_reference(self) -> ReferencePolicy:
        config, spec = self.config, self.config.model_spec
        assert spec is not None
        with torch.device("meta"):
            model = self.model_config.build()
        model = spec.parallelize_fn(
            model,
            parallel_dims=self.parallel_dims,
            training=config.training,
            parallelism=config.parallelism,
            compile_config=config.compile,
            ac_config=None,
            dump_folder=config.dump_folder,
        )
        model.to_empty(device=self.device)
        with torch.no_grad():
            model.init_states(buffer_device=None)
        torchtitan_cpu.prepare_model([model])
        load_hf_weights([model], self._adapter, config.rl.kl_reference or config.hf_assets_path)
        return ReferencePolicy(model, self.train_context)

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for part in self.model_parts for p in part.parameters() if p.requires_grad]

    # The run ----------------------------------------------------------------------------

    def train(self) -> None:
        """Train until the ledger says stop. Raises SystemExit with the run's exit code unless
        the outcome is done."""
        self._start()
        try:
            super().train()
        finally:
            self._beats.stop()
        assert self.stopped is not None
        logger.info("Run is over (%s): %s", self.stopped.outcome, self.stopped)
        if self.stopped.outcome == "failed":
            raise SystemExit(ExitCode.FAILED)

    def _start(self) -> None:
        """Take the state that the ledger names, then join the quorum."""
        attach, _ = self.link.ask(self.ledger.attach)
        for reason in attach.skipped:
            logger.warning("checkpoint skipped: %s", reason)
            self.events.emit(Kind.WARN, cause=f"checkpoint skipped: {reason}")
        self._restore(attach.checkpoint)
        self.ft_manager.join(self.state, self._token, self.committed_step)
        self.link.tell(lambda: self._beats.start(self._state(), self.clock.phase))

    def _state(self) -> State:
        return State(self.committed_step, self.history)

    def _enter(self, phase: str) -> None:
        """Enter `phase` of the step after the last commit."""
        self.clock.enter(phase, self.committed_step + 1)
        self._beats.update(self._state(), phase)

    def _restore(self, checkpoint: CheckpointRef | None) -> None:
        """Load the named checkpoint, or the initial weights when there is none."""
        if checkpoint is None:
            self._load_initial_weights()
            self.state.reset_optimizer()
            self.committed_step, self.history, self.tail = 0, GENESIS, None
            self.ntokens_seen = 0
        else:
            self.checkpointer.restore(checkpoint.step)
            if self._state() != State(checkpoint.step, checkpoint.token):
                raise RuntimeError(
                    f"checkpoint {checkpoint.path} holds step {self.committed_step} of history "
                    f"{self.history}, the ledger expects step {checkpoint.step} of "
                    f"{checkpoint.token}"
                )
            self.events.emit(Kind.RESTORE, step=self.committed_step, path=checkpoint.path)
        self._write_learning_rates()
        self.step = self.committed_step

    def _load_initial_weights(self) -> None:
        """From `checkpoint.initial_load_path` where it is set, else from the model directory,
        also with checkpoints switched off: all groups start from the same file."""
        if self.checkpointer.enable and self.config.checkpoint.initial_load_path:
            self.checkpointer.restore(-1)
            return
        load_hf_weights(self.model_parts, self._adapter, self.config.hf_assets_path)

    def _write_learning_rates(self) -> None:
        """A restored scheduler does not touch the optimizer's param groups by itself."""
        for scheduler in self.lr_schedulers:
            rates = scheduler.get_last_lr()
            for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def should_continue_training(self) -> bool:
        """Until the ledger says stop: after the last step there may be a policy to publish."""
        return self.stopped is None

    # One step ---------------------------------------------------------------------------

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """Returns when one more step is committed; `self.step` is then that step."""
        try:
            while not self._try_step():
                pass
        except RunStopped as e:
            self.stopped = e
            self.step = self.committed_step
            # Peers would wait a heartbeat timeout for a group that sleeps in the quorum.
            self.ft_manager.leave()
            self.checkpointer.finish(wait=True)
            # The base loop's way to end before the last step.
            raise DataloaderExhaustedError from e

    def _try_step(self) -> bool:
        head = self._wait_for_batch()
        self._enter("quorum")
        quorum = self._form_quorum()
        answer, nonce = self.link.ask(lambda: (self._begin(quorum), coverage.draw_nonce()))
        if answer.decision is Decision.STOP:
            raise RunStopped(answer.outcome or "failed", answer.reason)
        if answer.decision is not Decision.GO:
            self._stand_aside(quorum, answer, head)
            return False
        assert answer.batch is not None
        batch = self.ledger.batch(answer.batch)
        claim = coverage.Claim(
            self.committed_step, self.history, answer.batch.digest, batch.n_samples
        )
        torch.manual_seed(self._step_seed())
        result = self._attempt.run(Work(claim, batch, quorum, nonce))
        if not result.committed:
            self._refuse(batch, quorum, result)
            return False
        self._commit(batch, answer.batch, quorum, result)
        return True

    def _begin(self, quorum: Quorum) -> BeginAnswer:
        return self.ledger.begin(
            self._state(),
            self.tail,
            participants=quorum.participants,
            quorum_id=quorum.quorum_id,
        )

    def _wait_for_batch(self) -> BatchRef:
        """Wait until the next batch is sealed, doing the duties that come up meanwhile."""
        self._enter("waiting_for_batch")
        limit_s = self.config.recovery.batch_wait_timeout_s
        end = time.monotonic() + limit_s
        while True:
            match self.link.ask(self._poll):
                case Stop(outcome, reason):
                    raise RunStopped(outcome, reason)
                case Ready(batch=batch, heal=heal):
                    if heal:  # no peer may take this state
                        self.ft_manager.set_step(0)
                    return batch
                case Offer(duties) if PUBLISH in duties:
                    self._publish_if_granted()
                    self._enter("waiting_for_batch")
            if self.link.ask(lambda: time.monotonic() > end):
                raise BatchWaitTimeout(
                    f"no batch was sealed for step {self.committed_step + 1} within "
                    f"recovery.batch_wait_timeout_s = {limit_s:g}"
                )

    def _poll(self) -> Ready | Offer | Stop | None:
        try:
            return self.ledger.next_batch(self.committed_step, POLL_S, self.history)
        except BatchWaitTimeout as e:
            logger.info("%s", e)
            return None

    def _form_quorum(self) -> Quorum:
        """Raises RuntimeError when a peer's state could not be taken: a group that cannot heal
        would block the others and must end."""
        before = self.committed_step
        quorum = self.ft_manager.start_quorum()
        if (error := self.ft_manager.errored()) is not None:
            raise RuntimeError(f"joining the quorum failed: {error}") from error
        if quorum.healed:
            self.step = self.committed_step
            self.events.emit(Kind.HEAL, step=self.committed_step, from_step=before)
        self.events.emit(
            Kind.QUORUM,
            step=self.committed_step + 1,
            quorum_id=quorum.quorum_id,
            participants=quorum.participants,
            rank=quorum.rank,
            members=[m.split(":")[0] for m in quorum.members],
        )
        return quorum

    def _stand_aside(self, quorum: Quorum, answer: BeginAnswer, head: BatchRef) -> None:
        """This group may not train now. Let the others see it at once, then do as told."""
        logger.warning("standing aside (%s): %s", answer.decision, answer.reason)
        if quorum.participants > 1:
            self._attempt.abstain(self.ledger.batch(head).n_samples)
            self.optimizers.zero_grad()
        if answer.decision is Decision.HEAL:
            self.ft_manager.set_step(0)
        elif answer.decision is Decision.RESTORE:
            self._restore(answer.checkpoint)
            self.ft_manager.set_step(self.committed_step)
        time.sleep(RETRY_DELAY_S)

    def _refuse(self, batch: SealedBatch, quorum: Quorum, result: Result) -> None:
        self.optimizers.zero_grad()
        step = self.committed_step + 1
        self.events.emit(
            Kind.REFUSE, step=step, cause=result.cause, batch=batch.batch_id, members=quorum.members
        )
        logger.warning("step %d refused: %s", step, result.cause)
        if self.link.ask(lambda: result.numeric):
            action = self.link.ask(
                lambda: self.ledger.refused(step, batch.batch_id, result.cause, numeric=True)
            )
            if action == "stop":
                raise NumericStop(f"step {step}: {result.cause}")
        self._refusals.refused(step, quorum.members, result.cause)

    def _commit(self, batch: SealedBatch, ref: BatchRef, quorum: Quorum, result: Result) -> None:
        # From here on any exception ends the process: torchft's step has advanced, and a state
        # without the update must never be offered to a peer.
        self._enter("optimizer")
        rates = self.lr_schedulers.get_metrics()
        self.optimizers.step()
        self.lr_schedulers.step()
        self.optimizers.zero_grad()
        assert result.outcome is not None
        record = CommitRecord(
            step=self.committed_step + 1,
            batch_id=batch.batch_id,
            digest=ref.digest,
            prev_token=self.history,
            token=next_token(self.history, ref.digest, result.outcome.nonce),
            participants=quorum.participants,
            quorum_id=quorum.quorum_id,
        )
        self.committed_step, self.history, self.tail = record.step, record.token, record
        self.step = record.step
        self.ntokens_seen += batch.n_tokens
        metrics = step_metrics(result.outcome, result.grad_norm, rates, self.clock.restart())
        self._log(metrics)
        self._enter("report")
        reply = self.link.ask(lambda: self._report(record, metrics))
        if reply is not None and reply.status == "refused":
            logger.warning("the ledger refused step %d: %s", record.step, reply.reason)
            self.ft_manager.set_step(0)
        elif reply is not None and PUBLISH in reply.duties:
            self._publish()
        self._first_step_done()

    def _report(self, record: CommitRecord, metrics: dict[str, float]) -> CommitAnswer | None:
        """The ledger's reply; None when it stays silent. The commit is not lost: `begin` shows
        the ledger our tail."""
        try:
            return self.ledger.committed(record, metrics)
        except RoleUnreachable as e:
            self.events.emit(Kind.WARN, cause=f"commit not reported: {e}", step=record.step)
            return None

    def _publish_if_granted(self) -> None:
        granted, reason = self.link.ask(lambda: self.ledger.duty(PUBLISH, self._state()))
        if granted:
            self._publish()
        else:
            logger.info("not publishing step %d: %s", self.committed_step, reason)
            time.sleep(RETRY_DELAY_S)

    def _publish(self) -> None:
        """A lost publish is offered again, to this group or another, when the lease is over."""
        state = self._state()
        self._enter("publish")
        try:
            version = self._publisher.publish(state.step, state.token)
        except RoleUnreachable as e:
            self.events.emit(
                Kind.FAULT, cause=f"publish failed: {e}", step=state.step, subject="serving"
            )
            return
        self.link.ask(lambda: self.ledger.duty_done(PUBLISH, state, {"version": version}))

    def _first_step_done(self) -> None:
        """Shorten the timeout of this group's collectives after this process's first step; the
        base trainer does it at step 1 only, so never in a resumed run."""
        if self._timeout_shortened or self.committed_step == 1:
            self._timeout_shortened = True
            return
        self._timeout_shortened = True
        dist_utils.set_pg_timeouts(
            timeout=timedelta(seconds=self.config.comm.train_timeout_seconds),
            parallel_dims=self.parallel_dims,
        )

    _timeout_shortened = False

    # Computation ------------------------------------------------------------------------

    def _forward_backward(self, rows: MicroBatch) -> torch.Tensor:
        positions = rows.positions_BS.to(self.device)
        labels = self._reference.fill(rows) if self._reference else rows.labels_BSC
        return self.forward_backward_step(
            input_dict={"input": rows.input_BS.to(self.device), "positions": positions},
            labels=labels.to(self.device),
            # The loss weights divide by the global batch already.
            global_valid_tokens=torch.ones((), device=self.device),
        )

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        seen = self.ntokens_seen
        processed = super().post_dataloading_process(input_dict, labels)
        # Tokens count once, when their step is committed.
        self.ntokens_seen = seen
        return processed

    def _clip(self) -> torch.Tensor:
        return dist_utils.clip_grad_norm_(
            self._parameters(),
            self.config.training.max_norm,
            foreach=True,
            pp_mesh=self.parallel_dims.get_optional_mesh("pp"),
            ep_enabled=self.parallel_dims.ep_enabled,
        )

    def _step_seed(self) -> int:
        """RNG as a function of run seed, step and rank: a replayed step draws the same."""
        seed = self.config.debug.seed or 0
        text = f"{seed}|{self.committed_step}|{self._rank_seed}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")

    def _log(self, metrics: dict[str, float]) -> None:
        if self.metrics_processor.should_log(self.step):
            self.metrics_processor.ntokens_since_last_log += int(metrics["trained_tokens"])
            self.metrics_processor.data_loading_times.append(metrics["time/wait_batch_s"])
            self.metrics_processor.log(
                self.step, metrics["loss"], metrics["loss"], metrics["grad_norm"], {}
            )

    # State ------------------------------------------------------------------------------

    def progress(self) -> dict[str, Any]:
        """What healing and checkpoints carry beside tensors."""
        return {
            "step": self.committed_step,
            "ntokens_seen": self.ntokens_seen,
            "token": self.history,
            "tail": self.tail.to_json() if self.tail else None,
        }

    def load_progress(self, progress: dict[str, Any]) -> None:
        self.committed_step = self.step = int(progress["step"])
        self.ntokens_seen = int(progress["ntokens_seen"])
        self.history = progress["token"]
        tail = progress["tail"]
        self.tail = CommitRecord.from_json(tail) if tail else None

    def state_dict(self) -> dict[str, Any]:
        # One string: a checkpoint flattens nested values, and asks for the keys of today.
        return {"progress": json.dumps(self.progress())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.load_progress(json.loads(state_dict["progress"]))

    # Saving (checkpoint.SaveDuty) -------------------------------------------------------

    @property
    def token(self) -> str:
        return self.history

    @property
    def is_writer(self) -> bool:
        return self.link.is_speaker

    def may_save(self, step: int) -> bool:
        self._enter("checkpoint")
        granted, reason = self.link.ask(lambda: self.ledger.duty(SAVE, self._state()))
        if not granted:
            logger.info("not saving step %d: %s", step, reason)
        return granted

    def saved(self, step: int, token: str, path: str) -> None:
        self.link.ask(lambda: self.ledger.duty_done(SAVE, State(step, token), {"path": path}))

    def close(self) -> None:
        if hasattr(self, "_beats"):
            self._beats.stop()
        if hasattr(self, "ft_manager"):
            self.ft_manager.leave()
        super().close()
