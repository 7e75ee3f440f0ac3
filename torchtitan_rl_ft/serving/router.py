"""Which engine answers a request, and what happens when it does not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torchtitan_rl_ft.config.groups import POLICY
from torchtitan_rl_ft.observability.events import EventSink, Kind
from torchtitan_rl_ft.serving.changes import Changes
from torchtitan_rl_ft.serving.engine import Engine
from torchtitan_rl_ft.serving.engine_client import (
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
)
from torchtitan_rl_ft.serving.pool import EnginePool
from torchtitan_rl_ft.serving.samples import AnswerInvalid, Sample

MAX_FAILURES = 4
MAX_ABORTS = 16
"""Aborted samples are generated anew; in pause mode `abort` every publish aborts."""

ABORTED = "abort"
RETRIED_STATUSES = frozenset({408, 429})
"""Client errors that speak of the engine's load, not of the request."""


class RequestRejected(Exception):
    """The request itself is bad: no engine would take it."""


class RequestFailed(Exception):
    """No engine answered within the caller's limit or the number of tries. `tried`: an engine was
    asked, so the request itself may be what engines fail on."""

    def __init__(self, message: str, tried: bool) -> None:
        super().__init__(message)
        self.tried = tried


class EngineGone(Exception):
    """The engine was retired while it was answering."""


@dataclass(frozen=True)
class GenerateRequest:
    """`n` samples of one prompt group; `seeds` has one integer for each, or is None."""

    request_id: str
    input_ids: list[int]
    n: int
    sampling: dict[str, object]
    seeds: list[int] | None
    timeout_s: float
    group: str = POLICY


class Candidate(Protocol):
    """What the choice looks at."""

    slot: int
    in_flight: int


C = TypeVar("C", bound=Candidate)


def choose(serving: Sequence[C], avoid: Collection[int]) -> C | None:
    """The engine with the fewest samples in flight, the lowest slot among equals; one that
    already failed this request only when there is no other."""
    fresh = [e for e in serving if e.slot not in avoid] or list(serving)
    return min(fresh, key=lambda e: (e.in_flight, e.slot), default=None)


class Router:
    """A group's samples go to one engine in one request, so that they share its prefix cache."""

    def __init__(
        self,
        pool: EnginePool,
        changes: Changes,
        events: EventSink,
        engine_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool, self._changes, self._events = pool, changes, events
        self._engine_timeout_s, self._clock = engine_timeout_s, clock
        self.wasted_tokens = 0

    async def generate(self, request: GenerateRequest) -> list[Sample]:
        """All samples, in the order of the seeds. What an engine aborted or lost is generated
        again elsewhere. Raises RequestRejected, RequestFailed."""
        end = self._clock() + request.timeout_s
        done: dict[int, Sample] = {}
        avoid: set[int] = set()
        fault: str | None = "no engine serves"
        failures = aborts = 0
        while failures < MAX_FAILURES and aborts < MAX_ABORTS:
            engine = await self._pick(avoid, end)
            if engine is None:
                break
            missing = [i for i in range(request.n) if i not in done]
            try:
                samples = await self._ask(engine, request, missing, end)
            except EngineRefused as e:
                if 400 <= e.status < 500 and e.status not in RETRIED_STATUSES:
                    raise RequestRejected(e.message) from e
                fault = f"{engine.name}: {e}"
            except (EngineUnreachable, EngineGone, AnswerInvalid) as e:
                fault = str(e)
                self._doubt(engine, e, end)
            else:
                fault = self._collect(samples, missing, done)
                if fault is None:
                    return [done[i] for i in range(request.n)]
                aborts += 1
                continue
            failures += 1
            avoid.add(engine.slot)
            cause = f"request {request.request_id} goes to another engine: {fault}"
            self._events.emit(Kind.WARN, cause=cause, subject=engine.name)
        raise RequestFailed(
            f"request {request.request_id}: {request.n - len(done)} of {request.n} samples not "
            f"generated within {request.timeout_s:g} s, after {failures} failures and {aborts} "
            f"aborts ({fault})",
            tried=failures + aborts > 0,
        )

    async def _pick(self, avoid: set[int], end: float) -> Engine | None:
        """Wait until an engine serves the current version; None at the deadline."""

        def serving() -> list[Engine]:
            target = self._pool.target
            return self._pool.serving(target.release.version) if target is not None else []

        await self._changes.wait_until(lambda: bool(serving()), end - self._clock())
        return choose(serving(), avoid)

    async def _ask(
        self, engine: Engine, request: GenerateRequest, missing: Sequence[int], end: float
    ) -> list[Sample]:
        seeds = [request.seeds[i] for i in missing] if request.seeds is not None else None
        limit_s = max(0.001, min(self._engine_timeout_s, end - self._clock()))
        answer = asyncio.create_task(
            engine.client.generate(
                request.input_ids, len(missing), request.sampling, seeds, limit_s
            )
        )
        gone = asyncio.create_task(engine.gone.wait())
        engine.begin(len(missing))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise EngineGone(f"{engine.name} was retired: {engine.reason}")
            samples = answer.result()
        finally:
            gone.cancel()
            answer.cancel()
            engine.end(len(missing))
        engine.made_progress()
        return samples

    def _collect(
        self, samples: Sequence[Sample], missing: Sequence[int], done: dict[int, Sample]
    ) -> str | None:
        """Keep what is whole; returns what is not."""
        aborted = 0
        for i, sample in zip(missing, samples, strict=True):
            if sample.finish_reason == ABORTED:
                aborted += 1
                self.wasted_tokens += len(sample.output_ids)
            else:
                done[i] = sample
        return f"{samples[0].engine} aborted {aborted} samples" if aborted else None

    def _doubt(self, engine: Engine, fault: Exception, end: float) -> None:
        """A lost connection, or silence for the whole limit, is a reason to look at the engine;
        a caller's own short limit is none."""
        if not isinstance(fault, EngineTimeout) or end > self._clock():
            engine.suspect(str(fault))
