"""Engines that somebody else owns: probed, given versions and requests, never started or ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import aiohttp

from torchtitan_rl_ft.observability.events import Kind
from torchtitan_rl_ft.run_folder import ProcessId
from torchtitan_rl_ft.serving.duties import Duty
from torchtitan_rl_ft.serving.engine import Engine
from torchtitan_rl_ft.serving.engine_client import (
    EngineClient,
    EngineRefused,
    EngineUnreachable,
)
from torchtitan_rl_ft.serving.engine_process import EngineProcess
from torchtitan_rl_ft.serving.engine_records import EngineRecord
from torchtitan_rl_ft.serving.groups import SlotPlan
from torchtitan_rl_ft.serving.life import Life
from torchtitan_rl_ft.serving.samples import AnswerInvalid
from torchtitan_rl_ft.serving.shared import Shared
from torchtitan_rl_ft.serving.slot import Slot
from torchtitan_rl_ft.serving.states import EngineState
from torchtitan_rl_ft.weights.engine_hashes import cpu_hash
from torchtitan_rl_ft.weights.proof import EngineLayout

CALL_LIMIT_S = 2.0
FIRST_LOOK_S = 1.0
"""From one look to the next until it has answered for the first time; later it doubles."""

NO_ANSWER = (EngineUnreachable, EngineRefused, AnswerInvalid)


class Elsewhere(EngineProcess):
    """The processes of an engine that is not ours: none that could be seen, signalled or ended."""

    def __init__(self, url: str) -> None:
        super().__init__((), url, fingerprint="", scratch=Path())

    @property
    def adopted(self) -> bool:
        return False

    @property
    def shown(self) -> dict[str, Any]:
        return {"pid": None, "start_time": None, "log": None}

    async def wait(self) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def end(self, deadline_mono_s: float) -> list[ProcessId]:
        raise AssertionError(f"{self.url} is not ours to end")

    def record(self, slot: int, group: str, duty: str) -> EngineRecord:
        raise AssertionError(f"{self.url} is not ours to keep or end")


class ExternalClient(EngineClient):
    """`holds` gives the version that the engine has proved. Another one in its place, on the same
    address, or weights that its owner loads, are found by the probe: no exit tells of them."""

    def __init__(
        self, http: aiohttp.ClientSession, url: str, name: str, holds: Callable[[], int | None]
    ) -> None:
        super().__init__(http, url, name)
        self._holds = holds

    async def probe(self, timeout_s: float) -> None:
        await super().probe(timeout_s)
        expected = self._holds()
        found = await self.held_version(timeout_s)
        if expected is not None and found != expected:
            raise AnswerInvalid(f"{self.name}: reports version {found}, not {expected}")

    async def same_layout(self, layout: EngineLayout, timeout_s: float) -> bool:
        """Whether it holds weights as engines of ours do. Raises what no answer raises."""
        info = await self._json("GET", "/server_info", timeout_s=timeout_s)
        try:
            ranks = int(info["tp_size"]) * int(info["pp_size"]) * int(info["dp_size"])
            on_cpu = info["device"] == "cpu"
            same_dtype = info["dtype"] == layout.dtype
        except (KeyError, TypeError, ValueError) as e:
            raise AnswerInvalid(f"{self.name}: server info not understood: {e}") from e
        return same_dtype and ranks == layout.ranks and on_cpu == (layout.hash is cpu_hash)


class ExternalLife(Life):
    """From an answer of the engine to its death, or to our end."""

    async def _come_up(self) -> None:
        """It has answered already. What cannot be found out is taken for different."""
        engine, client = self.engine, self.engine.client
        engine.up.set()
        with contextlib.suppress(*NO_ANSWER):
            assert isinstance(client, ExternalClient)
            layout = self._shared.launcher.layout(engine.group)
            engine.same_layout = await client.same_layout(layout, CALL_LIMIT_S)
        self._shared.events.emit(
            Kind.READY, subject=engine.name, url=client.url, duty=str(Duty.EXTERNAL)
        )

    async def _retire(self, reason: str) -> None:
        """Out of routing and fenced. An install that was broken off has paused it: that is undone,
        its owner may have other callers."""
        engine, shared = self.engine, self._shared
        may_be_paused = engine.state in (EngineState.INSTALLING, EngineState.STALE)
        self.lost = shared.boundary(engine.plan)
        engine.move(EngineState.RETIRED, reason)
        await shared.deregistration.forget(engine)
        if may_be_paused:
            with contextlib.suppress(*NO_ANSWER):
                await engine.client.resume(CALL_LIMIT_S)
        engine.client.fence()
        if not self.ending:
            again_s = shared.rollout.health_check_interval
            shared.events.emit(
                Kind.FAULT,
                cause=f"{engine.client.url} is out of routing: {reason}; looked for again, at last "
                f"every {again_s:g} s (health_check_interval)",
                subject=engine.name,
                duty=str(Duty.EXTERNAL),
            )


class ExternalSlot(Slot):
    """An address: whenever an engine answers there it is brought to the required version, and
    serves once it has proved it."""

    def __init__(self, plan: SlotPlan, shared: Shared) -> None:
        super().__init__(plan, shared)
        assert plan.external_url is not None
        self._url = plan.external_url
        self.name = f"external-{self.index}"
        self._missing_mono_s = shared.clock()  # since then it has not served
        self._looked_at = EngineClient(shared.http, self._url, self.name)

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "url": self._url}

    async def _run(self, record: EngineRecord | None) -> None:
        self._missing_mono_s = self._shared.clock()
        while True:
            await self._wait_for_answer()
            engine = self._engine(Elsewhere(self._url))
            await self._live(engine)
            if engine.version is not None:  # it has served, and may be back already
                self._missing_mono_s = self._shared.clock()
                continue
            self._count_out(f"does not serve: {self._last_reason}")
            await asyncio.sleep(self._shared.rollout.health_check_interval)

    async def _wait_for_answer(self) -> None:
        interval_s, again_s = self._shared.rollout.health_check_interval, FIRST_LOOK_S
        while not await self._answers():
            self._count_out("did not answer")
            left_s = self._limit_left_s()
            await asyncio.sleep(min(again_s, interval_s, left_s if left_s > 0 else interval_s))
            if self.lives or left_s <= 0:  # else it is only about to start
                again_s *= 2
        self.given_up = None

    def _limit_left_s(self) -> float:
        limit_s = self._shared.rollout.engine_start_timeout_s
        return self._missing_mono_s + limit_s - self._shared.clock()

    def _count_out(self, why: str) -> None:
        """What has not served for long does not count for the floor."""
        if self._limit_left_s() <= 0 and self.given_up is None:
            limit_s = self._shared.rollout.engine_start_timeout_s
            self._give_up(
                f"({self._url}, rollout.external_urls) {why}; {limit_s:g} s are over "
                "(engine_start_timeout_s)"
            )

    async def _answers(self) -> bool:
        with contextlib.suppress(*NO_ANSWER):
            await self._looked_at.model_info(CALL_LIMIT_S)
            return True
        return False

    def _make_life(self, engine: Engine) -> Life:
        return ExternalLife(engine, self._shared)

    def _engine(self, process: EngineProcess) -> Engine:
        def holds() -> int | None:
            return engine.version

        client = ExternalClient(self._shared.http, self._url, self.name, holds)
        engine = Engine(self.plan, process, client, self._shared.events, self._shared.changes)
        engine.duty = self._duty
        return engine
