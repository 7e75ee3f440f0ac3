"""A child of serving that is started again when it ends, so often and no more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.host.log_tail import last_lines
from torchtitan_rl_ft.observability.events import EventSink, Kind
from torchtitan_rl_ft.run_folder import RunFolder
from torchtitan_rl_ft.serving.budget import StartBudget
from torchtitan_rl_ft.serving.engine_process import end_trees

STARTS = 5
STARTS_WINDOW_S = 60.0
END_LIMIT_S = 1.5
REFUSED_EXIT_CODE = 2
"""Of a program that refuses its configuration: the next start would meet the same error."""


class ChildFailed(Exception):
    """A child cannot be kept up. `in_vain`: a new serving role would meet the same."""

    def __init__(self, message: str, *, in_vain: bool = False) -> None:
        super().__init__(message)
        self.in_vain = in_vain


class Program(Protocol):
    """What is kept up."""

    def start(self, log: Path) -> process.Child:
        """Raises OSError."""
        ...

    async def attend(self, child: process.Child) -> str:
        """While `child` lives; returns why it has to be replaced. Cancelled when it ends."""
        ...

    def let_go(self) -> None:
        """The child is about to be ended, or has ended."""
        ...


class KeptChild:
    """`name` in events and logs, `what` in errors."""

    def __init__(
        self,
        name: str,
        what: str,
        folder: Callable[[], RunFolder],
        events: EventSink,
        program: Program,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self._what = name, what
        self._folder, self._events = folder, events
        self._program, self._clock = program, clock
        self._budget = StartBudget(STARTS, STARTS_WINDOW_S)
        self.child: process.Child | None = None
        self.starts = 0

    async def run(self) -> None:
        """Until cancelled. Raises ChildFailed when it does not stay up."""
        reason, log, code = "", None, None
        while (delay_s := self._budget.delay_s(self._clock())) is not None:
            if self.starts:
                self._events.emit(
                    Kind.RESTART,
                    cause=reason,
                    subject=self.name,
                    attempt=self.starts + 1,
                    delay_s=delay_s,
                )
            await asyncio.sleep(delay_s)
            self._budget = self._budget.started(self._clock())
            self.starts += 1
            folder = self._folder()
            log = folder.log_file(self.name, folder.next_attempt(self.name))
            reason, code = await self._live(log)
            if code == REFUSED_EXIT_CODE:
                raise ChildFailed(_told(f"{self._what} refused its start", log), in_vain=True)
        raise ChildFailed(
            _told(
                f"{self._what} was started {STARTS} times within {STARTS_WINDOW_S:g} s; last: "
                f"{reason}",
                log,
            )
        )

    async def _live(self, log: Path) -> tuple[str, int | None]:
        """One child, from its start to its end; returns why it ended, and its own exit code."""
        try:
            child = self._program.start(log)
        except OSError as e:
            return f"cannot be started: {e}", None
        self.child = child
        self._events.emit(
            Kind.SPAWN,
            subject=self.name,
            attempt=self.starts,
            pid=child.id.pid,
            start_time=child.id.start_time,
            log=str(log),
        )
        exited = asyncio.create_task(child.wait())
        attended = asyncio.create_task(self._program.attend(child))
        reason: str | None = None
        try:
            await asyncio.wait({exited, attended}, return_when=asyncio.FIRST_COMPLETED)
            reason = process.describe(exited.result()) if exited.done() else attended.result()
            return reason, child.returncode
        finally:
            self._program.let_go()
            attended.cancel()
            exited.cancel()
            code = child.returncode  # how it ended by itself
            await end_trees([child.id], self._clock() + END_LIMIT_S)
            self.child = None
            self._events.emit(
                Kind.EXIT,
                phase="stop" if reason is None else "fault",
                cause=reason or "serving ends",
                subject=self.name,
                pid=child.id.pid,
                returncode=code,
                signal=-code if code is not None and code < 0 else None,
                uptime_s=round(time.monotonic() - child.started_mono_s, 3),
                log=str(log),
                last_lines=[] if reason is None else last_lines(log),
            )


def _told(what: str, log: Path | None) -> str:
    lines = last_lines(log) if log is not None else []
    return "\n    ".join([f"{what}; log: {log}", *lines])
