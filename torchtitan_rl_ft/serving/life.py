"""One life of an engine: it comes up, is kept current, is watched, and is retired."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from typing import Any

from torchtitan_rl_ft.host.log_tail import last_lines
from torchtitan_rl_ft.observability.events import Kind
from torchtitan_rl_ft.serving.duties import Boundary, Duty
from torchtitan_rl_ft.serving.engine import Engine
from torchtitan_rl_ft.serving.engine_client import EngineRefused, EngineUnreachable
from torchtitan_rl_ft.serving.engine_process import WorkerGone
from torchtitan_rl_ft.serving.samples import AnswerInvalid
from torchtitan_rl_ft.serving.shared import Shared, Target
from torchtitan_rl_ft.serving.states import EngineState
from torchtitan_rl_ft.serving.updates import Retire, update
from torchtitan_rl_ft.serving.vacancy import vacate

READY_POLL_S = 0.1
OBSERVE_S = 1.0


class Life:
    """`run` lasts until the engine is retired, whatever the reason."""

    def __init__(self, engine: Engine, shared: Shared) -> None:
        self.engine, self._shared = engine, shared
        self.ending = False
        """The end is wanted: no fault."""
        self.lost: Boundary | None = None
        """What its replacement has to wait for, once it is retired."""
        self._vacated: asyncio.Future[tuple[str, float]] = (
            asyncio.get_running_loop().create_future()
        )
        self._worker: WorkerGone | None = None
        self._unit = shared.unit(engine.plan)

    async def run(self) -> str:
        """Why the engine was retired. A process exit is noticed at once."""
        engine = self.engine
        tasks: list[asyncio.Future[str]] = [
            asyncio.create_task(engine.process.wait()),
            asyncio.create_task(_reason(self._keep_current())),
            asyncio.create_task(_reason(self._watch_workers())),
            asyncio.create_task(_reason(self._shared.prober.watch(engine))),
            asyncio.create_task(self._leave()),
            self._unit.join(engine),
        ]
        reason = "serving ends"
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            reason = next(t for t in tasks if t.done()).result()
            if (ended := engine.process.ended) is not None:  # its workers end with it
                reason = f"{ended} while {engine.state}"
        finally:
            for task in tasks:
                task.cancel()
            await _to_the_end(self._retire(reason))
            await asyncio.gather(*tasks, return_exceptions=True)
        return reason

    def vacate(self, reason: str, limit_s: float) -> None:
        """Its place is wanted: the engine is to let go of its work within `limit_s`, and end."""
        if not self._vacated.done():
            self._vacated.set_result((reason, limit_s))

    async def _leave(self) -> str:
        reason, limit_s = await self._vacated
        self.ending = True
        await vacate(self.engine, limit_s)
        return reason

    async def _watch_workers(self) -> str:
        """The reason when a part of the engine is gone while its main process is up."""
        await self.engine.up.wait()
        gone = self._worker = await self.engine.process.worker_gone()
        self._shared.events.emit(Kind.FAULT, cause=str(gone), subject=self.engine.name)
        return str(gone)

    # Up and current -------------------------------------------------------------------------

    async def _keep_current(self) -> str:
        """Bring the engine up and give it every version that becomes the target.

        Raises Retire.
        """
        engine, changes = self.engine, self._shared.changes
        await self._come_up()
        if engine.duty is Duty.STANDBY:
            engine.move(EngineState.STANDBY, "up, kept for the next fault")
            await changes.wait_until(lambda: self._promoted, math.inf)
        engine.move(EngineState.STALE, "up, holds no published version")
        while True:
            await changes.wait_until(self._behind, math.inf)
            if (target := self._target) is not None and self._behind():
                engine.loading = target.release.version
                try:
                    await update(engine, target, self._shared)
                finally:
                    engine.loading = None

    @property
    def _promoted(self) -> bool:
        """A suspect is cleared first."""
        return self.engine.duty is Duty.ACTIVE and self.engine.state is EngineState.STANDBY

    @property
    def _target(self) -> Target | None:
        return self._shared.target_for(self.engine.plan)

    def _behind(self) -> bool:
        """Whether the engine needs the target version, and may take it. A suspect is cleared
        first."""
        engine, target = self.engine, self._target
        return (
            target is not None
            and engine.version != target.release.version
            and engine.state in (EngineState.STALE, EngineState.SERVING, EngineState.PAUSED)
            and self._shared.may_join(engine)
        )

    async def _come_up(self) -> None:
        """Its limit is the prober's; an exit is noticed elsewhere."""
        engine, shared = self.engine, self._shared
        await self._record()
        engine.process.release()
        adopted = engine.process.adopted
        began = shared.clock() if adopted else engine.process.main.started_mono_s
        observed = 0.0
        stranger = False
        while True:
            now = shared.clock()
            if now - observed >= OBSERVE_S:
                observed = now
                await asyncio.to_thread(engine.process.observe)
            try:
                await engine.client.model_info(timeout_s=2.0)
            except (EngineUnreachable, EngineRefused, AnswerInvalid):
                await asyncio.sleep(READY_POLL_S)
                continue
            await asyncio.to_thread(engine.process.observe)
            if not await asyncio.to_thread(engine.process.listens):
                if not stranger:
                    stranger = True
                    cause = f"another process listens at its address, {engine.client.url}"
                    shared.events.emit(Kind.WARN, cause=cause, subject=engine.name)
                await asyncio.sleep(OBSERVE_S)
                continue
            engine.up.set()
            await self._record()
            shared.events.emit(
                Kind.READY,
                subject=engine.name,
                url=engine.client.url,
                adopted=adopted,
                start_s=round(shared.clock() - began, 3),
            )
            return

    async def _record(self) -> None:
        await asyncio.to_thread(self._shared.records.put, self.engine.record())

    # End ------------------------------------------------------------------------------------

    async def _retire(self, reason: str) -> None:
        """Out of routing first, then fenced, dead, forgotten."""
        engine, shared = self.engine, self._shared
        self.lost = shared.boundary(engine.plan)
        engine.move(EngineState.RETIRED, reason)
        self._unit.leave(engine, reason)
        engine.client.fence()
        await shared.deregistration.forget(engine)
        # How it ended by itself; what is still running is killed next, which is no news.
        code = self._worker.returncode if self._worker else engine.process.returncode
        left = await engine.process.end(shared.clock() + shared.rollout.cleanup_timeout)
        await asyncio.to_thread(shared.records.remove, engine.slot)
        main = engine.process.main
        fault = not self.ending
        shared.events.emit(
            Kind.EXIT,
            phase="fault" if fault else "stop",
            cause=reason,
            subject=engine.name,
            pid=main.pid,
            process=self._worker.title if self._worker else "server",
            returncode=code,
            signal=-code if code is not None and code < 0 else None,
            uptime_s=round(shared.clock() - main.started_mono_s, 3),
            log=str(main.log),
            last_lines=last_lines(main.log) if fault else [],
            survivors=[p.pid for p in left],
        )


async def _reason(work: Coroutine[Any, Any, str]) -> str:
    try:
        return await work
    except Retire as e:
        return str(e)


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """`work`, which has a limit of its own, however often the caller is cancelled meanwhile."""
    task, cancelled = asyncio.create_task(work), False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError
