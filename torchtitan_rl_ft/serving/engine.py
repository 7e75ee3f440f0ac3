"""One life of an engine: from the start of its process to its retirement."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torchtitan_rl_ft.observability.events import EventSink
from torchtitan_rl_ft.serving.changes import Changes
from torchtitan_rl_ft.serving.duties import Boundary, Duty
from torchtitan_rl_ft.serving.engine_client import EngineClient
from torchtitan_rl_ft.serving.engine_process import EngineProcess
from torchtitan_rl_ft.serving.engine_records import EngineRecord, Memory
from torchtitan_rl_ft.serving.groups import SlotPlan
from torchtitan_rl_ft.serving.states import EngineState, StateMachine


@dataclass
class HealthHistory:
    """When an engine showed what."""

    progress_mono_s: float  # last token, or answered probe
    watched_mono_s: float  # start, or last resume: first_wait counts from here
    moved_mono_s: float  # last change of state
    checked_mono_s: float = float("-inf")  # end of the last check


class Engine:
    """An engine of a slot. `in_flight` counts samples that it is generating."""

    def __init__(
        self,
        plan: SlotPlan,
        process: EngineProcess,
        client: EngineClient,
        events: EventSink,
        changes: Changes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.slot, self.plan, self.group = plan.slot, plan, plan.group
        self.process, self.client = process, client
        self.name = client.name
        self._machine = StateMachine(self.name, events)
        self._changes, self._clock = changes, clock
        self.duty = Duty.ACTIVE
        self.joins: Boundary | None = None
        """When it may take a version; None: at once."""
        self.was_up = False
        """An adopted one that had come up before: it has no start before it."""
        self.unproved = process.adopted
        """It may hold the required version, or half of one: nobody has looked."""
        self.same_layout = True
        """It holds weights in the dtype and on the ranks that the exact proof is about."""
        self.version: int | None = None
        self.install_failures = 0  # in a row
        self.damage_told: int | None = None  # version of which it was said that it is damaged
        self.loading: int | None = None  # version being installed: its files are needed
        self.digest: str | None = None  # model_digest of what it holds, when proved
        self.in_flight = 0
        self.up = asyncio.Event()
        self.gone = asyncio.Event()
        self.quiet = asyncio.Lock()
        """Held by an install and by a check: neither runs beside the other."""
        self.condemned = ""
        """Why it has to go, once it was found dead; never taken back."""
        self.checking: asyncio.Task[Any] | None = None
        """The check in work, or the last one (`Prober`)."""
        self.attention = asyncio.Event()
        """Something happened that the watch should look at."""
        self.progressed = asyncio.Event()
        """A token came; cleared by a check."""
        now = clock()
        self.history = HealthHistory(now, now, now)

    @property
    def state(self) -> EngineState:
        return self._machine.state

    @property
    def reason(self) -> str:
        return self._machine.reason

    @property
    def live(self) -> bool:
        """Up and not on its way out."""
        return self.state not in (
            EngineState.STARTING,
            EngineState.DRAINING,
            EngineState.RETIRED,
        )

    def serves(self, version: int) -> bool:
        return self.state is EngineState.SERVING and self.version == version

    def move(self, new: EngineState, reason: str) -> None:
        self._machine.transition(new, reason, version=self.version)
        now = self.history.moved_mono_s = self._clock()
        if new in (EngineState.SERVING, EngineState.STANDBY):
            self.history.progress_mono_s = self.history.watched_mono_s = now
        self.attention.set()
        if new is EngineState.RETIRED:
            self.gone.set()
        self._changes.notify()

    def suspect(self, reason: str) -> None:
        """No more requests, and a check at once, until it is cleared."""
        if self.state in (EngineState.SERVING, EngineState.STANDBY):
            self.move(EngineState.SUSPECT, reason)
        self.attention.set()

    def clear_suspicion(self, reason: str) -> None:
        """Return to the state that suspicion interrupted; it is no resume."""
        self._machine.clear_suspicion(reason)
        self.history.moved_mono_s = self._clock()
        self._changes.notify()

    def condemn(self, reason: str) -> bool:
        """Have it retired; False when that was decided before."""
        if self.condemned:
            return False
        self.condemned = reason
        self.attention.set()
        return True

    def made_progress(self) -> None:
        """A token, or a finished answer, of any request is proof of life."""
        self.history.progress_mono_s = self._clock()
        self.progressed.set()

    def answered_probe(self) -> None:
        self.history.progress_mono_s = self._clock()

    def begin(self, samples: int) -> None:
        self.in_flight += samples

    def end(self, samples: int) -> None:
        self.in_flight -= samples
        self._changes.notify()

    def record(self, memory: Memory | None = None) -> EngineRecord:
        """`memory`: other than what is known of it now."""
        now = Memory.RELEASED if self.client.released else Memory.HELD
        known = self.process.record(self.slot, self.group.name, str(self.duty))
        return replace(known, up=self.was_up or self.up.is_set(), memory=memory or now)

    def to_json(self) -> dict[str, Any]:
        return {
            "slot": self.slot,
            "group": self.group.name,
            "state": str(self.state),
            "version": self.version,
            "digest": self.digest,
            "url": self.client.url,
            "reason": self.reason,
            "in_flight": self.in_flight,
            **self.process.shown,
            "bootstrap_port": self.process.bootstrap_port,
            "released": bool(self.client.released),
        }
