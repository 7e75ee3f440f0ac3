"""An engine whose place is wanted lets go of its work."""

from __future__ import annotations

import asyncio
import time

from torchtitan_rl_ft.serving.engine import Engine
from torchtitan_rl_ft.serving.memory import drain
from torchtitan_rl_ft.serving.states import EngineState
from torchtitan_rl_ft.serving.updates import ENGINE_ERRORS


async def vacate(engine: Engine, limit_s: float) -> None:
    """Take what an engine is doing away from it, with all tokens that it has drawn, as far as it
    lets go of it within `limit_s`. An install in work is waited for. Nothing new begins on it: it
    is left draining, or the next that needs it to be quiet waits for ever."""
    end = time.monotonic() + limit_s
    try:
        async with asyncio.timeout(limit_s):
            await engine.quiet.acquire()
            if engine.state not in (EngineState.SERVING, EngineState.STALE):
                return
            engine.move(EngineState.DRAINING, "its place is wanted")
            left_s = max(0.001, end - time.monotonic())
            await drain(engine.name, engine.client, lambda: engine.in_flight, left_s)
    except (TimeoutError, *ENGINE_ERRORS):
        return  # requests go on elsewhere from the tokens that they were told
