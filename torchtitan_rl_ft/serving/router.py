"""Which engine answers a request, and what happens when it does not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torchtitan_rl_ft.config.groups import POLICY
from torchtitan_rl_ft.observability.events import EventSink, Kind
from torchtitan_rl_ft.serving.changes import Changes
from torchtitan_rl_ft.serving.continuation import can_continue, request_body, settle
from torchtitan_rl_ft.serving.engine import Engine
from torchtitan_rl_ft.serving.engine_client import (
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
)
from torchtitan_rl_ft.serving.gateway import Gateway
from torchtitan_rl_ft.serving.gateway_route import GatewayRoute
from torchtitan_rl_ft.serving.pair import Server
from torchtitan_rl_ft.serving.pool import EnginePool
from torchtitan_rl_ft.serving.progress import Progress
from torchtitan_rl_ft.serving.requests import GenerateRequest, RequestFailed, RequestRejected
from torchtitan_rl_ft.serving.sample_times import LegTimes
from torchtitan_rl_ft.serving.samples import AnswerInvalid, Draft, Leg, Sample

MAX_FAILURES = 4
MAX_ABORTS = 16
"""Of those that leave no token. In pause mode `abort` every publish aborts."""

RETRIED_STATUSES = frozenset({408, 429})
"""Client errors that speak of the engine's load, not of the request."""


GATEWAY_RETRY_S = 0.1
"""Before a request that failed is given to the gateway again; doubles."""

Way = Server | GatewayRoute


class EngineGone(Exception):
    """The engine was retired while it was answering."""


class Candidate(Protocol):
    """What the choice looks at."""

    @property
    def slot(self) -> int: ...

    @property
    def in_flight(self) -> int: ...


C = TypeVar("C", bound=Candidate)


def choose(serving: Sequence[C], avoid: Collection[int]) -> C | None:
    """The engine with the fewest samples in flight, the lowest slot among equals; one that
    already failed this request only when there is no other."""
    fresh = [e for e in serving if e.slot not in avoid] or list(serving)
    return min(fresh, key=lambda e: (e.in_flight, e.slot), default=None)


@dataclass
class Work:
    """A request in work."""

    request: GenerateRequest
    progress: Progress
    avoid: set[int] = field(default_factory=set)  # slots that failed it
    failures: int = 0
    aborts: int = 0
    fault: str = "no engine serves"
    since_s: float = 0.0  # when the request came

    @property
    def drafts(self) -> list[Draft]:
        return self.progress.drafts

    @property
    def missing(self) -> list[int]:
        """Samples that are not finished."""
        return [i for i, draft in enumerate(self.drafts) if draft.finish_reason is None]

    @property
    def tokens(self) -> int:
        """Of the samples that are not finished."""
        return sum(len(self.drafts[i].output_ids) for i in self.missing)

    def restart(self) -> int:
        """Forget the tokens of unfinished samples; returns how many there were."""
        return sum(self.drafts[i].cut(0) for i in self.missing)


class Router:
    """A group's samples go to one engine in one request, so that they share its prefix cache.
    `stops`: tokens that end a sample by themselves, by group."""

    def __init__(
        self,
        pool: EnginePool,
        changes: Changes,
        events: EventSink,
        engine_timeout_s: float,
        interval_tokens: int,
        stops: Mapping[str, Collection[int]],
        gateway: Gateway | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool, self._changes, self._events = pool, changes, events
        self._engine_timeout_s, self._interval_tokens = engine_timeout_s, interval_tokens
        self._stops, self._gateway, self._clock = stops, gateway, clock
        self.drawn_tokens = 0
        """Received from engines."""
        self.wasted_tokens = 0
        """Received from engines and thrown away."""
        self.continued_tokens = 0
        """Received from engines that did not finish the sample, and kept."""

    async def generate(
        self, request: GenerateRequest, progress: Progress | None = None
    ) -> list[Sample]:
        """All samples, in the order of the seeds. What an engine did not finish goes on at another
        one from the tokens that it gave; `progress` shows them as they come. Raises
        RequestRejected, RequestFailed."""
        work = Work(request, progress or Progress(request), since_s=self._clock())
        try:
            await self._carry_out(work)
        except BaseException as e:
            if not (request.partial_interval_tokens and isinstance(e, RequestFailed)):
                self.wasted_tokens += work.progress.untold  # else the caller is told the rest
            raise
        return [draft.sample() for draft in work.drafts]

    async def _carry_out(self, work: Work) -> None:
        request = work.request
        end = self._clock() + request.timeout_s
        while work.failures < MAX_FAILURES and work.aborts < MAX_ABORTS:
            engine = await self._pick(work, end)
            if engine is None:
                break
            stops = self._stops[engine.group.name]
            if request.held and not self._open(work, stops):
                return
            legs = [Leg(work.drafts[i], engine.name, engine.version or 0) for i in work.missing]
            if request.trace:
                for leg in legs:
                    leg.times = LegTimes(self._clock())
            failed = await self._attempt(engine, work, legs, end)
            self._settle(work, legs, stops)
            if request.trace:
                self._time(legs, work.since_s)
            if not work.missing:
                return
            if failed:
                work.failures += 1
                work.avoid.add(engine.slot)
            elif not any(leg.tokens for leg in legs):
                work.aborts += 1
            self._events.emit(
                Kind.MOVE,
                cause=work.fault,
                subject=engine.name,
                request=request.request_id,
                samples=len(work.missing),
                tokens=work.tokens,
            )
        raise RequestFailed(
            f"request {request.request_id}: {len(work.missing)} of {request.n} samples not "
            f"generated within {request.timeout_s:g} s, after {work.failures} failures and "
            f"{work.aborts} aborts ({work.fault})",
            tried=work.failures + work.aborts > 0,
        )

    async def _attempt(self, engine: Way, work: Work, legs: Sequence[Leg], end: float) -> bool:
        """Have one engine carry on with what is missing; whether it failed. Raises
        RequestRejected."""
        body = request_body(work.request, work.drafts, work.missing, self._interval_tokens)
        try:
            await self._ask(engine, body, legs, end, work.progress)
        except EngineRefused as e:
            if _final(e) and not work.tokens:
                raise RequestRejected(e.message) from e
            if _final(e):  # no bad request: an engine began to answer it
                self.wasted_tokens += work.restart()
            work.fault = f"{engine.name}: {e}"
        except (EngineUnreachable, EngineGone, AnswerInvalid) as e:
            if isinstance(e, AnswerInvalid):
                self.wasted_tokens += sum(leg.undo() for leg in legs)
            work.fault = str(e)
            self._doubt(engine, e, end)
        else:
            work.fault = f"{engine.name} aborted the request"
            return False
        return True

    async def _pick(self, work: Work, end: float) -> Way | None:
        """Wait until an engine of the group holds what it should; None at the deadline. The
        gateway is in front of all engines of the policy: who names a group is not sent there."""
        group = work.request.group
        gateway = self._gateway if group == POLICY else None

        def through() -> list[Engine]:
            target = self._pool.target
            found = self._pool.serving(target.release.version) if target is not None else []
            return gateway.listed_of(found) if gateway is not None else []

        def serving() -> Sequence[Server]:
            return self._pool.servers(group) if gateway is None else through()

        if gateway is not None and work.failures:
            # It may choose the same engine again: until it is told that the engine is gone.
            delay_s = GATEWAY_RETRY_S * 2.0 ** (work.failures - 1)
            await asyncio.sleep(max(0.0, min(delay_s, end - self._clock())))
        await self._changes.wait_until(lambda: bool(serving()), end - self._clock())
        if self._clock() >= end:
            return None
        if gateway is not None:
            return gateway.route(through())
        return choose(serving(), work.avoid)

    async def _ask(
        self,
        engine: Way,
        body: dict[str, Any],
        legs: Sequence[Leg],
        end: float,
        progress: Progress,
    ) -> None:
        """Have the engine carry on with the legs, until it has ended each, or is retired: what it
        says after that is not used."""

        def take(message: dict[str, Any]) -> None:
            if engine.gone.is_set():
                raise EngineGone(f"{engine.name} was retired: {engine.reason}")
            index = message.get("index", 0)
            if not isinstance(index, int) or not 0 <= index < len(legs):
                raise AnswerInvalid(f"{engine.name}: sample {index!r} was not asked for")
            leg = legs[index]
            leg.engine = engine.name
            if new := leg.take(message):
                self.drawn_tokens += new
                engine.made_progress()
            if leg.times is not None:
                leg.times.told(self._clock(), message, leg.ended)
            progress.changes.notify()

        limit_s = max(0.001, min(self._engine_timeout_s, end - self._clock()))
        answer = asyncio.create_task(engine.client.generate(body, take, limit_s))
        gone = asyncio.create_task(engine.gone.wait())
        engine.begin(len(legs))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise EngineGone(f"{engine.name} was retired: {engine.reason}")
            answer.result()
        finally:
            gone.cancel()
            answer.cancel()
            engine.end(len(legs))
        if not all(leg.ended for leg in legs):
            raise AnswerInvalid(f"{engine.name} did not answer all of {len(legs)} samples")

    def _open(self, work: Work, stops: Collection[int]) -> bool:
        """Whether anything is missing of what the caller holds."""
        for i in work.missing:
            settle(work.drafts[i], work.request, stops)
        return bool(work.missing)

    def _settle(self, work: Work, legs: Sequence[Leg], stops: Collection[int]) -> None:
        """Count what the engine left unfinished, and keep it where it can go on."""
        for leg in legs:
            settle(leg.draft, work.request, stops)
            if leg.draft.finish_reason is None:
                self.continued_tokens += leg.tokens
        if not can_continue(work.request.sampling):
            self.continued_tokens -= work.tokens
            self.wasted_tokens += work.restart()

    def _time(self, legs: Sequence[Leg], since_s: float) -> None:
        """Note when the engine worked on each sample."""
        now_s = self._clock()
        for leg in legs:
            if leg.times is not None:
                told = leg.times.to_json(leg.engine, leg.tokens, since_s, now_s)
                leg.draft.legs.append(told)

    def _doubt(self, engine: Way, fault: Exception, end: float) -> None:
        """A lost connection, or silence for the whole limit, is a reason to look at the engine;
        a caller's own short limit is none."""
        if not isinstance(fault, EngineTimeout) or end > self._clock():
            engine.suspect(str(fault))


def _final(refusal: EngineRefused) -> bool:
    """Whether the request is at fault, not the engine's load."""
    return 400 <= refusal.status < 500 and refusal.status not in RETRIED_STATUSES
