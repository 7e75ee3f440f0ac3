"""Follows the events of a run and injects what is due."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torchtitan_rl_ft.chaos import faults
from torchtitan_rl_ft.chaos.holds import Holds, Look, NotPossible
from torchtitan_rl_ft.chaos.memory import Memory
from torchtitan_rl_ft.chaos.plan import Fault, FaultKind
from torchtitan_rl_ft.chaos.schedule import Due, Schedule
from torchtitan_rl_ft.chaos.targets import Targets, Victim
from torchtitan_rl_ft.observability.events import EventSink, Kind, read_event
from torchtitan_rl_ft.observability.jsonl import JsonlTail
from torchtitan_rl_ft.run_folder import RunFolder

POLL_S = 0.02
"""Between two looks at events.jsonl: how late a fault may come."""

TARGET_WAIT_S = 60.0
"""How long a fault waits for a victim that is not there."""

TARGET_POLL_S = 0.5

HOLD_LOOK_S = 0.05
"""Between two looks at what is held: whether it is over, or a full disk has room again."""


class Injector:
    """Injects each fault of a plan once. What it holds at its end is let go."""

    def __init__(
        self,
        folder: RunFolder,
        schedule: Schedule,
        targets: Targets,
        memory: Memory,
        events: EventSink,
        holds: Holds | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._schedule, self._targets = folder, schedule, targets
        self._memory, self._events, self._clock = memory, events, clock
        self._holds = holds or Holds(folder)
        self._tail = JsonlTail(folder.events, may_begin_anew=True, parse=read_event)
        self._ended = threading.Event()
        self._holding: list[threading.Thread] = []
        self._writing = threading.Lock()
        self._looked_mono_s: dict[str, float] = {}  # for a victim, in vain

    def run(self, stop: threading.Event, over: Callable[[], bool] | None = None) -> None:
        """Until `stop` is set, or `over`. Raises OSError (the run folder cannot be written)."""
        self._let_go_of_earlier()
        try:
            while not stop.wait(POLL_S) and not (over is not None and over()):
                self.tick()
        finally:
            self._ended.set()
            for thread in self._holding:
                thread.join()

    def catch_up(self) -> None:
        """What has happened so far makes nothing due; it tells who is there."""
        for line in self._tail.read():
            self._schedule.passed(line)
            self._targets.see(line)

    def done(self) -> bool:
        """Every fault was injected, or missed its victim, and nothing is held any more."""
        keys = self._schedule.keys()
        return all(map(self._memory.struck, keys)) and not any(t.is_alive() for t in self._holding)

    def tick(self) -> None:
        """One look: what happened, and what is due by it."""
        lines = self._tail.read()
        starts = [x for x in lines if x.get("kind") == Kind.RUN and x.get("phase") == "start"]
        if starts:
            with self._writing:
                self._memory.run_started(starts[-1]["wall_s"])
        for line in lines:
            self._schedule.see(line)
            self._targets.see(line)
        for due in self._schedule.due(self._clock()):
            if not self._holds.writable.is_set():
                return  # what is injected is written down first
            if not self._memory.struck(due.key):
                self._strike(due)

    # One fault --------------------------------------------------------------------------

    def _strike(self, due: Due) -> None:
        now = self._clock()
        if now - self._looked_mono_s.get(due.key, float("-inf")) < TARGET_POLL_S:
            return
        victim = self._targets.resolve(due.fault.target, due.key)
        if victim is None:
            self._looked_mono_s[due.key] = now
            if now - due.planned_mono_s > TARGET_WAIT_S:
                self._miss(due, f"no living {due.fault.target} within {TARGET_WAIT_S:g} s")
            return
        try:
            inject = self._prepare(due.key, due.fault, victim)
        except NotPossible as e:
            self._miss(due, str(e))
            return
        with self._writing:
            self._memory.note(due.key, target=victim.name, pid=victim.id.pid)
        # Before the deed: it may end this process, and its effects come after it in the file.
        self._events.emit(
            Kind.CHAOS,
            phase="inject",
            cause=due.fault.line,
            fault=str(due.fault.kind),
            subject=victim.name,
            pid=victim.id.pid,
            start_time=victim.id.start_time,
            listed=victim.listed,
            planned_mono_s=due.planned_mono_s,
            late_s=round(self._clock() - due.planned_mono_s, 3),
        )
        inject()

    def _miss(self, due: Due, why: str) -> None:
        with self._writing:
            self._memory.note(due.key, missed=why)
        self._events.emit(Kind.WARN, cause=f"not injected: {due.fault.line}: {why}")

    def _prepare(self, key: str, fault: Fault, victim: Victim) -> Callable[[], None]:
        """What does it. Raises NotPossible."""
        if fault.kind is FaultKind.KILL:
            return lambda: self._kill(victim)
        held = self._holds.make(fault, victim, partial(self._note_held, key, victim.name))
        return lambda: self._hold(key, victim, fault, held)

    def _kill(self, victim: Victim) -> None:
        faults.kill(victim.id, whole_tree=victim.whole_tree)

    # Faults that last -------------------------------------------------------------------

    def _hold(
        self, key: str, victim: Victim, fault: Fault, held: AbstractContextManager[Look]
    ) -> None:
        """Enter `held` now, leave it after the fault's time, or with this process."""
        look = held.__enter__()
        thread = threading.Thread(
            target=self._leave, args=(key, victim, fault, held, look), daemon=True
        )
        self._holding.append(thread)
        thread.start()

    def _leave(
        self,
        key: str,
        victim: Victim,
        fault: Fault,
        held: AbstractContextManager[Look],
        look: Look,
    ) -> None:
        lasts_s = float("inf") if fault.duration_s is None else fault.duration_s
        end = time.monotonic() + lasts_s
        try:
            while not look() and (left_s := end - time.monotonic()) > 0:
                if self._ended.wait(min(HOLD_LOOK_S, left_s)):
                    break
        finally:
            held.__exit__(None, None, None)
        self._lifted(key, victim.name, fault.line)

    def _lifted(self, key: str, name: str, line: str) -> None:
        self._holds.writable.wait()
        with self._writing:
            self._memory.let_go(key)
        self._events.emit(Kind.CHAOS, phase="lift", cause=line, subject=name)

    def _note_held(self, key: str, name: str, **what: Any) -> None:
        with self._writing:
            self._memory.hold(key, name=name, **what)

    def _let_go_of_earlier(self) -> None:
        """Of an injector that was killed."""
        for key, held in self._memory.held.items():
            self._holds.undo(held)
            self._lifted(key, held["name"], key)
