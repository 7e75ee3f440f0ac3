"""The trainer role: launches the ranks of one replica group and ends with them.

A group of one rank *becomes* the rank, so that its exits and signals pass no middleman. A group
of several has this launcher above it: the death of any rank ends the group, since the others
could only wait for it; with `recovery.inprocess_restart` they begin again in place, with a new
process for the dead one (regrouping.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_rl_ft.config.debug_mode import roles_of_trainers
from torchtitan_rl_ft.config.recovery import RecoverySection
from torchtitan_rl_ft.escalation import RestartLimits
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.host import process, regroup
from torchtitan_rl_ft.host.loop_beats import beating
from torchtitan_rl_ft.host.ports import free_port
from torchtitan_rl_ft.observability.events import EventLog
from torchtitan_rl_ft.observability.otel import export_events
from torchtitan_rl_ft.roles.lifecycle import COMPLETE
from torchtitan_rl_ft.roles.regrouping import POLL_S, Regrouping
from torchtitan_rl_ft.roles.watcher import Watcher, job_limits
from torchtitan_rl_ft.run_folder import (
    ATTEMPT_ENV,
    LIGHTHOUSE_ENV,
    REPLICA_ENV,
    RUN_ENV,
    STANDBY_ENV,
    STANDBY_PORT_ENV,
    TOKEN_ENV,
    RunFolder,
)

if TYPE_CHECKING:
    from torchtitan_rl_ft.config.resolve import Resolved

ROLE_WAIT_TIMEOUT_S = 60.0
"""How long a group waits for another role to come up before it gives up."""

RANK_EXIT_TIMEOUT_S = 10.0
"""Time that the other ranks get between SIGTERM and SIGKILL once the group is ending."""

RANK_COMMAND = ("-m", "torchtitan_rl_ft.trainer.entry")

_POLL_S = 0.1


class RoleMissing(Exception):
    """A role that this one needs is not up."""


def wait_for_role(
    folder: RunFolder,
    name: str,
    timeout_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """The url of role `name` once it is up. Raises RoleMissing at the deadline."""
    deadline = clock() + timeout_s
    while True:
        found = folder.role(name)
        if found is not None and found.alive():
            return found.url
        if clock() >= deadline:
            state = "has ended" if found is not None else "was never up"
            raise RoleMissing(
                f"role {name} {state} in run folder {folder.path} (waited {timeout_s:g} s): start "
                f"the job with `torchtitan run`, or the role with `torchtitan run --role {name}`"
            )
        sleep(_POLL_S)


def group_env(
    base: Mapping[str, str],
    *,
    folder: RunFolder,
    replica_id: int,
    lighthouse_url: str | None,
    master_port: int,
    world_size: int,
) -> dict[str, str]:
    """Environment that the ranks of one group share (torchrun's names)."""
    env = dict(base)
    env |= {
        RUN_ENV: str(folder.path),
        TOKEN_ENV: folder.token(),
        REPLICA_ENV: str(replica_id),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(master_port),
        regroup.GENERATION_ENV: "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }
    if STANDBY_ENV in base:
        env[STANDBY_PORT_ENV] = str(free_port())
    env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun: ranks share the cores
    if lighthouse_url is not None:
        env[LIGHTHOUSE_ENV] = lighthouse_url
    return env


def rank_env(group: Mapping[str, str], rank: int) -> dict[str, str]:
    return {**group, "RANK": str(rank), "LOCAL_RANK": str(rank)}


def main(resolved: Resolved) -> int:
    """Run one replica group; returns its exit code, or does not return (one rank: exec)."""
    section = resolved.sections.fault_tolerance
    folder = RunFolder(resolved.sections.job.dump_folder)
    standby = os.environ.get(STANDBY_ENV, "").partition(":")[0]
    name = standby or f"trainer-{section.replica_id}"
    try:
        lighthouse = _lighthouse_url(folder) if section.enable else None
        if ATTEMPT_ENV not in os.environ:  # by hand: nobody else is about to start these
            for role in roles_of_trainers(resolved.sections.rollout):
                wait_for_role(folder, role, ROLE_WAIT_TIMEOUT_S)
        env = group_env(
            os.environ,
            folder=folder,
            replica_id=section.replica_id,
            lighthouse_url=lighthouse,
            master_port=free_port(),
            world_size=section.ranks_per_group,
        )
    except (RoleMissing, FileNotFoundError) as e:
        print(f"torchtitan: error: {name}: {e}", file=sys.stderr)
        return ExitCode.FAILED
    command = [sys.executable, *RANK_COMMAND]
    if section.ranks_per_group == 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(command[0], command, rank_env(env, 0))
    recovery = resolved.sections.recovery
    with contextlib.closing(_events(folder, name)) as events:
        export_events(events, resolved.sections.otel, folder.token())
        group = RankGroup(
            folder,
            name,
            command,
            env,
            graceful=recovery.exit_signal_handler,
            # A rank that is started again comes as one of a waiting group.
            regrouping=None if standby else _regrouping(folder, name, recovery, events),
        )
        watcher = None
        if ATTEMPT_ENV not in os.environ:  # by hand: no supervisor watches its ranks
            watcher = Watcher(folder, events, job_limits(resolved), only=name)
        return asyncio.run(_launch(group, section.ranks_per_group, watcher))


async def _launch(group: RankGroup, n_ranks: int, watcher: Watcher | None) -> int:
    watching = asyncio.create_task(watcher.run()) if watcher is not None else None
    try:
        return await group.run(n_ranks)
    finally:
        if watching is not None:
            watching.cancel()


def _events(folder: RunFolder, name: str) -> EventLog:
    attempt = int(os.environ.get(ATTEMPT_ENV, "1"))
    return EventLog(folder.events, run=folder.path.name, role="trainer", name=name, attempt=attempt)


def _regrouping(
    folder: RunFolder, name: str, recovery: RecoverySection, events: EventLog
) -> Regrouping | None:
    """None: the death of a rank ends its group."""
    if not recovery.inprocess_restart:
        return None
    limits = RestartLimits(recovery.role_max_restarts, recovery.role_restart_window_s)
    return Regrouping(folder, name, limits, events, free_port)


def _lighthouse_url(folder: RunFolder) -> str:
    given = os.environ.get(LIGHTHOUSE_ENV)
    return given or wait_for_role(folder, "lighthouse", ROLE_WAIT_TIMEOUT_S)


class RankGroup:
    """The ranks of one group on this host."""

    def __init__(
        self,
        folder: RunFolder,
        name: str,
        command: list[str],
        env: Mapping[str, str],
        *,
        graceful: bool = False,
        regrouping: Regrouping | None = None,
    ) -> None:
        """`graceful`: SIGTERM asks the ranks to leave at a step boundary; SIGINT ends them.
        `regrouping`: a dead rank is started again alone, the others begin again in place."""
        self._folder, self._name, self._command, self._env = folder, name, command, env
        self._graceful, self._regrouping = graceful, regrouping

    async def run(self, n_ranks: int) -> int:
        """Start the ranks and wait. 0 when all ended with 0, REQUEUE when all have left at a step
        boundary, else the code of the first that did not (128 + number for a signal); SIGTERM ends
        all, or asks them to leave."""
        async with beating(self._folder.phases, self._name, "launcher"):
            return await self._run(n_ranks)

    async def _run(self, n_ranks: int) -> int:
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        ranks: list[process.Child] = []
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, stopped.set)
        if self._graceful:
            loop.add_signal_handler(signal.SIGTERM, self._ask_to_leave, ranks)
        for rank in range(n_ranks):
            env = rank_env(self._env, rank)
            ranks.append(process.spawn(self._command, log=self._log(rank), env=env))
        waits = {asyncio.create_task(c.wait()): rank for rank, c in enumerate(ranks)}
        stop = asyncio.create_task(stopped.wait())
        failed = await self._first_failure(ranks, waits, stop)
        stop.cancel()
        if failed is None:
            left = any(wait.result() == ExitCode.REQUEUE for wait in waits)
            return ExitCode.REQUEUE if left else ExitCode.DONE
        await self._end(ranks, waits)
        return failed

    @staticmethod
    def _ask_to_leave(ranks: list[process.Child]) -> None:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                rank.send(signal.SIGTERM)

    def _log(self, rank: int) -> Path:
        attempt = int(self._env.get(ATTEMPT_ENV, "1"))
        return self._folder.log_file(f"{self._name}.{rank}", attempt)

    async def _first_failure(
        self,
        ranks: list[process.Child],
        waits: dict[asyncio.Task[int], int],
        stop: asyncio.Task[Any],
    ) -> int | None:
        """`ranks` and `waits` are kept up to date with ranks that are started again."""
        pending = set(waits)
        lost: dict[int, int] = {}  # rank -> how it ended
        look_s = None if self._regrouping is None else POLL_S
        while pending or lost:
            done, _ = await asyncio.wait(
                {*pending, stop}, timeout=look_s, return_when=asyncio.FIRST_COMPLETED
            )
            for wait in done & pending:
                pending.discard(wait)
                rank, code = waits[wait], wait.result()
                if code in COMPLETE:
                    continue
                print(
                    f"torchtitan: error: {self._name}: rank {rank}: {process.describe(code)}; "
                    f"log: {self._log(rank)}",
                    flush=True,
                )
                if not self._may_restart(rank, code, waits):
                    return _exit_code(code)
                lost[rank] = code
                del waits[wait]
            if stop in done:
                return 128 + signal.SIGTERM
            if _finished(waits):  # the others finish too, nobody comes to a rendezvous
                if lost:
                    return _exit_code(next(iter(lost.values())))
            elif self._regrouping is not None:
                env = self._regrouping.next_env(dict(enumerate(ranks)))
                if env is not None:
                    for rank in sorted(lost):
                        wait = self._start_again(ranks, rank, env)
                        waits[wait] = rank
                        pending.add(wait)
                    lost.clear()
        return None

    def _start_again(
        self, ranks: list[process.Child], rank: int, env: Mapping[str, str]
    ) -> asyncio.Task[int]:
        env = {**rank_env(self._env, rank), **env}
        ranks[rank] = process.spawn(self._command, log=self._log(rank), env=env)
        return asyncio.create_task(ranks[rank].wait())

    def _may_restart(self, rank: int, code: int, waits: dict[asyncio.Task[int], int]) -> bool:
        """Not when another rank has finished."""
        return (
            self._regrouping is not None
            and not _finished(waits)
            and self._regrouping.may_restart(rank, code)
        )

    async def _end(self, ranks: list[process.Child], waits: dict[asyncio.Task[int], int]) -> None:
        trees = [p for rank in ranks for p in (rank.id, *process.descendants(rank.id))]
        for rank in ranks:
            if rank.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    rank.send(signal.SIGINT if self._graceful else signal.SIGTERM)
        if waits:
            await asyncio.wait(waits, timeout=RANK_EXIT_TIMEOUT_S)
        await process.kill_until_gone(trees, time.monotonic() + RANK_EXIT_TIMEOUT_S)


def _finished(waits: Iterable[asyncio.Task[int]]) -> bool:
    """Whether a rank has come to the end of the run."""
    return any(wait.done() and wait.result() in COMPLETE for wait in waits)


def _exit_code(returncode: int) -> int:
    """Of a launcher whose rank ended so: as a shell tells signals."""
    return returncode if returncode > 0 else 128 - returncode
