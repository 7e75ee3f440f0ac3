"""Asks engines whether they are alive and acts on the verdict."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from torchtitan_rl_ft.observability.events import EventSink, Kind
from torchtitan_rl_ft.serving.engine import Engine
from torchtitan_rl_ft.serving.states import EngineState
from torchtitan_rl_ft.serving.verdict import (
    PROBED,
    Health,
    Observation,
    ProbeLimits,
    judge,
)

SUSPECT_DELAY_S = 1.0
"""From one probe of a suspect to the next: a blip is not counted twice."""

SHORTEST_PROBE_S = 1.5


class Prober:
    """Watches one engine for its whole life; `watch` returns the reason when it is dead."""

    def __init__(
        self,
        limits: ProbeLimits,
        events: EventSink,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits, self._events, self._clock = limits, events, clock

    async def watch(self, engine: Engine) -> str:
        while True:
            asked = await self._pause(engine)
            health, reason = judge(self._observe(engine, None), self._limits, asked=asked)
            if health is Health.PROBE:
                health, reason = await self._probe(engine)
            if health is Health.DEAD:
                self._events.emit(Kind.FAULT, cause=reason, subject=engine.name)
                return reason
            if health is Health.DOUBTFUL:
                engine.suspect(reason)
            elif health is Health.ALIVE and engine.state is EngineState.SUSPECT:
                engine.clear_suspicion(reason)

    async def _pause(self, engine: Engine) -> bool:
        """Until the next look is due, or somebody asks for it. A suspect is asked soon."""
        if engine.state is EngineState.SUSPECT:
            since_s = self._clock() - engine.history.probed_mono_s
            await asyncio.sleep(max(0.0, SUSPECT_DELAY_S - since_s))
            return True
        try:
            async with asyncio.timeout(self._limits.interval_s):
                await engine.probe_asked.wait()
        except TimeoutError:
            return False
        engine.probe_asked.clear()
        return True

    async def _probe(self, engine: Engine) -> tuple[Health, str]:
        async with engine.quiet:
            if engine.state not in PROBED:  # an install was first
                return Health.UNWATCHED, f"{engine.state} meanwhile"
            fault = ""
            history = engine.history
            history.probed_mono_s = self._clock()
            if not history.failures:
                history.doubted_mono_s = history.probed_mono_s
            limit_s = self._limits.timeout_s
            if history.failures:
                # It had the whole time once; a healthy answer takes 1 s.
                limit_s = min(limit_s, max(SHORTEST_PROBE_S, limit_s / 2))
            try:
                await engine.client.probe(limit_s)
            except Exception as e:  # whatever is wrong with an answer, it is no sign of life
                fault = str(e) or type(e).__name__
            verdict = judge(self._observe(engine, fault), self._limits)
            history.failures = 0 if verdict[0] is Health.ALIVE else history.failures + 1
            return verdict

    def _observe(self, engine: Engine, probe: str | None) -> Observation:
        now, history = self._clock(), engine.history
        return Observation(
            state=engine.state,
            watched_s=now - history.watched_mono_s,
            progress_s=now - history.progress_mono_s,
            failures=history.failures,
            probe=probe,
            doubt_s=now - history.doubted_mono_s,
        )
