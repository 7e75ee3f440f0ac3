"""Has those who route to an engine forget it, before it is killed and until they have."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from torchtitan_rl_ft.observability.events import EventSink, Kind
from torchtitan_rl_ft.serving.engine import Engine

DEADLINE_S = 2.0
"""How long the end of an engine waits for one that shall forget it."""

RETRY_S = 0.5
LONGEST_RETRY_S = 10.0
RETRIES = 60


class DeregistrationFailed(Exception):
    """The engine is still known there."""


Hook = Callable[[Engine], Awaitable[None]]
"""Forgets the engine, by its address, which it need not be alive for. Raises
DeregistrationFailed."""


class Deregistration:
    """Calls `hooks` for each engine that retires. A hook that fails is called again, with
    growing delays."""

    def __init__(self, events: EventSink) -> None:
        self.hooks: list[Hook] = []
        self._events = events
        self._pending: dict[asyncio.Task[None], str] = {}

    @property
    def pending_urls(self) -> set[str]:
        """Addresses that somebody still takes for an engine: no new one may get them."""
        return set(self._pending.values())

    async def forget(self, engine: Engine) -> None:
        """Within the deadline, whatever the hooks do; what failed is retried in the background."""
        await asyncio.gather(*(self._first(hook, engine) for hook in self.hooks))

    async def close(self) -> None:
        for task in self._pending:
            task.cancel()
        await asyncio.gather(*self._pending, return_exceptions=True)

    async def _first(self, hook: Hook, engine: Engine) -> None:
        problem = await _call(hook, engine)
        if problem is None:
            return
        self._warn(engine, f"{engine.name} is still registered, tried again: {problem}")
        task = asyncio.create_task(self._again(hook, engine))
        self._pending[task] = engine.client.url
        task.add_done_callback(self._pending.pop)

    async def _again(self, hook: Hook, engine: Engine) -> None:
        delay_s, problem = RETRY_S, None
        for _ in range(RETRIES):
            await asyncio.sleep(delay_s)
            if (problem := await _call(hook, engine)) is None:
                return
            delay_s = min(2 * delay_s, LONGEST_RETRY_S)
        self._warn(engine, f"{engine.client.url} stays registered: {problem}")

    def _warn(self, engine: Engine, cause: str) -> None:
        self._events.emit(Kind.WARN, cause=cause, subject=engine.name)


async def _call(hook: Hook, engine: Engine) -> str | None:
    """What went wrong, or None."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            await hook(engine)
    except DeregistrationFailed as e:
        return str(e)
    except TimeoutError:
        return f"no answer within {DEADLINE_S:g} s"
    return None
