"""What engines streamed is kept when they die: the serving service over fake engines."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from policies import tiny_model
from serving_pool import Pool, open_pool

from torchtitan_rl_ft.rpc.server import make_app
from torchtitan_rl_ft.serving.requests import RequestRejected
from torchtitan_rl_ft.serving.routes import Routes

TOKENS = 60
SLOW = [{"token_s": 0.02}]
SAMPLING = {"max_new_tokens": TOKENS, "ignore_eos": True}
INTERVAL = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "m")


def ask(pool: Pool, name: str, requests: int = 8) -> list[asyncio.Task[list[Any]]]:
    """Two samples each, with seeds of their own."""
    return [
        asyncio.create_task(
            pool.generate(f"{name}-{i}", sampling=SAMPLING, seeds=[2 * i, 2 * i + 1])
        )
        for i in range(requests)
    ]


async def answers(asked: list[asyncio.Task[list[Any]]]) -> list[Any]:
    return [s for group in await asyncio.gather(*asked) for s in group]


def engine_pid(pool: Pool, slot: int) -> int:
    engine = pool.service.pool.slots[slot].engine
    assert engine is not None
    return engine.process.main.pid


@pytest.mark.row("C7")
@pytest.mark.row("C8")
@pytest.mark.parametrize("fault", ["killed", "frozen", "errors"])
async def test_samples_of_a_lost_engine_are_those_of_an_undisturbed_run(
    tmp_path: Path, model: Path, fault: str
) -> None:
    async with open_pool(
        tmp_path,
        model,
        faults={0: SLOW, 1: SLOW},
        stream_interval_tokens=INTERVAL,
        health_check_interval=0.5,
        health_check_timeout=0.5,
        health_check_first_wait=0.0,
    ) as pool:
        await pool.publish(0)
        undisturbed = await answers(ask(pool, "undisturbed"))
        asked = ask(pool, "disturbed")
        await asyncio.sleep(0.02 * TOKENS / 2)
        if fault == "killed":
            os.kill(engine_pid(pool, 1), signal.SIGKILL)
        elif fault == "frozen":
            await pool.fault(1, freeze=True)
        else:
            await pool.fault(1, break_streams=True)
        samples = await answers(asked)
        assert [s.output_ids for s in samples] == [s.output_ids for s in undisturbed]
        assert [s.logprobs for s in samples] == [s.logprobs for s in undisturbed]
        assert all(s.versions == [1] * TOKENS for s in samples)
        status = pool.service.status()
        moves = pool.seen("move")
        assert {m["subject"] for m in moves} == {"engine-1"}
        assert sorted({m["request"] for m in moves}) == [f"disturbed-{i}" for i in (1, 3, 5, 7)]
        assert status["continued_tokens"] == sum(m["tokens"] for m in moves)
        assert status["wasted_tokens"] == 0
        # Drawn twice is at most what the lost engine can have drawn, without what is kept.
        total = len(samples) * TOKENS
        assert total + (total / 2 - status["continued_tokens"]) < 1.6 * total
        assert status["continued_tokens"] > total / 8


@pytest.mark.row("C8")
@pytest.mark.row("D8")
async def test_a_prefix_keeps_its_version_when_the_rest_is_drawn_under_the_next(
    tmp_path: Path, model: Path
) -> None:
    async with open_pool(
        tmp_path, model, faults={0: SLOW, 1: SLOW}, stream_interval_tokens=INTERVAL
    ) as pool:
        await pool.publish(0)
        undisturbed = await answers(ask(pool, "undisturbed"))
        asked = ask(pool, "disturbed")
        await asyncio.sleep(0.02 * TOKENS / 2)
        os.kill(engine_pid(pool, 1), signal.SIGKILL)
        await pool.publish(1, scale=1.1, wait="first")
        samples = await answers(asked)
        for sample, before in zip(samples, undisturbed, strict=True):
            old = sample.versions.count(1)
            assert sample.versions == [1] * old + [2] * (TOKENS - old)
            assert sample.output_ids[:old] == before.output_ids[:old]
            assert (sample.min_version, sample.max_version) == (1, 2)
        moved = [s for i, s in enumerate(samples) if i // 2 % 2]
        assert sum(s.versions.count(1) for s in moved) >= pool.service.status()["continued_tokens"]


async def test_a_bad_stream_request_is_the_callers(tmp_path: Path, model: Path) -> None:
    """SGLang answers 200 and says it in the stream."""
    start = [{"reject": [9, 9]}]
    async with open_pool(
        tmp_path, model, faults={0: start, 1: start}, stream_interval_tokens=1
    ) as pool:
        await pool.publish(0)
        with pytest.raises(RequestRejected, match="this prompt is rejected"):
            await pool.generate(input_ids=[9, 9])
        assert pool.states() == ["serving", "serving"]
        assert not pool.seen("move")


# Callers --------------------------------------------------------------------------------------


@asynccontextmanager
async def asked_over_http(pool: Pool) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    """A function that posts to /v1/generate."""
    app = make_app("token", Routes(pool.service, lambda: None).table())
    async with TestClient(TestServer(app)) as client:

        async def post(**fields: Any) -> Any:
            body = {
                "request_id": "r",
                "input_ids": [3, 4, 5],
                "n": 2,
                "sampling": SAMPLING,
                "timeout_s": 20,
                **fields,
            }
            headers = {"Authorization": "Bearer token"}
            async with client.post("/v1/generate", json=body, headers=headers) as r:
                return (await r.json())["samples"] if r.status == 200 else r.status

        yield post


async def in_flight(pool: Pool, samples: int, timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while pool.service.status()["in_flight"] != samples:
            await asyncio.sleep(0.01)


async def test_a_repeated_request_joins_the_first(tmp_path: Path, model: Path) -> None:
    async with (
        open_pool(tmp_path, model, faults={0: SLOW, 1: SLOW}, stream_interval_tokens=4) as pool,
        asked_over_http(pool) as post,
    ):
        await pool.publish(0)
        first = asyncio.create_task(post())
        await in_flight(pool, 2, 5.0)
        second = asyncio.create_task(post())
        await asyncio.sleep(0.2)
        assert await first == await second == await post()
        calls = [p for slot in (0, 1) for _, p in await pool.calls(slot) if p == "/generate"]
        assert len(calls) == 1
        # Another prompt under the same name is another request.
        assert await post(input_ids=[3]) != await first


@pytest.mark.scenario("O-2")
async def test_what_a_caller_left_behind_ends_in_the_engine(tmp_path: Path, model: Path) -> None:
    """Once the last of those who wait for it has gone."""
    async with (
        open_pool(tmp_path, model, faults={0: SLOW, 1: SLOW}, stream_interval_tokens=4) as pool,
        asked_over_http(pool) as post,
    ):
        await pool.publish(0)
        left = [asyncio.create_task(post(request_id=f"r{i}")) for i in range(20)]
        again = asyncio.create_task(post(request_id="r0"))
        await in_flight(pool, 40, 5.0)
        await asyncio.sleep(0.1)
        for task in left:
            task.cancel()
        await in_flight(pool, 2, 2.0)
        async with asyncio.timeout(2.0):
            while sum([(await pool.fault(slot))["running"] for slot in (0, 1)]) > 1:
                await asyncio.sleep(0.05)
        assert len(await again) == 2
        assert pool.service.status()["wasted_tokens"] > 0
        assert not pool.seen("move")


async def test_sampling_that_cannot_be_continued_is_refused(tmp_path: Path, model: Path) -> None:
    wrong: list[dict[str, Any]] = [
        {"max_new_tokens": None},
        {"max_new_tokens": -1},
        {"max_new_tokens": "8"},
        {"min_new_tokens": 1.5},
        {"stop_token_ids": [1, "2"]},
        {"sampling_seed": 1},
        {"n": 2},
    ]
    async with open_pool(tmp_path, model, engines=1) as pool, asked_over_http(pool) as post:
        await pool.publish(0)
        assert [await post(sampling=sampling) for sampling in wrong] == [400] * len(wrong)
