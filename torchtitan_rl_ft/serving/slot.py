"""A place for an engine: starts one, keeps it at the required version, replaces it when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from torchtitan_rl_ft.config.sections import RolloutSection
from torchtitan_rl_ft.host.log_tail import last_lines
from torchtitan_rl_ft.host.process import describe
from torchtitan_rl_ft.observability.events import EventSink, Kind
from torchtitan_rl_ft.run_folder import RunFolder
from torchtitan_rl_ft.serving.budget import StartBudget
from torchtitan_rl_ft.serving.changes import Changes
from torchtitan_rl_ft.serving.engine import Engine
from torchtitan_rl_ft.serving.engine_client import (
    EngineClient,
    EngineRefused,
    EngineUnreachable,
)
from torchtitan_rl_ft.serving.engine_process import EngineProcess, EngineRecords
from torchtitan_rl_ft.serving.launch import Launcher
from torchtitan_rl_ft.serving.prober import Prober
from torchtitan_rl_ft.serving.samples import AnswerInvalid
from torchtitan_rl_ft.serving.states import EngineState
from torchtitan_rl_ft.weights.installer import Installer, InstallFailed
from torchtitan_rl_ft.weights.manifest import WeightsInvalid
from torchtitan_rl_ft.weights.proof import Proof
from torchtitan_rl_ft.weights.transports.base import Release, TransportFailed

READY_POLL_S = 0.1
OBSERVE_S = 1.0
INSTALL_TRIES = 2
INSTALL_RETRY_DELAY_S = 0.2

GIVEN_UP_LOG_LINES = 4
"""Fewer than are shown of the log of serving itself, which tells this too."""

REFUSED_EXIT_CODE = 2
"""Of a program that refuses its command line: the next start would meet the same error."""

INSTALL_ERRORS = (
    InstallFailed,
    EngineRefused,
    EngineUnreachable,
    AnswerInvalid,
    TransportFailed,
    WeightsInvalid,
)


@dataclass(frozen=True)
class Target:
    """The version that every engine is to hold, and how it proves that it does."""

    release: Release
    proof: Proof


@dataclass
class Shared:
    """What the slots of a pool have in common."""

    rollout: RolloutSection
    folder: RunFolder
    events: EventSink
    launcher: Launcher
    http: aiohttp.ClientSession
    installer: Installer
    prober: Prober
    records: EngineRecords
    changes: Changes
    target: Target | None = None
    clock: Callable[[], float] = time.monotonic


class Retire(Exception):
    """This engine has to go; the message says why."""


class Slot:
    """Runs engine after engine until `close`, or until its start budget is spent."""

    def __init__(self, index: int, shared: Shared) -> None:
        self.index, self._shared = index, shared
        self.name = f"engine-{index}"
        self.engine: Engine | None = None
        self.starts = 0
        self.given_up: str | None = None
        """Why no engine will be started here again."""
        self.came_up = False
        """An engine has come up here at least once."""
        self._closing = False
        self._last_log: Path | None = None
        self._task: asyncio.Task[None] | None = None
        rollout = shared.rollout
        starts = max(1, rollout.engine_max_restarts)
        self._budget = StartBudget(starts, rollout.engine_restart_window_s)

    def open(self) -> None:
        self._task = asyncio.create_task(self._run(), name=self.name)
        self._task.add_done_callback(lambda _: self._shared.changes.notify())

    async def close(self) -> None:
        """End the engine, whatever it is doing."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    @property
    def failure(self) -> BaseException | None:
        """An error in the slot's own code: it has stopped working."""
        if self._task is None or not self._task.done() or self._task.cancelled():
            return None
        return self._task.exception()

    def to_json(self) -> dict[str, Any]:
        if self.engine is not None:
            shown = self.engine.to_json()
        else:
            shown = {
                "slot": self.index,
                "state": str(EngineState.RETIRED),
                "version": None,
                "pid": None,
                "start_time": None,
                "url": None,
                "reason": self.given_up or "not started yet",
                "in_flight": 0,
                "log": None,
            }
        return {**shown, "restarts": max(0, self.starts - 1), "given_up": self.given_up is not None}

    # Lives ----------------------------------------------------------------------------------

    async def _run(self) -> None:
        last_reason = ""
        while True:
            now = self._shared.clock()
            delay_s = self._budget.delay_s(now)
            if delay_s is None:
                self._give_up(f"{self._spent()}; last: {last_reason}")
                return
            if self.starts:
                self._shared.events.emit(
                    Kind.RESTART,
                    cause=last_reason,
                    subject=self.name,
                    attempt=self.starts + 1,
                    delay_s=delay_s,
                )
            await asyncio.sleep(delay_s)
            self._budget = self._budget.started(self._shared.clock())
            self.starts += 1
            try:
                engine = self._start()
            except OSError as e:
                last_reason = f"cannot be started: {e}"
                continue
            last_reason = await self._live(engine)
            refused = engine.process.child.returncode == REFUSED_EXIT_CODE
            if refused and not engine.up.is_set():
                self._give_up("refused its command line (rollout.engine_args)")
                return

    def _spent(self) -> str:
        rollout = self._shared.rollout
        return (
            f"was started {rollout.engine_max_restarts} times within "
            f"{rollout.engine_restart_window_s:g} s (rollout.engine_max_restarts)"
        )

    def _give_up(self, why: str) -> None:
        self.given_up = f"{self.name} {why}"
        if self._last_log is not None:
            lines = last_lines(self._last_log, GIVEN_UP_LOG_LINES)
            self.given_up += "\n    ".join([f"; log: {self._last_log}", *lines])
        self._shared.events.emit(Kind.FAULT, cause=self.given_up, subject=self.name)
        self._shared.changes.notify()

    def _start(self) -> Engine:
        """Raises OSError."""
        shared = self._shared
        attempt = next_attempt(shared.folder, self.name)
        log = self._last_log = shared.folder.log_file(self.name, attempt)
        launch = shared.launcher.prepare(self.index)
        process = EngineProcess.start(launch, log)
        shared.events.emit(
            Kind.SPAWN,
            subject=self.name,
            attempt=attempt,
            pid=process.id.pid,
            start_time=process.id.start_time,
            log=str(log),
        )
        client = EngineClient(shared.http, launch.url, self.name)
        self.engine = Engine(self.index, process, client, shared.events, shared.changes)
        shared.changes.notify()
        return self.engine

    async def _live(self, engine: Engine) -> str:
        """Until the engine is retired; returns why. A process exit is noticed at once."""
        exited = asyncio.create_task(engine.process.child.wait())
        tasks = {
            asyncio.create_task(_reason(self._keep_current(engine))),
            asyncio.create_task(_reason(self._watch_workers(engine))),
            asyncio.create_task(_reason(self._shared.prober.watch(engine))),
        }
        reason = "serving ends"
        try:
            await asyncio.wait({exited, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                reason = f"{describe(exited.result())} while {engine.state}"
            else:
                reason = next(t for t in tasks if t.done()).result()
        finally:
            for task in (exited, *tasks):
                task.cancel()
            retiring = asyncio.create_task(self._retire(engine, reason))
            try:
                await asyncio.shield(retiring)
            except asyncio.CancelledError:
                await retiring
                raise
            await asyncio.gather(exited, *tasks, return_exceptions=True)
        return reason

    async def _retire(self, engine: Engine, reason: str) -> None:
        """Out of routing first, then dead, then forgotten."""
        shared, rollout = self._shared, self._shared.rollout
        engine.move(EngineState.RETIRED, reason)
        left = await engine.process.end(shared.clock() + rollout.cleanup_timeout)
        await asyncio.to_thread(shared.records.remove, self.index)
        child = engine.process.child
        code = child.returncode
        fault = not self._closing
        shared.events.emit(
            Kind.EXIT,
            phase="fault" if fault else "stop",
            cause=reason,
            subject=self.name,
            pid=child.pid,
            returncode=code,
            signal=-code if code is not None and code < 0 else None,
            uptime_s=round(shared.clock() - child.started_mono_s, 3),
            log=str(child.log),
            last_lines=last_lines(child.log) if fault else [],
            survivors=[p.pid for p in left],
        )
        self.engine = None
        shared.changes.notify()

    # One life -------------------------------------------------------------------------------

    async def _keep_current(self, engine: Engine) -> str:
        """Bring the engine up and give it every version that becomes the target.

        Raises Retire.
        """
        await self._come_up(engine)
        engine.up.set()
        self.came_up = True
        engine.move(EngineState.STALE, "up, holds no published version")
        while True:
            await self._shared.changes.wait_until(lambda: self._behind(engine), 3600.0)
            if (target := self._shared.target) is not None and self._behind(engine):
                engine.loading = target.release.version
                try:
                    await self._install(engine, target)
                finally:
                    engine.loading = None

    async def _watch_workers(self, engine: Engine) -> str:
        """The reason when a part of the engine is gone while its main process is up."""
        await engine.up.wait()
        reason = await engine.process.worker_gone()
        self._shared.events.emit(Kind.FAULT, cause=reason, subject=engine.name)
        return reason

    def _behind(self, engine: Engine) -> bool:
        """Whether the engine needs the target version. A suspect is cleared first."""
        target = self._shared.target
        return (
            target is not None
            and engine.version != target.release.version
            and engine.state in (EngineState.STALE, EngineState.SERVING, EngineState.PAUSED)
        )

    async def _come_up(self, engine: Engine) -> None:
        """Raises Retire at the start limit; an exit is noticed elsewhere."""
        await asyncio.to_thread(self._shared.records.put, self.index, engine.process)
        limit_s = self._shared.rollout.engine_start_timeout_s
        end = self._shared.clock() + limit_s
        observed = 0.0
        while True:
            now = self._shared.clock()
            if now >= end:
                raise Retire(f"did not come up within {limit_s:g} s (engine_start_timeout_s)")
            if now - observed >= OBSERVE_S:
                observed = now
                await asyncio.to_thread(engine.process.observe)
            try:
                await engine.client.model_info(timeout_s=max(0.1, min(2.0, end - now)))
            except (EngineUnreachable, EngineRefused, AnswerInvalid):
                await asyncio.sleep(READY_POLL_S)
                continue
            engine.process.observe()
            await asyncio.to_thread(self._shared.records.put, self.index, engine.process)
            self._shared.events.emit(
                Kind.READY,
                subject=self.name,
                url=engine.client.url,
                start_s=round(self._shared.clock() - engine.process.child.started_mono_s, 3),
            )
            return

    async def _install(self, engine: Engine, target: Target) -> None:
        """Raises Retire when the engine cannot be brought to the target."""
        shared, release = self._shared, target.release
        if engine.state is not EngineState.STALE:
            engine.move(EngineState.STALE, f"version {release.version} is required")
        reason = ""
        for attempt in range(1, INSTALL_TRIES + 1):
            async with self._quiet(engine):
                engine.move(EngineState.INSTALLING, f"version {release.version}")
                digest_before, engine.digest = engine.digest, None
                try:
                    took = await shared.installer.install(
                        engine.client, release, target.proof, digest_before
                    )
                except INSTALL_ERRORS as e:
                    reason = f"version {release.version} not installed: {e}"
                    shared.events.emit(
                        Kind.FAULT,
                        cause=reason,
                        version=release.version,
                        subject=engine.name,
                        attempt=attempt,
                    )
                    engine.version = None
                    engine.move(EngineState.STALE, reason)
                else:
                    engine.version, engine.digest = release.version, target.proof.model_digest
                    self._announce(engine, target, took)
                    return
            if shared.target is not target:
                return  # superseded meanwhile
            await asyncio.sleep(INSTALL_RETRY_DELAY_S)
        raise Retire(reason)

    @contextlib.asynccontextmanager
    async def _quiet(self, engine: Engine) -> AsyncIterator[None]:
        """No probe beside an install. Raises Retire when a probe holds on for too long."""
        limit_s = self._shared.rollout.install_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await engine.quiet.acquire()
        except TimeoutError:
            raise Retire(f"a probe did not end within {limit_s:g} s (install_timeout_s)") from None
        try:
            yield
        finally:
            engine.quiet.release()

    def _announce(self, engine: Engine, target: Target, took: Any) -> None:
        release = target.release
        self._shared.events.emit(
            Kind.INSTALL,
            version=release.version,
            step=release.step,
            slot=self.index,
            subject=engine.name,
            proof=target.proof.kind,
            transport=self._shared.installer.transport,
            load_ms=round(took.load_s * 1000, 1),
            prove_ms=round(took.prove_s * 1000, 1),
            paused_ms=round(took.paused_s * 1000, 1),
        )
        engine.move(EngineState.SERVING, f"holds version {release.version}, proved by checksum")


async def _reason(work: Coroutine[Any, Any, str]) -> str:
    try:
        return await work
    except Retire as e:
        return str(e)


def next_attempt(folder: RunFolder, name: str) -> int:
    """Number of the next start of `name`, from the logs of earlier ones."""
    logs = folder.log_file(name, 1).parent.glob("attempt_*.log")
    numbers = [int(f.stem.removeprefix("attempt_")) for f in logs if f.stem[8:].isdigit()]
    return max(numbers, default=0) + 1
