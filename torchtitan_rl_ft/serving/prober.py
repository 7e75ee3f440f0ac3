"""Looks after engines: tokens first, then probes, and acts on the verdict."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from torchtitan_rl_ft.observability.events import EventSink, Kind
from torchtitan_rl_ft.serving.engine import Engine
from torchtitan_rl_ft.serving.engine_client import EngineRefused, EngineTimeout, EngineUnreachable
from torchtitan_rl_ft.serving.samples import AnswerInvalid
from torchtitan_rl_ft.serving.verdict import (
    PROBED,
    Figures,
    Health,
    Limits,
    Observation,
    Verdict,
    computes,
    conclude,
    judge,
)

REFUSED_DELAY_S = 5.0
"""After a refused probe the next step comes no later: silence needs patience, a refusal less.
Tokens may come meanwhile: an engine whose queue is full refuses probes."""

FIRST_FIGURES_S = 2.0
"""When an engine in doubt is asked for its own figures, at most a quarter of the timeout after the
first probe: late enough that a healthy one is not, and with time to see a change."""

LONGEST_FIGURES_S = 5.0
"""Limit of the second ones, at most the timeout. They are asked for only if the first ones came: a
server that is held up for a moment is not lost, and one that is stopped costs no more time."""


class Prober:
    """One check of an engine at a time, whoever asks; one way in which it dies (`condemn`)."""

    def __init__(
        self,
        limits: Limits,
        events: EventSink,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits, self._events, self._clock = limits, events, clock

    def judge_by(self, limits: Limits) -> None:
        """From the next look on."""
        self._limits = limits

    async def watch(self, engine: Engine) -> str:
        """Until the engine is found dead, by this watch or by another check; returns why."""
        try:
            while not engine.condemned:
                engine.attention.clear()
                verdict = judge(self._observe(engine), self._limits)
                if verdict.health is Health.DEAD:
                    self._condemn(engine, verdict.reason)
                elif verdict.health is Health.CHECK:
                    await self.check(engine)
                else:
                    await _wait_for(engine.attention.wait(), verdict.again_s)
            return engine.condemned
        finally:
            if engine.checking is not None:
                engine.checking.cancel()

    async def check(self, engine: Engine) -> Verdict:
        """Whether the engine lives, now, whatever the waits. Checks asked for at the same time
        are one check."""
        if engine.checking is None or engine.checking.done():
            engine.checking = asyncio.create_task(self._check(engine))
        checking = engine.checking
        await asyncio.wait({checking})
        if checking.cancelled():
            return Verdict(Health.UNWATCHED, "was retired meanwhile")
        return checking.result()

    async def _check(self, engine: Engine) -> Verdict:
        """The lock makes it a barrier: an install waits for the end of this, and this for the
        end of an install. While it is held nobody pauses the engine, so that the verdict holds
        although a newer version may have been required meanwhile (STALE)."""
        async with engine.quiet:
            if engine.state not in PROBED or engine.condemned:
                return Verdict(Health.UNWATCHED, f"{engine.state} engines are not probed")
            verdict = await _Check(engine, self._limits, self._clock).run()
            engine.history.checked_mono_s = self._clock()
            if verdict.health is Health.ALIVE:
                engine.clear_suspicion(verdict.reason)
            elif verdict.health is Health.DEAD:
                self._condemn(engine, verdict.reason)
            return verdict

    def _condemn(self, engine: Engine, reason: str) -> None:
        if engine.condemn(reason):
            self._events.emit(Kind.FAULT, cause=reason, subject=engine.name)

    def _observe(self, engine: Engine) -> Observation:
        now, history = self._clock(), engine.history
        return Observation(
            state=engine.state,
            in_state_s=now - history.moved_mono_s,
            watched_s=now - history.watched_mono_s,
            progress_s=now - history.progress_mono_s,
            checked_s=now - history.checked_mono_s,
            was_up=engine.was_up,
        )


class _Check:
    """Probes that start one after the other and share one deadline."""

    def __init__(self, engine: Engine, limits: Limits, clock: Callable[[], float]) -> None:
        self._engine, self._limits, self._clock = engine, limits, clock
        self._began = clock()
        self._probes: list[asyncio.Task[str]] = []
        self._accepted = 0  # probes that the engine may be at work on
        self._before: Figures | None = None
        self._before_mono_s = self._began

    async def run(self) -> Verdict:
        self._engine.progressed.clear()
        progress = asyncio.create_task(self._engine.progressed.wait())
        figures = asyncio.create_task(self._first_figures())
        try:
            for number in range(1, self._limits.failures + 1):
                until = self._began + number * self._limits.share_s
                if number == self._limits.failures:
                    until = self._began + self._limits.timeout_s
                if (sign := await self._probe(progress, until)) is not None:
                    return Verdict(Health.ALIVE, sign)
                self._engine.suspect(self._failures()[-1])
            return await self._conclude()
        finally:
            for task in (progress, figures, *self._probes):
                task.cancel()

    async def _probe(self, progress: asyncio.Task[Any], until: float) -> str | None:
        """Send one more probe and wait for a sign of life; None when there is none `until` then,
        or all probes so far were refused and it is time for the next."""
        left_s = self._began + self._limits.timeout_s - self._clock()
        self._accepted += 1
        self._probes.append(asyncio.create_task(self._ask(max(0.001, left_s))))
        refused_until = float("inf")
        while True:
            for probe in self._probes:
                if probe.done() and not probe.result():
                    self._engine.answered_probe()
                    return "probe answered"
            if progress.done():
                return "tokens came while it was probed"
            waiting = {p for p in self._probes if not p.done()}
            now = self._clock()
            if not waiting and refused_until == float("inf"):
                refused_until = now + REFUSED_DELAY_S
            left_s = min(until, refused_until) - now
            if left_s <= 0:
                return None
            await asyncio.wait(
                {*waiting, progress}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
            )

    async def _ask(self, limit_s: float) -> str:
        """What is wrong with the answer to a probe; empty when nothing is."""
        try:
            await self._engine.client.probe(limit_s)
        except EngineTimeout:
            return self._silent()
        except EngineRefused as e:
            self._accepted -= 1
            return str(e)
        except Exception as e:  # whatever is wrong with an answer, it is no sign of life
            return str(e) or type(e).__name__
        return ""

    def _failures(self) -> list[str]:
        return [p.result() if p.done() else self._silent() for p in self._probes]

    def _silent(self) -> str:
        return f"no answer in {self._clock() - self._began:.3g} s"

    # What the engine shows of itself ------------------------------------------------------

    async def _first_figures(self) -> None:
        timeout_s = self._limits.timeout_s
        delay_s = min(FIRST_FIGURES_S, timeout_s / 4)
        await asyncio.sleep(delay_s)
        self._before = await self._figures(timeout_s - delay_s)
        self._before_mono_s = self._clock()

    async def _conclude(self) -> Verdict:
        after = None
        if self._before is not None:
            after = await self._figures(min(LONGEST_FIGURES_S, self._limits.timeout_s))
        now = self._clock()
        elapsed_s = now - self._before_mono_s
        computing = computes(self._before, after, elapsed_s, probes=self._accepted)
        silent_s = now - self._engine.history.progress_mono_s
        verdict = conclude(self._failures(), silent_s, computing, self._limits)
        if verdict.health is Health.DEAD and (stopped := self._engine.process.stopped()):
            return replace(verdict, reason=f"{verdict.reason}; stopped: {', '.join(stopped)}")
        return verdict

    async def _figures(self, limit_s: float) -> Figures | None:
        try:
            published_s, prefilled = await self._engine.client.load_figures(limit_s)
        except (EngineUnreachable, EngineRefused, AnswerInvalid):
            return None
        return Figures(published_s, prefilled, *self._engine.process.work())


async def _wait_for(work: Coroutine[Any, Any, Any], timeout_s: float) -> None:
    """Until `work` is done, at most `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s if timeout_s < float("inf") else None):
            await work
    except TimeoutError:
        pass
