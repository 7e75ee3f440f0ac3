"""The RL trainer: TorchTitan's fault-tolerant trainer fed from the journal.

One call of `train_step` is one committed step, however many attempts it takes
(trainer/stepper.py). This class is what TorchTitan sees: config, components, hooks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
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

from torchtitan_rl_ft.config.debug_mode import roles_of_trainers
from torchtitan_rl_ft.config.profile_steps import parse_steps
from torchtitan_rl_ft.config.recovery import RecoverySection
from torchtitan_rl_ft.config.resolve import Resolved
from torchtitan_rl_ft.config.sections import RLSection, RolloutSection
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.journal.client import LedgerClient, LiveBeats
from torchtitan_rl_ft.journal.exits import REQUEUE
from torchtitan_rl_ft.journal.protocol import CheckpointRef, State
from torchtitan_rl_ft.platform import torchtitan_cpu
from torchtitan_rl_ft.replica.group import ReplicaGroup
from torchtitan_rl_ft.replica.live_state import LiveState
from torchtitan_rl_ft.rpc.client import RoleClient
from torchtitan_rl_ft.run_folder import ATTEMPT_ENV
from torchtitan_rl_ft.trainer import flight_record, watch
from torchtitan_rl_ft.trainer.addresses import find_run, require_roles, role_url, set_lighthouse
from torchtitan_rl_ft.trainer.attempt import Attempt, Parts, Placement
from torchtitan_rl_ft.trainer.checkpoint import OPTIMIZER, RLCheckpointManager
from torchtitan_rl_ft.trainer.exits import ASK_TIMEOUT_S, STARTED_AGAIN, SignalWatch
from torchtitan_rl_ft.trainer.group_link import GroupLink
from torchtitan_rl_ft.trainer.layout import group_layout, model_identity
from torchtitan_rl_ft.trainer.lineage import Lineage
from torchtitan_rl_ft.trainer.numeric_guards import guards_of, watch_of
from torchtitan_rl_ft.trainer.outer_optimizer import outer_optimizer
from torchtitan_rl_ft.trainer.policy_loss import PolicyLoss
from torchtitan_rl_ft.trainer.presence import (
    PhaseClock,
    SessionMember,
    event_sink,
    this_member,
)
from torchtitan_rl_ft.trainer.publishing import (
    LiveWeights,
    PolicyPublisher,
    PublishSettings,
    make_publisher,
)
from torchtitan_rl_ft.trainer.random_state import RandomState, seed_all
from torchtitan_rl_ft.trainer.reference import ReferencePolicy, build_reference, load_hf_weights
from torchtitan_rl_ft.trainer.rows import MicroBatch
from torchtitan_rl_ft.trainer.saving import Saving
from torchtitan_rl_ft.trainer.sealed_batches import SealedBatchLoader
from torchtitan_rl_ft.trainer.standby import BUILT, Place, await_place, waits
from torchtitan_rl_ft.trainer.step_profiles import StepProfiles
from torchtitan_rl_ft.trainer.stepper import POLL_S, RunStopped, Seams, Stepper
from torchtitan_rl_ft.trainer.train_dumps import TrainDumps
from torchtitan_rl_ft.trainer.window_work import WindowWork
from torchtitan_rl_ft.trainer.windows import WindowAttempt

logger = logging.getLogger(__name__)


class RLFaultTolerantTrainer(FaultTolerantTrainer):
    """Hooks into TorchTitan: `init_distributed`, `train`, `train_step`,
    `should_continue_training`, `post_dataloading_process`, `state_dict`, `close`, and the
    components that Config names."""

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
            require_roles(self.run_folder, roles_of_trainers(config.rollout))
        self._token = self.run_folder.token()
        if config.recovery.exit_signal_handler and not waits():
            self._watch_signals(config.fault_tolerance.replica_id)
        if config.fault_tolerance.enable:
            set_lighthouse(self.run_folder)
        self.lineage = Lineage()
        method = config.fault_tolerance.semi_sync_method
        # TorchTitan would wrap the model in torchft's own DiLoCo or LocalSGD.
        group = dataclasses.replace(config.fault_tolerance, semi_sync_method=None)
        # The rollout role writes for the run as a whole (observability/metric_sinks.py).
        metrics = dataclasses.replace(config.metrics, enable_tensorboard=False, enable_wandb=False)
        super().__init__(dataclasses.replace(config, fault_tolerance=group, metrics=metrics))
        torchtitan_cpu.prepare_model(self.model_parts)
        self._outer = None
        if method is not None:
            self._outer = outer_optimizer(self.model_parts, method, config.fault_tolerance)
        self.state = LiveState(
            self.model_parts,
            self.optimizers,
            self.lr_schedulers,
            self,
            outer=self._outer.tensors if self._outer else dict,
        )
        self._window: WindowAttempt | None = None
        self.stopped: RunStopped | None = None
        self.link = GroupLink()
        self._adapter = self._build_adapter()
        self._reference = self._build_reference() if config.rl.kl_coef > 0 else None
        if (place := await_place(BUILT)) is not None:
            self._take_place(place)
        self.stepper = self._build_stepper()
        self._bind_checkpoints()

    # Set-up -----------------------------------------------------------------------------

    def init_distributed(self) -> ParallelDims:
        parallel_dims = super().init_distributed()
        # TorchTitan's fault-tolerant trainer predates this call of the base trainer.
        dist_utils.set_spmd_backend(self.config.parallelism.spmd_backend)
        return parallel_dims

    def _take_place(self, place: Place) -> None:
        """Be the group that this standby replaces."""
        self.config.fault_tolerance.replica_id = place.replica_id
        self.ft_manager.take_place(place.replica_id)
        if self.config.recovery.exit_signal_handler:
            self._watch_signals(place.replica_id)

    def _build_stepper(self) -> Stepper:
        config = self.config
        member = this_member(config.fault_tolerance.replica_id)
        self.events = event_sink(self.run_folder, member.replica_id, speaks=self.link.is_speaker)
        self.clock = PhaseClock(self.events, watch.begin(self.run_folder.phases))
        watch.arm(watch.limits_of(config.recovery, config.fault_tolerance))
        self._beats = LiveBeats(LedgerClient(self._client("rollout"), member))
        SessionMember(self._client("serving"), member).announce()
        self._flight = flight_record.of_group(
            config.comm,
            self.run_folder.path,
            member.replica_id,
            lambda: self.ft_manager.quorum_id,
        )
        self._profiles = StepProfiles(
            self.run_folder.profiles,
            parse_steps(Resolved.read(self.run_folder.path).sections.observability.profile_steps),
            f"trainer-{member.replica_id}.{os.environ.get('RANK', '0')}",
            self.events,
            lambda phase: self.stepper.enter(phase),
        )
        self._publisher = self._build_publisher()
        seams = Seams(
            group=self.ft_manager,
            link=self.link,
            ledger=LedgerClient(self._client("rollout"), member),
            beats=self._beats,
            attempt=self._build_attempt(),
            publisher=self._publisher,
            clock=self.clock,
            events=self.events,
            model=self,
            numbers=watch_of(
                config.recovery,
                self._placement,
                self._guards.rerun,
                self.model_parts,
                self.events,
            ),
            train_dumps=self._build_train_dumps(),
            heal_warn_share=config.fault_tolerance.heal_warn_share,
            flight=self._flight,
        )
        return Stepper(
            seams,
            self.lineage,
            max_refusals=config.fault_tolerance.max_commit_retries,
            batch_wait_timeout_s=config.recovery.batch_wait_timeout_s,
            poll_s=min(POLL_S, config.comm.train_timeout_seconds / 3),
        )

    def _bind_checkpoints(self) -> None:
        config = self.config
        if not config.recovery.save_optimizer:
            self.checkpointer.leave_out(OPTIMIZER)
        if self._outer is not None and self._outer.has_state:
            self.checkpointer.add_part("outer_optimizer", self._outer)
        saving = Saving(
            stepper=self.stepper,
            lineage=self.lineage,
            link=self.link,
            parameters=self._parameters(),
            reseed=self.seed_step,
            model=model_identity(config),
            layout=group_layout(config, self.parallel_dims),
            events=self.events,
        )
        self.checkpointer.bind(
            saving,
            self.link,
            RandomState(self.link.rank, self.device),
            saves_last=not config.recovery.disable_last_saving,
        )

    def _watch_signals(self, replica_id: int) -> None:
        client = LedgerClient(self._client("rollout"), this_member(replica_id))
        reason = f"SIGTERM to trainer-{replica_id} (rank {os.environ.get('RANK', '0')})"
        self._signals = SignalWatch(lambda: client.ask_exit(reason, ASK_TIMEOUT_S))

    def _build_train_dumps(self) -> TrainDumps | None:
        template = self.config.rollout.save_debug_train_data
        if not template:
            return None
        return TrainDumps(template, self.run_folder.path, self.config.loss.ratio_cap, self.events)

    def _client(self, role: str) -> RoleClient:
        return RoleClient(role, lambda: role_url(self.run_folder, role), self._token)

    def _build_attempt(self) -> Attempt:
        config = self.config
        mesh = self.parallel_dims.get_mesh("batch") if self.parallel_dims.dp_enabled else None
        self._placement = Placement(
            rank=mesh.get_local_rank() if mesh is not None else 0,
            degree=mesh.size() if mesh is not None else 1,
            group=mesh.get_group() if mesh is not None else None,
        )
        self._guards = guards_of(config.recovery, self._placement.degree, self._equal_tensors)
        assert isinstance(self.loss_fn, PolicyLoss)
        parts = Parts(
            group=self.ft_manager,
            placement=self._placement,
            parameters=self._parameters(),
            loss=self.loss_fn,
            forward_backward=self._forward_backward,
            clip=self._clip,
            enter=lambda phase: self.stepper.enter(phase),
            rows=config.training.local_batch_size,
            seq_len=config.training.seq_len,
            # Graph capture and compiled code want one shape; eager code is faster on short rows.
            fixed_rows=config.compile.enable or not config.training.disable_cuda_graphs,
            guards=self._guards,
        )
        if self._outer is None:
            return Attempt(parts, reseed=self.seed_step)
        self._window = WindowAttempt(
            parts,
            link=self.link,
            work=WindowWork(parts.parameters, self.state.optimizer_tensors),
            outer=self._outer,
            norm=lambda: self._clip(math.inf),
            inner_update=self.optimizers.step,
            discard=self.discard,
            seed=self.seed_step,
            sync_steps=config.fault_tolerance.sync_steps,
            events=self.events,
        )
        return self._window

    def _equal_tensors(self) -> dict[str, torch.Tensor]:
        return self.state.tensors() if self._window is None else self._window.equal_tensors()

    def _build_adapter(self) -> Any:
        spec = self.config.model_spec
        assert spec is not None and spec.state_dict_adapter is not None
        return spec.state_dict_adapter(self.model_config, self.config.hf_assets_path)

    def _build_publisher(self) -> PolicyPublisher:
        rollout = self.config.rollout
        settings = PublishSettings(
            transport=rollout.weight_transport,
            assets=Path(self.config.hf_assets_path),
            buffer_bytes=rollout.publish_buffer_mb * 2**20,
            replica_id=self.config.fault_tolerance.replica_id,
            sync=self.config.rl.mode == "sync",
        )
        weights = LiveWeights(self.model_parts, self._adapter)
        serving = self._client("serving")
        return make_publisher(settings, weights, serving, self.link, self.run_folder)

    def _build_reference(self) -> ReferencePolicy:
        model = build_reference(self.config, self.model_config, self.parallel_dims, self.device)
        directory = self.config.rl.kl_reference or self.config.hf_assets_path
        load_hf_weights([model], self._adapter, directory)
        return ReferencePolicy(model, self.train_context)

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for part in self.model_parts for p in part.parameters() if p.requires_grad]

    # The run ----------------------------------------------------------------------------

    def train(self) -> None:
        """Train until the ledger says stop. Raises SystemExit when the run has failed."""
        self.stepper.attach()
        lineage = self.lineage
        self.ft_manager.join(self.state, self._token, lineage.step, lineage.batches_committed)
        self.link.tell(lambda: self._beats.start(self.lineage.state, self.clock.phase))
        try:
            with self._flight.kept() if self._flight else contextlib.nullcontext():
                super().train()
        finally:
            self._beats.stop()
        assert self.stopped is not None
        logger.info("Run is over (%s): %s", self.stopped.outcome, self.stopped)
        if self.stopped.outcome == "failed":
            raise SystemExit(ExitCode.FAILED)
        if self.stopped.outcome in STARTED_AGAIN:
            self.close()
            raise SystemExit(ExitCode.REQUEUE)

    def should_continue_training(self) -> bool:
        """Until the ledger says stop: after the last step there may be a policy to publish."""
        return self.stopped is None

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """Returns when one more step is committed; `self.step` is then that step."""
        try:
            with self._profiles.around(self.lineage.step + 1):
                self.stepper.step()
        except RunStopped as e:
            self.stopped = e
            self.step = self.lineage.step
            # Peers would wait a heartbeat timeout for a group that sleeps in the quorum.
            self.ft_manager.leave()
            self.checkpointer.finish(wait=True)
            if e.outcome == REQUEUE and self.step > 0:
                self.checkpointer.save_for_exit(self.step)
            # The base loop's way to end before the last step.
            raise DataloaderExhaustedError from e
        self._shorten_timeouts()

    _timeouts_shortened = False

    def _shorten_timeouts(self) -> None:
        """Shorten the timeout of this group's collectives after this process's first step; the
        base trainer does it at step 1 only, so never in a resumed run."""
        if not self._timeouts_shortened and self.lineage.step != 1:
            dist_utils.set_pg_timeouts(
                timeout=timedelta(seconds=self.config.comm.train_timeout_seconds),
                parallel_dims=self.parallel_dims,
            )
        self._timeouts_shortened = True

    # What the stepper does to the model (stepper.Model) ---------------------------------

    def restore(self, checkpoint: CheckpointRef | None) -> None:
        """Raises CheckpointDamaged, CheckpointUnusable, FileNotFoundError; RuntimeError when the
        checkpoint is of another history."""
        if checkpoint is None:
            self._load_initial_weights()
            self.state.reset_optimizer()
            self.load_progress(Lineage().to_json())
        else:
            self.checkpointer.restore(self.run_folder.path / checkpoint.path)
            if self.lineage.state != State(checkpoint.step, checkpoint.token):
                raise RuntimeError(
                    f"checkpoint {checkpoint.path} holds {self.lineage.state}, the ledger "
                    f"expects step {checkpoint.step}, token {checkpoint.token}"
                )
        self._write_learning_rates()
        self._follow_lineage()

    def _load_initial_weights(self) -> None:
        """From `checkpoint.initial_load_path` where it is set, else from the model directory,
        also with checkpoints switched off: all groups start from the same file."""
        if self.checkpointer.enable and self.config.checkpoint.initial_load_path:
            self.checkpointer.load_initial()
        else:
            load_hf_weights(self.model_parts, self._adapter, self.config.hf_assets_path)

    def _write_learning_rates(self) -> None:
        """A restored scheduler does not touch the optimizer's param groups by itself."""
        for scheduler in self.lr_schedulers:
            rates = scheduler.get_last_lr()
            for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def seed_step(self, inner_step: int = 0) -> None:
        """A retried or replayed step draws the same numbers, in whatever process."""
        seed_all(self.config.debug.seed or 0, self.lineage.step, self._placement.rank, inner_step)

    def update(self) -> dict[str, float]:
        rates = self.lr_schedulers.get_metrics()
        self.checkpointer.maybe_wait_for_staging()
        if self._window is not None:
            self._window.apply()
        else:
            self.optimizers.step()
        self.lr_schedulers.step()
        self.optimizers.zero_grad()
        return rates

    def discard(self) -> None:
        self.optimizers.zero_grad()

    def committed(self, metrics: dict[str, float]) -> None:
        self._follow_lineage()
        if self.metrics_processor.should_log(self.step):
            self.metrics_processor.ntokens_since_last_log += int(metrics["trained_tokens"])
            self.metrics_processor.data_loading_times.append(metrics["time/wait_batch_s"])
            self.metrics_processor.log(
                self.step, metrics["loss"], metrics["loss"], metrics["grad_norm"], {}
            )

    def _follow_lineage(self) -> None:
        """TorchTitan's own counters."""
        self.step, self.ntokens_seen = self.lineage.step, self.lineage.tokens_seen

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
        processed = super().post_dataloading_process(input_dict, labels)
        # Tokens count once, when their step is committed.
        self.ntokens_seen = self.lineage.tokens_seen
        return processed

    def _clip(self, max_norm: float | None = None) -> torch.Tensor:
        return dist_utils.clip_grad_norm_(
            self._parameters(),
            self.config.training.max_norm if max_norm is None else max_norm,
            foreach=True,
            pp_mesh=self.parallel_dims.get_optional_mesh("pp"),
            ep_enabled=self.parallel_dims.ep_enabled,
        )

    # State that healing and checkpoints carry beside tensors ------------------------------

    def progress(self) -> dict[str, Any]:
        return self.lineage.to_json()

    def load_progress(self, progress: dict[str, Any]) -> None:
        self.lineage.load(progress)
        self._follow_lineage()
        if self._window is not None:
            self._window.void()

    def state_dict(self) -> dict[str, Any]:
        # One string: a checkpoint flattens nested values, and asks for the keys of today.
        return {"progress": json.dumps(self.progress())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.load_progress(json.loads(state_dict["progress"]))

    def close(self) -> None:
        if hasattr(self, "_signals"):
            self._signals.close()
        if hasattr(self, "_beats"):
            self._beats.stop()
        if hasattr(self, "_publisher"):
            self._publisher.close()
        if hasattr(self, "ft_manager"):
            self.ft_manager.leave()
        super().close()
