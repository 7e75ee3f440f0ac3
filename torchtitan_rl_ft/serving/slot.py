"""A place for an engine: what runs there next, and how often it may be tried."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.host.log_tail import last_lines
from torchtitan_rl_ft.observability.events import Kind
from torchtitan_rl_ft.run_folder import RunFolder
from torchtitan_rl_ft.serving.budget import StartBudget
from torchtitan_rl_ft.serving.engine import Engine
from torchtitan_rl_ft.serving.engine_client import EngineClient
from torchtitan_rl_ft.serving.engine_process import EngineProcess
from torchtitan_rl_ft.serving.life import Life
from torchtitan_rl_ft.serving.shared import Shared
from torchtitan_rl_ft.serving.states import EngineState

GIVEN_UP_LOG_LINES = 4
"""Fewer than are shown of the log of serving itself, which tells this too."""

REFUSED_EXIT_CODE = 2
"""Of a program that refuses its command line: the next start would meet the same error."""


class Slot:
    """Runs engine after engine until `close`, or until its start budget is spent."""

    def __init__(self, index: int, shared: Shared) -> None:
        self.index, self._shared = index, shared
        self.name = f"engine-{index}"
        self.starts = 0
        self.given_up: str | None = None
        """Why no engine will be started here again."""
        self.came_up = False
        """An engine has come up here at least once."""
        self._life: Life | None = None
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
        if self._life is not None:
            self._life.ending = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    @property
    def engine(self) -> Engine | None:
        """The present one."""
        return self._life.engine if self._life is not None else None

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
            refused = engine.process.returncode == REFUSED_EXIT_CODE
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
        process = EngineProcess.start(launch, shared.launcher.fingerprint(self.index), log)
        shared.events.emit(
            Kind.SPAWN,
            subject=self.name,
            attempt=attempt,
            pid=process.id.pid,
            start_time=process.id.start_time,
            log=str(log),
        )
        client = EngineClient(shared.http, launch.url, self.name)
        return Engine(self.index, process, client, shared.events, shared.changes)

    async def _live(self, engine: Engine) -> str:
        """Until the engine is retired; returns why."""
        self._life = Life(engine, self._shared)
        self._shared.changes.notify()
        try:
            return await self._life.run()
        finally:
            self.came_up = self.came_up or engine.up.is_set()
            self._life = None
            self._shared.changes.notify()


def next_attempt(folder: RunFolder, name: str) -> int:
    """Number of the next start of `name`, from the logs of earlier ones."""
    logs = folder.log_file(name, 1).parent.glob("attempt_*.log")
    numbers = [int(f.stem.removeprefix("attempt_")) for f in logs if f.stem[8:].isdigit()]
    return max(numbers, default=0) + 1
