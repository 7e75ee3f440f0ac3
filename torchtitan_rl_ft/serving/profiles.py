"""Profilers of the engines, switched on and off for all of them.

    FOLDER/engine-<slot>-<pid>/<engine>-TP-<rank>.trace.json.gz     (Chrome trace)

What was asked of which engine is told by these folders, so that a restarted serving role knows it
too: SGLang 0.5.23 loses a profile that is started a second time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path

from torchtitan_rl_ft.observability.events import EventSink, Kind
from torchtitan_rl_ft.serving.duties import Duty
from torchtitan_rl_ft.serving.engine import Engine
from torchtitan_rl_ft.serving.engine_client import EngineRefused, EngineUnreachable

TRACES = "*.trace.json.gz"
STOP_TIMEOUT_S = 120.0
"""The engine writes its trace, and computes nothing meanwhile."""

START_TIMEOUT_S = 30.0


class EngineProfiles:
    """Of engines of this host; engines of others write to their own disks."""

    def __init__(self, engines: Callable[[], Iterable[Engine]], events: EventSink) -> None:
        self._engines, self._events = engines, events
        self._asking = asyncio.Lock()
        self._said: set[Path] = set()  # of which engines a warning has told

    async def start(self, folder: Path) -> list[int]:
        """Engines that are up and not profiled yet are from now on; their slots. May be asked
        again, for those that came up later."""
        async with self._asking:
            return await self._all(folder, self._start, began=False)

    async def stop(self, folder: Path) -> list[int]:
        """Have the traces written; the slots whose engines did."""
        async with self._asking:
            return await self._all(folder, self._stop, began=True)

    async def _all(
        self, folder: Path, act: Callable[[Engine, Path], Awaitable[None]], *, began: bool
    ) -> list[int]:
        chosen = [(e, place) for e, place in self._places(folder) if place.exists() == began]
        done = await asyncio.gather(*(self._told(act, e, place) for e, place in chosen))
        return sorted(e.slot for (e, _), fine in zip(chosen, done, strict=True) if fine)

    def _places(self, folder: Path) -> Iterator[tuple[Engine, Path]]:
        for engine in self._engines():
            if engine.live and engine.duty is not Duty.EXTERNAL:
                place = folder / f"{engine.name}-{engine.process.id.pid}"
                if not any(place.glob(TRACES)):
                    yield engine, place

    async def _told(
        self, act: Callable[[Engine, Path], Awaitable[None]], engine: Engine, place: Path
    ) -> bool:
        """The lock keeps probes away: an engine that writes its trace does not answer them."""
        try:
            async with engine.quiet:
                await act(engine, place)
        except (EngineUnreachable, EngineRefused, OSError) as e:
            if place not in self._said:  # asked again at each step
                self._said.add(place)
                cause = f"{engine.name} is not profiled, it serves on: {e}"
                self._events.emit(Kind.WARN, cause=cause, subject=engine.name)
            return False
        return True

    async def _start(self, engine: Engine, place: Path) -> None:
        place.mkdir(parents=True)
        await engine.client.start_profile(str(place), engine.name, START_TIMEOUT_S)

    async def _stop(self, engine: Engine, place: Path) -> None:
        await engine.client.stop_profile(STOP_TIMEOUT_S)
