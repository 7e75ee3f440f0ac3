"""Colocated engines give their memory up while the trainer computes.

The order: no more requests (PAUSED), no probe (a barrier), nothing that runs, waits or travels
between prefill and decode, an empty prefix cache, then the memory. SGLang's scheduler ends when it
is asked for its memory while it is not idle, so it is never asked. What an install does later is in
weights/installer.py: weights back, loaded, cache back, proved.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from torchtitan_rl_ft.serving.engine import Engine
from torchtitan_rl_ft.serving.states import EngineState
from torchtitan_rl_ft.serving.updates import ENGINE_ERRORS, Retire, quiet

DRAIN_POLL_S = 0.05

ANSWER_S = 1.0
"""What one question may take beyond the limit, for the last answer to name the queues."""

IN_FLIGHT = "in flight here"


class NotIdle(TimeoutError):
    """Requests are left at the limit; the message names the queues and how many are in each."""


class ReleaseFailed(Exception):
    """An engine would not give its memory up; it has been retired, which frees the memory too."""


class Drained(Protocol):
    """What `drain` asks of an engine."""

    async def queues(self, timeout_s: float) -> Mapping[str, int]: ...

    async def abort_all(self, timeout_s: float) -> None: ...


async def drain(
    name: str,
    client: Drained,
    in_flight: Callable[[], int],
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Abort until idle: no request in any of the engine's queues, those between prefill and decode
    included, and none whose answer is still awaited here (`in_flight`). Raises NotIdle."""
    end = clock() + limit_s

    def left_s() -> float:
        return max(ANSWER_S, end - clock())

    while True:
        busy = {queue: n for queue, n in (await client.queues(left_s())).items() if n}
        if n := in_flight():
            busy[IN_FLIGHT] = n
        if not busy:
            return
        if clock() >= end:
            queues = ", ".join(f"{queue} {n}" for queue, n in sorted(busy.items()))
            raise NotIdle(f"{name} is not idle after {limit_s:.3g} s: {queues}")
        await client.abort_all(left_s())
        await asyncio.sleep(DRAIN_POLL_S)


async def release(engine: Engine, limit_s: float) -> None:
    """Have an engine that serves give its memory up. Raises ReleaseFailed; the engine then goes."""
    end = time.monotonic() + limit_s

    def left_s() -> float:
        return max(0.001, end - time.monotonic())

    if engine.state is EngineState.SERVING:
        engine.move(EngineState.PAUSED, "gives its memory up")
    try:
        async with quiet(engine, limit_s):
            if engine.state is EngineState.SERVING:  # an install was in work
                engine.move(EngineState.PAUSED, "gives its memory up")
            if engine.state is not EngineState.PAUSED:
                raise Retire(f"is {engine.state} when its memory is needed: {engine.reason}")
            await drain(engine.name, engine.client, lambda: engine.in_flight, left_s())
            await engine.client.flush(left_s())
            # Whatever happens from here on, it holds nothing that may be served.
            engine.version = engine.digest = None
            await engine.client.release_memory(left_s())
    except (NotIdle, Retire, *ENGINE_ERRORS) as e:
        reason = f"memory not released: {e}"
        engine.condemn(reason)
        raise ReleaseFailed(f"{engine.name}: {reason}") from e
