"""Starts training again inside the living process: the same pid, nothing is imported again.

    train fails -> close -> process groups, manager, model and its state are let go -> regroup
    -> train again: built anew, attached to the ledger as a new member, healed or restored

The state is built anew rather than mended: after a failed step nobody can tell which tensors,
process groups and servers are whole (an old torchft server counts the dead attempt's vote). What
is saved is the process: interpreter, libraries, CUDA context, compiled code.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
import torch.distributed.tensor
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from torchtitan_rl_ft.config.recovery import RecoverySection
from torchtitan_rl_ft.escalation import Fault, RestartLimits, Rung, next_step
from torchtitan_rl_ft.host import regroup
from torchtitan_rl_ft.journal.checkpoints import CheckpointUnusable
from torchtitan_rl_ft.journal.client import BatchWaitTimeout
from torchtitan_rl_ft.observability.events import EventSink, Kind
from torchtitan_rl_ft.replica.group import MinimumMismatch
from torchtitan_rl_ft.rpc.client import RoleUnreachable
from torchtitan_rl_ft.run_folder import REPLICA_ENV, RunFolder
from torchtitan_rl_ft.trainer import watch
from torchtitan_rl_ft.trainer.addresses import RunNotUp
from torchtitan_rl_ft.trainer.checkpoint_folder import FoldersDiffer
from torchtitan_rl_ft.trainer.group_link import PeerRankFailed
from torchtitan_rl_ft.trainer.model_spec import ModelConfigError
from torchtitan_rl_ft.trainer.presence import event_sink
from torchtitan_rl_ft.trainer.rerun import WrongResult
from torchtitan_rl_ft.trainer.standby import waits
from torchtitan_rl_ft.trainer.stepper import NumericStop
from torchtitan_rl_ft.weights.shards import ShardsUnclear

logger = logging.getLogger(__name__)

REGROUP_TIMEOUT_S = 120.0
"""How long a rank waits for the others of its group to come as far."""

_POLL_S = 0.05

FAULTS: tuple[tuple[tuple[type[BaseException], ...], Fault], ...] = (
    ((NumericStop,), Fault.NUMERIC),
    (
        (ModelConfigError, CheckpointUnusable, FoldersDiffer, MinimumMismatch, ShardsUnclear),
        Fault.CONFIG,
    ),
    ((WrongResult,), Fault.WRONG_RESULT),
    ((MemoryError, torch.OutOfMemoryError), Fault.MEMORY),
    ((torch.AcceleratorError,), Fault.DEVICE),
    ((BatchWaitTimeout, RoleUnreachable, RunNotUp, FileNotFoundError), Fault.STARVED),
    ((PeerRankFailed, dist.DistNetworkError), Fault.PEER_RANK),
)


def fault_of(error: BaseException) -> Fault:
    """An error out of training, as the table of recovery names it."""
    for types, fault in FAULTS:
        if isinstance(error, types):
            return fault
    return Fault.STEP


class Watched(Protocol):
    """The phase file."""

    def enter(self, phase: str, step: int | None = None) -> None: ...

    def start_again(self, generation: int) -> None: ...


def of_this_rank(train: Callable[[], None], run: RunFolder, recovery: RecoverySection) -> InProcess:
    """With the names of the environment; those of a standby are what they are at a fault."""

    def who() -> tuple[str, EventSink]:
        replica_id = int(os.environ.get(REPLICA_ENV, "0"))
        speaks = os.environ.get("RANK", "0") == "0"
        return f"trainer-{replica_id}", event_sink(run, replica_id, speaks=speaks)

    group, events = who()
    return InProcess(
        train,
        RestartLimits(recovery.inprocess_max_restarts, recovery.role_restart_window_s),
        group=group,
        phases=run.phases,
        file=watch.begin(run.phases),
        events=events,
        renamed=who if waits() else None,
    )


class InProcess:
    """One rank's restarts inside its process."""

    def __init__(
        self,
        train: Callable[[], None],
        limits: RestartLimits,
        *,
        group: str,
        phases: Path,
        file: Watched,
        events: EventSink,
        renamed: Callable[[], tuple[str, EventSink]] | None = None,
    ) -> None:
        """`events`: of the group's first rank, which speaks for it. `renamed`: asked at a fault
        for `group` and `events`."""
        self._train, self._limits = train, limits
        self._group, self._phases, self._file, self._events = group, phases, file, events
        self._renamed = renamed
        self._generation = int(os.environ.get(regroup.GENERATION_ENV, "0"))
        self._alone = os.environ.get("WORLD_SIZE", "1") == "1"

    def run(self) -> None:
        """Train to the end. Raises what ends the process: the error that no restart in process
        mends, or the one after the last."""
        restarts_s: list[float] = []
        while True:
            try:
                self._train()
                return
            except Exception as e:
                now_s = time.monotonic()
                self._decide(e, restarts_s, now_s)
                restarts_s.append(now_s)
                # Its frames hold the trainer: model, process groups, manager.
                traceback.clear_frames(e.__traceback__)
            self._begin_again()

    def _decide(self, error: Exception, restarts_s: list[float], now_s: float) -> None:
        """Raises `error` when the next rung is another one."""
        if self._renamed is not None:
            self._group, self._events = self._renamed()
        fault = fault_of(error)
        step = next_step(
            fault,
            limits={Rung.IN_PROCESS: self._limits},
            restarts_s={Rung.IN_PROCESS: restarts_s},
            now_s=now_s,
        )
        cause = f"{type(error).__name__}: {error}"
        if step.rung is not Rung.IN_PROCESS:
            self._events.emit(
                Kind.ESCALATE,
                phase=Rung.JOB if step.rung is Rung.JOB and fault.ends_the_job else Rung.ROLE,
                cause=f"{step.reason or fault}: {cause}",
                subject=self._group,
                fault=fault,
            )
            raise error
        logger.exception("%s: starting again in this process", fault)
        self._events.emit(
            Kind.RESTART,
            phase=Rung.IN_PROCESS,
            cause=cause,
            subject=self._group,
            attempt=len(restarts_s) + 1,
            delay_s=0.0,  # others wait for this group: the first rung has no pause
            fault=fault,
        )

    def _begin_again(self) -> None:
        self._file.enter(regroup.RESTARTING)
        let_go()
        found = self._next_generation()
        os.environ["MASTER_PORT"] = str(found.master_port)
        os.environ[regroup.GENERATION_ENV] = str(found.generation)
        self._generation = found.generation
        self._file.start_again(found.generation)

    def _next_generation(self) -> regroup.Generation:
        """Raises TimeoutError when the rest of the group does not come."""
        if self._alone:
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                return regroup.Generation(self._generation + 1, s.getsockname()[1])
        end = time.monotonic() + REGROUP_TIMEOUT_S
        while time.monotonic() < end:
            found = regroup.read(self._phases, self._group)
            if found is not None and found.generation > self._generation:
                return found
            time.sleep(_POLL_S)
        raise TimeoutError(f"{self._group} did not regroup within {REGROUP_TIMEOUT_S:g} s")


def let_go() -> None:
    """Of everything of torch.distributed, and of the memory of what is referred to no more."""
    gc.collect()
    if dist.is_initialized():
        if dist.get_backend() == "nccl":  # a kernel that waits for a dead peer never ends
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()
    # What DTensor keeps for the process is bound to meshes that are gone, and holds their groups.
    torch.distributed.tensor._random._rng_tracker = None
    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    for cached in [o for o in gc.get_objects() if isinstance(o, functools._lru_cache_wrapper)]:
        if (cached.__module__ or "").startswith("torch.distributed"):
            cached.cache_clear()
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
