"""One replica group in torchft's quorum, behind TorchTitan's `TorchFTManager` seam."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torchft
from torch.distributed.distributed_c10d import ReduceOp
from torchtitan.experiments.torchft.config import FaultTolerance
from torchtitan.experiments.torchft.manager import TorchFTManager

from torchtitan_rl_ft.replica.live_state import LiveState
from torchtitan_rl_ft.replica.rendezvous import RendezvousClient
from torchtitan_rl_ft.replica.state_transport import StateTransport
from torchtitan_rl_ft.run_folder import LIGHTHOUSE_ENV

logger = logging.getLogger(__name__)

STATE_KEY = "rl"
REPLICA_PREFIX = "torchtitan_ft_"


def replica_name(replica_id: int) -> str:
    """A group's name in torchft; it adds ":" and a random id of the process."""
    return f"{REPLICA_PREFIX}{replica_id:05d}"


def trainer_name(member: str) -> str:
    """The name in the run (`trainer-1`) of a member of a quorum."""
    name = member.split(":")[0]
    number = name.removeprefix(REPLICA_PREFIX)
    return f"trainer-{int(number)}" if number.isdigit() else name


class NoQuorum(RuntimeError):
    """Too few groups came together in time."""


class MinimumMismatch(Exception):
    """The lighthouse forms quorums that may not commit: it has another minimum than this group."""


@dataclass(frozen=True)
class Heal:
    """How this group came to a peer's state: seconds until the quorum stood (lighthouse, process
    group), of the transfer, and of copying it in place."""

    source: str
    n_bytes: int
    quorum_s: float
    transfer_s: float
    load_s: float

    @property
    def transfer_share(self) -> float:
        return self.transfer_s / max(self.quorum_s + self.transfer_s + self.load_s, 1e-9)


@dataclass(frozen=True)
class Quorum:
    """The groups that train this step."""

    participants: int
    rank: int | None  # this group's place among them; None: takes no part
    quorum_id: int  # as the lighthouse numbers it
    members: list[str] = field(default_factory=list)
    healed: bool = False  # this group just took a peer's state
    must_heal: bool = False  # it was behind
    heal: Heal | None = None  # how it went


class ReplicaGroup(TorchFTManager):
    """TorchTitan's manager with our timeouts, transport and rendezvous.

    The quorum is synchronous: after `start_quorum` this group is healed and takes part, nothing
    of a peer's state arrives later in the step, and no state is read while FSDP computes. That
    costs one round trip to the lighthouse per step and closes the races of the asynchronous mode.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FaultTolerance):
        replica_groups: int = 2
        ranks_per_group: int = 1
        heartbeat_interval_ms: int = 100
        heartbeat_timeout_ms: int = 5000
        join_timeout_ms: int = 1000
        quorum_tick_ms: int = 50
        lighthouse_min_replicas: int = 0
        quorum_timeout_s: int = 300
        quorum_retries: int = 299
        connect_timeout_s: int = 20
        manager_timeout_s: int = 60
        max_commit_retries: int = 20
        heal_address: str = ""
        heal_port: int = 0
        heal_warn_share: float = 0.5
        outer_lr: float = 0.7
        outer_momentum: float = 0.9

    def __init__(self, config: Config) -> None:
        self.config = config
        self.replica_id = config.replica_id
        self.group_size = config.group_size
        self.use_async_quorum = False
        self._manager: torchft.Manager | None = None
        self._client: RendezvousClient | None = None
        self._transport: StateTransport | None = None
        self._load_s = 0.0
        self.quorum_id = 0
        """Of the last quorum, as the lighthouse numbers it."""
        self.collective_failed = False
        """In the last attempt, a sum over the groups, or forming their process group."""
        if config.enable:
            # No manager yet: one that beats without asking for a quorum counts against the
            # majority. `join` makes it, once the group is ready to train.
            _require_lighthouse()

    @property
    def enabled(self) -> bool:
        return self.config.enable

    def get_dp_info(self, dp_degree: int, dp_rank: int) -> tuple[int, int]:
        """A batch belongs to a step: replica groups never enter data parallelism."""
        return dp_degree, dp_rank

    def maybe_set_all_reduce_hook(self, model_parts: list[torch.nn.Module]) -> None:
        """Gradients are summed after the last micro-batch instead (trainer/gradients.py)."""

    def take_place(self, replica_id: int) -> None:
        """Be this group from now on; before `join`."""
        self.replica_id = self.config.replica_id = replica_id

    def join(self, state: LiveState, token: str, step: int, batches_committed: int) -> None:
        """Build the manager and announce this group. `step`: commits that its state holds;
        `batches_committed`: groups that took part in them, in sum."""
        if not self.enabled:
            return
        c = self.config
        timeout = timedelta(seconds=c.manager_timeout_s)
        # torchft takes its limits from the environment; ours are config.
        host = os.environ.get("TORCHTITAN_RL_FT_HOST", "127.0.0.1")
        rank = int(os.environ.get("RANK", "0"))
        self._transport = StateTransport(
            host,
            token,
            timeout,
            advertised=c.heal_address,
            port=c.heal_port,
            place=c.replica_id * c.ranks_per_group + rank,
        )
        self._manager = torchft.Manager(
            pg=_process_group(c),
            min_replica_size=c.min_replica_size,
            load_state_dict=None,
            state_dict=None,
            use_async_quorum=False,
            # Replica ids sort as strings.
            replica_id=replica_name(c.replica_id),
            timeout=timeout,
            quorum_timeout=timedelta(seconds=c.quorum_timeout_s),
            connect_timeout=timedelta(seconds=c.connect_timeout_s),
            heartbeat_interval=timedelta(milliseconds=c.heartbeat_interval_ms),
            quorum_retries=c.quorum_retries,
            hostname=host,
            checkpoint_transport=self._transport,
            # All groups load the same initial weights from file.
            init_sync=False,
            # Retries are counted by the trainer, while the members are unchanged.
            max_retries=None,
        )
        self._client = RendezvousClient(self._manager._client)
        self._manager._client = self._client  # type: ignore[assignment]

        def load(value: Any) -> None:
            started_s = time.monotonic()
            state.load_state_dict(value)
            self._load_s = time.monotonic() - started_s

        self._manager.register_state_dict_fn(STATE_KEY, load, state.state_dict)
        self.set_step(step, batches_committed)
        logger.info("torchft: step %d, %d batches committed", step, batches_committed)
        logger.warning(
            "torchft's manager server (rank 0 of each group) listens on all interfaces and answers "
            "without credentials, kill calls included: keep its port behind a firewall"
        )

    def set_step(self, step: int, batches_committed: int | None = None) -> None:
        """Tell torchft how many commits this state holds; 0 makes the next quorum heal it. Its
        count of batches stays as it is where none is given."""
        if self._manager is not None:
            if batches_committed is None:
                batches_committed = self._manager.batches_committed()
            state = {"step": step, "batches_committed": batches_committed}
            self._manager.load_state_dict(state)

    def start_quorum(self) -> Quorum:
        """Wait for a quorum and, when behind, take a peer's state. What went wrong with the process
        group or the state is in `errored` and refuses this attempt.

        Raises NoQuorum when none forms within the limits, MinimumMismatch when one is too small to
        commit, and what copying a peer's state raises.
        """
        if self._manager is None:
            alone = [replica_name(self.config.replica_id)]
            return Quorum(participants=1, rank=0, quorum_id=0, members=alone)
        started_s = time.monotonic()
        self._ask()
        assert self._client is not None and self._client.latest is not None
        latest = self._client.latest
        self.quorum_id = latest.lighthouse_quorum_id
        if len(latest.replica_ids) < self.config.min_replica_size:
            raise MinimumMismatch(
                f"the lighthouse formed a quorum of {len(latest.replica_ids)} group(s), but "
                f"fault_tolerance.min_replica_size is {self.config.min_replica_size}: no step "
                "could be committed. Start the lighthouse with the configuration of the job"
            )
        must_heal = bool(latest.heal)
        healed = must_heal and self._manager.errored() is None
        return Quorum(
            participants=self._manager.num_participants(),
            rank=self._manager.participating_rank(),
            quorum_id=latest.lighthouse_quorum_id,
            members=list(latest.replica_ids),
            healed=healed,
            must_heal=must_heal,
            heal=self._healed(started_s) if healed else None,
        )

    def _ask(self) -> None:
        assert self._manager is not None and self._client is not None
        self._client.latest = None
        started_s = time.monotonic()
        try:
            self._manager.start_quorum(allow_heal=True)
        except (RuntimeError, TimeoutError) as e:
            if self._client.latest is not None:  # it stood; what failed came after
                raise
            c, waited_s = self.config, time.monotonic() - started_s
            ranks = "every rank of this group, " if c.ranks_per_group > 1 else ""
            raise NoQuorum(
                f"no quorum within fault_tolerance.quorum_timeout_s = {c.quorum_timeout_s}, "
                f"quorum_retries = {c.quorum_retries} (after {waited_s:.1f} s: {e}): the "
                f"lighthouse ({os.environ.get(LIGHTHOUSE_ENV)}) has to be up, {ranks}and as many "
                "groups as fault_tolerance.lighthouse_min_replicas says, or min_replica_size = "
                f"{c.min_replica_size} where that is 0"
            ) from e

    def _healed(self, started_s: float) -> Heal:
        assert self._transport is not None and self._transport.transfer is not None
        transfer = self._transport.transfer
        return Heal(
            source=transfer.source,
            n_bytes=transfer.n_bytes,
            quorum_s=transfer.started_s - started_s,
            transfer_s=transfer.seconds,
            load_s=self._load_s,
        )

    def all_reduce(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Start the sum of `tensor` over the groups, in place; returns its wait.

        A failure never raises: it is kept and refuses the commit.
        """
        if self._manager is None:
            return lambda: None
        work = self._manager.allreduce(tensor, reduce_op=ReduceOp.SUM)
        return lambda: _wait(work)

    def report_error(self, error: Exception) -> None:
        if self._manager is not None:
            self._manager.report_error(error)

    def errored(self) -> Exception | None:
        """The first failure of this step."""
        wrapped = self._manager.errored() if self._manager is not None else None
        return wrapped.original_exception if wrapped is not None else None

    def should_commit(self, local: bool) -> bool:
        """The group's vote: True only when every rank says so and enough groups take part."""
        if self._manager is None:
            return local
        self.collective_failed = self._manager.errored() is not None
        if not local and not self.collective_failed:
            self._manager.report_error(RuntimeError("this rank refuses the step"))
        return self._manager.should_commit()

    def leave(self) -> None:
        """Stop beating, so that the other groups do not wait a heartbeat timeout for us."""
        if self._manager is not None:
            self._manager.shutdown(wait=False)
            # Its sockets and threads must not outlive it: the process may begin again.
            self._manager._pg.abort()
            self._manager = self._client = None


def _wait(work: Any) -> None:
    work.wait()


def _process_group(config: ReplicaGroup.Config) -> Any:
    timeout = timedelta(milliseconds=config.process_group_timeout_ms)
    if config.process_group == "gloo":
        return torchft.ProcessGroupGloo(timeout=timeout)
    if config.process_group == "nccl":
        return torchft.ProcessGroupNCCL(timeout=timeout)
    raise ValueError(
        f"fault_tolerance.process_group {config.process_group!r} is not one of gloo, nccl"
    )


def _require_lighthouse() -> None:
    if not os.environ.get(LIGHTHOUSE_ENV):
        raise RuntimeError(
            f"no lighthouse: {LIGHTHOUSE_ENV} is not set and the run folder names none that is up"
        )
