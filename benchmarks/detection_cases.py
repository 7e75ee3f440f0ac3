"""What happens to engines in benchmarks/detection.py: faults that have to be found, and innocents
that have to be left alone. The detector, and most engines, are the real ones."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "fakes"))
from policies import token_of, write_policy  # noqa: E402

from torchtitan_rl_ft.chaos import faults  # noqa: E402
from torchtitan_rl_ft.chaos.proxy import TcpProxy  # noqa: E402
from torchtitan_rl_ft.chaos.targets import WORKER_TITLES, titled  # noqa: E402
from torchtitan_rl_ft.host import process  # noqa: E402
from torchtitan_rl_ft.run_folder import ProcessId, RunFolder  # noqa: E402
from torchtitan_rl_ft.serving.engine import Engine  # noqa: E402
from torchtitan_rl_ft.serving.requests import (  # noqa: E402
    GenerateRequest,
    RequestFailed,
    RequestRejected,
)
from torchtitan_rl_ft.serving.service import ServingService  # noqa: E402
from torchtitan_rl_ft.serving.states import EngineState  # noqa: E402
from torchtitan_rl_ft.serving.updates import quiet  # noqa: E402

INTERVAL_S, TIMEOUT_S = 1.0, 2.0
LONG_PROMPT = 30_000
"""Tokens: read in one silent pass of some 8 s on one core."""


@dataclass
class Bench:
    """A serving service with its detector, in this process."""

    service: ServingService
    folder: RunFolder
    model: Path
    http: aiohttp.ClientSession
    step: int = 0
    asked: int = 0
    traffic: list[asyncio.Task[None]] = field(default_factory=list)

    def engine(self, slot: int) -> Engine:
        found = self.service.pool.slots[slot].engine
        assert found is not None
        return found

    @property
    def slots(self) -> range:
        return range(len(self.service.pool.slots))

    async def publish(self) -> None:
        path, digest = write_policy(
            self.folder.weights, self.model, self.step, scale=1 + self.step / 1000
        )
        await self.service.publish(self.step, token_of(self.step), path, digest, "all", 60.0)
        self.step += 1

    async def until(self, predicate: Callable[[], bool], limit_s: float = 120.0) -> None:
        if not await self.service._changes.wait_until(predicate, limit_s):
            raise RuntimeError(f"not within {limit_s:g} s: {self.service.status()}")

    async def all_serve(self) -> None:
        version = self.service.version
        await self.until(lambda: len(self.service.pool.serving(version)) == len(self.slots))

    async def ask(self, prompt: Sequence[int], n: int, tokens: int) -> None:
        self.asked += 1
        sampling: dict[str, object] = {"max_new_tokens": tokens, "ignore_eos": True}
        with contextlib.suppress(RequestFailed, RequestRejected):
            await self.service.generate(
                GenerateRequest(f"r{self.asked}", list(prompt), n, sampling, None, 60.0)
            )

    @contextlib.asynccontextmanager
    async def under_load(self, groups: int, n: int = 2, tokens: int = 200) -> AsyncIterator[None]:
        """`groups` requests at all times, for all engines together."""

        async def one(i: int) -> None:
            while True:
                await self.ask([3, 4 + i % 9, 5, 4 + (i + self.asked) % 9], n, tokens)
                await asyncio.sleep(0.01)

        tasks = [asyncio.create_task(one(i)) for i in range(groups)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


# Faults -----------------------------------------------------------------------------------------

Undo = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Fault:
    """`inject` breaks an engine and returns what is left to clean up once it was retired.
    `idle`: only probes are refused, which beside tokens of other requests is no fault."""

    name: str
    kind: str  # "exit" or "hang": what the delay is measured against
    inject: Callable[[Bench, Engine], Awaitable[Undo | None]]
    idle: bool = False


def part(engine: Engine, name: str) -> ProcessId:
    """The server, scheduler or detokenizer process of a real engine."""
    root = engine.process.id
    if name == "server":
        return root
    found = titled(process.descendants(root), WORKER_TITLES[name])
    assert found is not None
    return found


def killed(name: str) -> Fault:
    async def inject(bench: Bench, engine: Engine) -> None:
        faults.kill(part(engine, name), whole_tree=False)

    return Fault(f"crash of the {name}", "exit", inject)


def stopped(name: str) -> Fault:
    async def inject(bench: Bench, engine: Engine) -> None:
        faults.stop(part(engine, name), whole_tree=False)

    return Fault(f"SIGSTOP of the {name}", "hang", inject)


DIRECT_S = 3.0
"""After which no request is left that does not go through the proxy."""


async def blackhole(bench: Bench, engine: Engine) -> Undo:
    parts = urlsplit(engine.client.url)
    assert parts.hostname is not None and parts.port is not None
    proxy = TcpProxy(parts.hostname, parts.port)
    await proxy.start()
    engine.client.url = proxy.url
    await asyncio.sleep(DIRECT_S)
    proxy.blackhole()
    return proxy.close


def answers(name: str, **fault: Any) -> Fault:
    """A fault of the fake engine."""

    async def inject(bench: Bench, engine: Engine) -> None:
        async with bench.http.post(engine.client.url + "/fault", json=fault):
            pass

    return Fault(name, "hang", inject, idle=True)


PARTS = ("server", "scheduler", "detokenizer")
REAL_FAULTS = [
    *(killed(name) for name in PARTS),
    *(stopped(name) for name in PARTS),
    Fault("blackholed socket", "hang", blackhole),
]
FAKE_FAULTS = [
    answers("status 500 (fake)", probe_status=500),
    answers("status 503 without tokens (fake)", probe_status=503),
    answers("status 404 (fake)", probe_status=404),
    answers("hang of the generate route (fake)", probe_hang=True),
    answers("answer of another request (fake)", probe_id="probe-of-another"),
    answers("worker stopped (fake)", freeze=True),
]


# Innocents --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Innocent:
    """`live` lasts as long as the engines have to be left alone. Every engine is one trial."""

    name: str
    live: Callable[[Bench], Awaitable[None]]


async def idle(bench: Bench) -> None:
    await asyncio.sleep(4 * INTERVAL_S)


async def busy(bench: Bench) -> None:
    async with bench.under_load(groups=12, n=4):
        await asyncio.sleep(2 * (INTERVAL_S + TIMEOUT_S))


async def checked_all_the_time(bench: Bench) -> None:
    async with bench.under_load(groups=4):
        for _ in range(40):
            await bench.service.check(TIMEOUT_S)
            await asyncio.sleep(0.05)


async def slowed_idle(bench: Bench) -> None:
    await _slowed(bench, lambda: asyncio.sleep(2 * (INTERVAL_S + TIMEOUT_S)))


async def slowed_busy(bench: Bench) -> None:
    await _slowed(bench, lambda: busy(bench))


async def slowed_long_prefill(bench: Bench) -> None:
    await _slowed(bench, lambda: long_prefill(bench))


async def _slowed(bench: Bench, work: Callable[[], Awaitable[None]]) -> None:
    """Every process stopped half of the time, half a timeout at a stretch."""
    roots = [bench.engine(slot).process.id for slot in bench.slots]

    async def stop_and_go() -> None:
        while True:
            held = [p for root in roots for p in faults.stop(root)]
            try:
                await asyncio.sleep(TIMEOUT_S / 4)
            finally:
                faults.resume(held)
            await asyncio.sleep(TIMEOUT_S / 4)

    slow = asyncio.create_task(stop_and_go())
    try:
        await work()
    finally:
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
    await asyncio.sleep(INTERVAL_S)


async def long_prefill(bench: Bench) -> None:
    """One prompt of the whole context for each engine, at the same time."""
    prompts = [
        [3 + (bench.asked + slot + i * 7919) % 10 for i in range(LONG_PROMPT)]
        for slot in bench.slots
    ]
    await asyncio.gather(*(bench.ask(p, 1, 2) for p in prompts))
    await bench.all_serve()


async def overloaded(bench: Bench) -> None:
    """More requests than engines take: SGLang answers 503 to those beyond its queue, and to
    probes."""
    async with bench.under_load(groups=60, n=2, tokens=100):
        await asyncio.sleep(2 * (INTERVAL_S + TIMEOUT_S))
    await bench.all_serve()


async def paused(bench: Bench) -> None:
    engines = [bench.engine(slot) for slot in bench.slots]
    for engine in engines:
        async with quiet(engine, 5.0):
            await engine.client.pause("retract", 5.0)
            engine.move(EngineState.PAUSED, "benchmark")
    await asyncio.sleep(2 * (INTERVAL_S + TIMEOUT_S))
    for engine in engines:
        await engine.client.resume(5.0)
        engine.move(EngineState.SERVING, "benchmark")
    await asyncio.sleep(INTERVAL_S + 0.2)


async def installing(bench: Bench) -> None:
    async with bench.under_load(groups=4):
        for _ in range(12):
            await bench.publish()
    await bench.all_serve()


async def installing_while_stopped(bench: Bench) -> None:
    """An install that takes longer than interval and timeout together."""
    held = faults.stop(part(bench.engine(0), "scheduler"), whole_tree=False)
    publishing = asyncio.create_task(bench.publish())
    await bench.until(lambda: bench.engine(0).state is EngineState.INSTALLING)
    await asyncio.sleep(INTERVAL_S + TIMEOUT_S + 1.0)
    faults.resume(held)
    await publishing
    await bench.all_serve()


REAL_INNOCENTS = [
    Innocent("idle", idle),
    Innocent("busy", busy),
    Innocent("checked all the time", checked_all_the_time),
    Innocent("slowed 50 %, idle", slowed_idle),
    Innocent("slowed 50 %, busy", slowed_busy),
    Innocent("long prefill", long_prefill),
    Innocent("slowed 50 %, long prefill", slowed_long_prefill),
    Innocent("overload, 503", overloaded),
    Innocent("paused", paused),
    Innocent("installing", installing),
    Innocent("slow install", installing_while_stopped),
]


async def silent_prefill(bench: Bench) -> None:
    """Fifteen timeouts without a token."""
    await _fake(bench, prefill_s=15 * TIMEOUT_S)
    await asyncio.gather(*(bench.ask([3, 4, 5], 1, 4) for _ in bench.slots))
    await _fake(bench, prefill_s=0)
    await bench.all_serve()


async def slow_probes(bench: Bench) -> None:
    await _beside_tokens(bench, slow_probe=2 * TIMEOUT_S)


async def refused_probes(bench: Bench) -> None:
    await _beside_tokens(bench, probe_status=503)


async def _beside_tokens(bench: Bench, **fault: Any) -> None:
    await _fake(bench, token_s=0.02)
    async with bench.under_load(groups=12, n=4):
        await asyncio.sleep(1.0)
        await _fake(bench, **fault)
        end = time.monotonic() + 2 * (INTERVAL_S + TIMEOUT_S)
        while time.monotonic() < end:
            await bench.service.check(TIMEOUT_S)  # tokens alone would ask for no probe
        await _fake(bench, token_s=0, **dict.fromkeys(fault, 0))
    await bench.all_serve()


async def _fake(bench: Bench, **fault: Any) -> None:
    for slot in bench.slots:
        async with bench.http.post(bench.engine(slot).client.url + "/fault", json=fault):
            pass


FAKE_INNOCENTS = [
    Innocent("silent prefill of 15 timeouts (fake)", silent_prefill),
    Innocent("slow probes beside tokens (fake)", slow_probes),
    Innocent("503 beside tokens (fake)", refused_probes),
]
