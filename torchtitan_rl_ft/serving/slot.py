"""A place for an engine: what runs there next, and how often it may be tried."""

from __future__ import annotations

import asyncio
import contextlib
import math
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.host.log_tail import last_lines
from torchtitan_rl_ft.observability.events import Kind
from torchtitan_rl_ft.serving.budget import StartBudget
from torchtitan_rl_ft.serving.duties import Boundary, Duty, Place
from torchtitan_rl_ft.serving.engine import Engine
from torchtitan_rl_ft.serving.engine_client import MEMORY, EngineClient
from torchtitan_rl_ft.serving.engine_process import EngineProcess
from torchtitan_rl_ft.serving.engine_records import EngineRecord, Memory
from torchtitan_rl_ft.serving.groups import SlotPlan
from torchtitan_rl_ft.serving.launch import Launch
from torchtitan_rl_ft.serving.life import Life
from torchtitan_rl_ft.serving.loans import Loan
from torchtitan_rl_ft.serving.shared import Shared
from torchtitan_rl_ft.serving.states import EngineState

GIVEN_UP_LOG_LINES = 4
"""Fewer than are shown of the log of serving itself, which tells this too."""

ADDRESS_TRIES = 16

REFUSED_EXIT_CODE = 2
"""Of a program that refuses its command line: the next start would meet the same error."""


class Slot:
    """Runs engine after engine until `close`, or until its start budget is spent. The first one
    may be an adopted one."""

    def __init__(self, plan: SlotPlan, shared: Shared) -> None:
        self.plan, self.index, self._duty = plan, plan.slot, plan.duty
        self._shared = shared
        self.name = f"engine-{self.index}"
        self.lives = 0
        self.given_up: str | None = None
        """Why no engine will be started here again."""
        self.given_up_mono_s = 0.0
        self.came_up = False
        """An engine has come up here at least once."""
        self._life: Life | None = None
        self._last_log: Path | None = None
        self._last_reason = ""
        self._lost: Boundary | None = None
        """The loss of the last engine; None before the first one's."""
        self._task: asyncio.Task[None] | None = None
        self.loan: Loan | None = None
        """Who has the place: no engine is started meanwhile."""
        self._budget = self._whole_budget()

    def open(
        self,
        record: EngineRecord | None = None,
        *,
        lost: bool = False,
        loan: Loan | None = None,
    ) -> None:
        """Start an engine, or adopt the one of `record`. `lost`: there was one that an earlier
        serving role has lost. `loan`: the place was lent by it."""
        self.loan = loan
        if lost and loan is None:
            self._lost = Boundary("at_once", 0)
        self._task = asyncio.create_task(self._run(record), name=self.name)
        self._task.add_done_callback(lambda _: self._shared.changes.notify())

    async def close(self) -> None:
        """End the engine, whatever it is doing."""
        if self._life is not None:
            self._life.ending = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def _whole_budget(self) -> StartBudget:
        rollout = self._shared.rollout
        starts = max(1, rollout.engine_max_restarts)
        return StartBudget(starts, rollout.engine_restart_window_s)

    # Lending --------------------------------------------------------------------------------

    def lend(self, loan: Loan) -> None:
        """Start no engine here until `take_back`."""
        self.loan = loan

    def vacate(self, reason: str, limit_s: float) -> None:
        """Have the engine let go of its work, within `limit_s`, and end."""
        if self._life is not None:
            self._life.vacate(reason, limit_s)

    def take_back(self) -> None:
        """As a new slot: the end of its engine was no failure."""
        self.loan, self._lost, self._last_reason = None, None, ""
        self._budget = self._whole_budget()
        self._shared.changes.notify()

    @property
    def engine(self) -> Engine | None:
        """The present one."""
        return self._life.engine if self._life is not None else None

    @property
    def duty(self) -> Duty:
        return self._duty

    def assign(self, duty: Duty) -> None:
        """A promoted engine takes the required version at once, whatever `refill_start`."""
        self._duty = duty
        if self.engine is not None:
            self.engine.duty = duty
            self.engine.joins = None if duty is Duty.ACTIVE else self.engine.joins

    @property
    def place(self) -> Place:
        engine = self.engine
        lost = self._lost if self._life is None else self._life.lost or self._lost
        return Place(
            self.index,
            self._duty,
            lost=lost is not None and (engine is None or not engine.live),
            ready=engine is not None and engine.state is EngineState.STANDBY,
            usable=self.given_up is None,
            group=self.plan.group.name,
        )

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
                "group": self.plan.group.name,
                "state": str(EngineState.RETIRED),
                "version": None,
                "digest": None,
                "pid": None,
                "start_time": None,
                "url": None,
                "reason": self.given_up or self._last_reason or self._why_not_started,
                "in_flight": 0,
                "log": None,
                "bootstrap_port": None,
                "released": False,
            }
        return {
            **shown,
            "duty": str(self._duty),
            "restarts": max(0, self.lives - 1),
            "given_up": self.given_up is not None,
            "lent": None if self.loan is None else str(self.loan),
        }

    @property
    def _why_not_started(self) -> str:
        return "not started yet" if self.loan is None else f"its place is lent to {self.loan}"

    # Lives ----------------------------------------------------------------------------------

    async def _run(self, record: EngineRecord | None) -> None:
        if record is not None:
            await self._live(self._adopt(record))
        while await self._wait_for_start():
            self._budget = self._budget.started(self._shared.clock())
            try:
                engine = self._start()
            except OSError as e:
                self._last_reason = f"cannot be started: {e}"
                continue
            await self._live(engine)
            refused = engine.process.returncode == REFUSED_EXIT_CODE
            if refused and not engine.up.is_set():
                self._give_up("refused its command line (rollout.engine_args)")
                return

    async def _wait_for_start(self) -> bool:
        """Until the next engine may start; False when none may any more."""
        shared = self._shared
        await shared.changes.wait_until(lambda: self.loan is None, math.inf)
        if (lost := self._lost) is not None:
            await shared.changes.wait_until(lambda: shared.may_start(lost), math.inf)
        delay_s = self._budget.delay_s(shared.clock())
        if delay_s is None:
            self._give_up(f"{self._spent()}; last: {self._last_reason}")
            return False
        if self._last_reason:
            shared.events.emit(
                Kind.RESTART,
                cause=self._last_reason,
                subject=self.name,
                attempt=self.lives + 1,
                delay_s=delay_s,
            )
        await asyncio.sleep(delay_s)
        await shared.changes.wait_until(lambda: not shared.memory_lent, math.inf)
        return self.loan is None or await self._wait_for_start()

    def _spent(self) -> str:
        rollout = self._shared.rollout
        return (
            f"was started {rollout.engine_max_restarts} times within "
            f"{rollout.engine_restart_window_s:g} s (rollout.engine_max_restarts)"
        )

    def _give_up(self, why: str) -> None:
        self.given_up, self.given_up_mono_s = f"{self.name} {why}", self._shared.clock()
        if self._last_log is not None:
            lines = last_lines(self._last_log, GIVEN_UP_LOG_LINES)
            self.given_up += "\n    ".join([f"; log: {self._last_log}", *lines])
        self._shared.events.emit(Kind.FAULT, cause=self.given_up, subject=self.name)
        self._shared.changes.notify()

    def _adopt(self, record: EngineRecord) -> Engine:
        process = EngineProcess.adopt(record)
        self._last_log = process.main.log
        engine = self._engine(process)
        engine.was_up = record.up
        if record.memory is Memory.RELEASED:
            engine.client.released = set(MEMORY)
            engine.unproved = False  # it holds nothing that could be shown
        return engine

    def _start(self) -> Engine:
        """Raises OSError."""
        shared = self._shared
        attempt = shared.folder.next_attempt(self.name)
        log = self._last_log = shared.folder.log_file(self.name, attempt)
        launch = self._launch()
        process = EngineProcess.start(
            launch,
            shared.launcher.fingerprint(self.index),
            log,
        )
        shared.events.emit(
            Kind.SPAWN,
            subject=self.name,
            attempt=attempt,
            pid=process.id.pid,
            start_time=process.id.start_time,
            log=str(log),
        )
        return self._engine(process)

    def _launch(self) -> Launch:
        """At an address that nobody takes for a retired engine's. Raises OSError."""
        for _ in range(ADDRESS_TRIES):
            launch = self._shared.launcher.prepare(self.index)
            if launch.url not in self._shared.deregistration.pending_urls:
                return launch
        raise OSError("all free ports are still registered for retired engines")

    def _engine(self, process: EngineProcess) -> Engine:
        half = self.plan.group.role in ("prefill", "decode")
        client = EngineClient(self._shared.http, process.url, self.name, half=half)
        engine = Engine(self.plan, process, client, self._shared.events, self._shared.changes)
        engine.duty, engine.joins = self._duty, self._lost
        return engine

    def _make_life(self, engine: Engine) -> Life:
        return Life(engine, self._shared)

    async def _live(self, engine: Engine) -> None:
        """Until the engine is retired."""
        self.lives += 1
        life = self._life = self._make_life(engine)
        self._shared.changes.notify()
        try:
            self._last_reason = await life.run()
        finally:
            self.came_up = self.came_up or engine.up.is_set()
            self._life, self._lost = None, life.lost
            self._shared.changes.notify()
