"""Follows the events of a run and injects what is due."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torchtitan_rl_ft.chaos import engine_wrapper, faults
from torchtitan_rl_ft.chaos.memory import Memory, from_json, to_json
from torchtitan_rl_ft.chaos.plan import Fault, FaultKind
from torchtitan_rl_ft.chaos.proxy import ProxyThread
from torchtitan_rl_ft.chaos.schedule import Due, Schedule
from torchtitan_rl_ft.chaos.targets import Targets, Victim
from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.observability.events import EventSink, Kind
from torchtitan_rl_ft.observability.jsonl import JsonlTail
from torchtitan_rl_ft.run_folder import RoleAddress, RunFolder

POLL_S = 0.02
"""Between two looks at events.jsonl: how late a fault may come."""

TARGET_WAIT_S = 60.0
"""How long a fault waits for a victim that is not there."""

TARGET_POLL_S = 0.5


class NotPossible(Exception):
    """This victim cannot suffer this fault; the message says why."""


class Injector:
    """Injects each fault of a plan once. What it holds at its end is let go."""

    def __init__(
        self,
        folder: RunFolder,
        schedule: Schedule,
        targets: Targets,
        memory: Memory,
        events: EventSink,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._schedule, self._targets = folder, schedule, targets
        self._memory, self._events, self._clock = memory, events, clock
        self._tail = JsonlTail(folder.events, may_begin_anew=True)
        self._ended = threading.Event()
        self._holding: list[threading.Thread] = []
        self._writing = threading.Lock()
        self._looked_mono_s: dict[str, float] = {}  # for a victim, in vain

    def run(self, stop: threading.Event) -> None:
        """Until `stop` is set. Raises OSError (the run folder cannot be written)."""
        self._let_go_of_earlier()
        try:
            while not stop.wait(POLL_S):
                self.tick()
        finally:
            self._ended.set()
            for thread in self._holding:
                thread.join()

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
        if fault.kind is FaultKind.STOP:
            return lambda: self._hold(key, victim, fault, self._stopped(key, victim))
        if fault.kind is FaultKind.SLOW:
            return lambda: self._start(self._slow, key, fault, victim)
        if victim.name.startswith("engine-"):
            if not engine_wrapper.is_wrapper(victim.id.pid):
                pid = victim.id.pid
                raise NotPossible(f"{victim.name} (pid {pid}) was not started behind a proxy")
            return lambda: self._hold(key, victim, fault, self._engine_blackhole(key, victim))
        address = self._folder.role(victim.name)
        if address is None:
            raise NotPossible(f"{victim.name} has no address")
        return lambda: self._hold(key, victim, fault, self._role_blackhole(key, address))

    def _kill(self, victim: Victim) -> None:
        faults.kill(victim.id, whole_tree=victim.whole_tree)

    # Faults that last -------------------------------------------------------------------

    def _start(self, work: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._holding.append(thread)
        thread.start()

    def _hold(
        self, key: str, victim: Victim, fault: Fault, held: contextlib.AbstractContextManager[None]
    ) -> None:
        """Enter `held` now, leave it after the fault's time, or with this process."""
        held.__enter__()
        self._start(self._leave, key, victim, fault, held)

    def _leave(
        self, key: str, victim: Victim, fault: Fault, held: contextlib.AbstractContextManager[None]
    ) -> None:
        self._ended.wait(fault.duration_s)
        held.__exit__(None, None, None)
        self._lifted(key, victim.name, fault.line)

    def _lifted(self, key: str, name: str, line: str) -> None:
        with self._writing:
            self._memory.let_go(key)
        self._events.emit(Kind.CHAOS, phase="lift", cause=line, subject=name)

    def _slow(self, key: str, fault: Fault, victim: Victim) -> None:
        assert fault.duration_s is not None
        self._note_held(key, victim.name, stopped=to_json(faults.tree(victim.id)))
        faults.slow(
            victim.id,
            fault.share,
            fault.duration_s,
            whole_tree=victim.whole_tree,
            ended=self._ended,
        )
        self._lifted(key, victim.name, fault.line)

    @contextlib.contextmanager
    def _stopped(self, key: str, victim: Victim) -> Iterator[None]:
        with faults.stopped(victim.id, whole_tree=victim.whole_tree) as stopped:
            self._note_held(key, victim.name, stopped=to_json(stopped))
            yield

    @contextlib.contextmanager
    def _engine_blackhole(self, key: str, victim: Victim) -> Iterator[None]:
        process.kill(victim.id, engine_wrapper.BLACKHOLE)
        self._note_held(key, victim.name, dark=to_json([victim.id]))
        try:
            yield
        finally:
            process.kill(victim.id, engine_wrapper.LIFT)

    @contextlib.contextmanager
    def _role_blackhole(self, key: str, address: RoleAddress) -> Iterator[None]:
        """Whoever looks the role up finds a proxy in its place; what is connected stays so."""
        with ProxyThread(address.url) as proxy:
            proxy.blackhole()
            aside = dataclasses.replace(address, url=proxy.url)
            self._note_held(key, address.name, aside=proxy.url, url=address.url)
            self._folder.announce(aside)
            try:
                yield
            finally:
                proxy.lift()
                self._turn_back(address.name, proxy.url, address.url)

    def _turn_back(self, name: str, aside: str, url: str) -> None:
        now = self._folder.role(name)
        if now is not None and now.url == aside:  # else it was restarted and has said so
            self._folder.announce(dataclasses.replace(now, url=url))

    # Of an injector that was killed -----------------------------------------------------

    def _note_held(self, key: str, name: str, **what: Any) -> None:
        with self._writing:
            self._memory.hold(key, name=name, **what)

    def _let_go_of_earlier(self) -> None:
        for key, held in self._memory.held.items():
            self._undo(held)
            self._lifted(key, held["name"], key)

    def _undo(self, held: Mapping[str, Any]) -> None:
        faults.resume(from_json(held.get("stopped", [])))
        for victim in from_json(held.get("dark", [])):
            if victim.alive() and engine_wrapper.is_wrapper(victim.pid):
                process.kill(victim, engine_wrapper.LIFT)
        if "aside" in held:
            self._turn_back(held["name"], held["aside"], held["url"])
