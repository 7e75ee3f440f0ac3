"""The rollout role's client is told of unfinished samples: routes and client over fake engines."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from policies import tiny_model
from serving_pool import Pool, open_pool

from torchtitan_rl_ft.rollout.generation import (
    GenerateRequest,
    GenerationFailed,
    HeldSample,
    ServingClient,
    ServingUnavailable,
)
from torchtitan_rl_ft.rollout.partials import Unfinished
from torchtitan_rl_ft.rpc.server import make_app, start
from torchtitan_rl_ft.serving.routes import Routes

TOKENS, INTERVAL = 120, 16
SLOW = [{"token_s": 0.02}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "m")


def request(name: str = "r", **changed: Any) -> GenerateRequest:
    sampling = {"max_new_tokens": TOKENS, "ignore_eos": True}
    given = {
        "request_id": name,
        "input_ids": [3, 4, 5],
        "n": 2,
        "sampling": sampling,
        "seeds": [1, 2],
        "timeout_s": 20.0,
        "partial_interval_tokens": INTERVAL,
        **changed,
    }
    return GenerateRequest(**given)


@asynccontextmanager
async def client_of(pool: Pool) -> AsyncIterator[ServingClient]:
    app = make_app("token", Routes(pool.service, lambda: None).table())
    url, runner = await start(app, grace_s=0.1)
    async with aiohttp.ClientSession() as http:
        yield ServingClient(http, lambda: url, "token")
    await runner.cleanup()


@pytest.mark.row("C8")
async def test_what_comes_is_told_and_goes_on_in_another_request(
    tmp_path: Path, model: Path
) -> None:
    async with (
        open_pool(tmp_path, model, faults={0: SLOW, 1: SLOW}) as pool,
        client_of(pool) as client,
    ):
        await pool.publish(0)
        told: list[int] = []
        first = Unfinished(2, lambda pieces: told.append(len(pieces)))
        whole = await client.generate(request("whole"), first.take)
        assert len(told) >= TOKENS // INTERVAL
        held = first.held()
        for sample, known in zip(whole, held, strict=True):
            n = len(known.output_ids)
            assert n > TOKENS - INTERVAL and known.output_ids == sample.output_ids[:n]
            assert known.logprobs == sample.logprobs[:n]

        # The caller goes, and another goes on from what it had.
        part = Unfinished(2)
        asked = asyncio.create_task(client.generate(request("gone"), part.take))
        async with asyncio.timeout(20):
            while not part.tokens:
                await asyncio.sleep(0.01)
        asked.cancel()
        await asyncio.wait({asked})
        kept, drawn = part.tokens, pool.service.status()["drawn_tokens"]
        again = await client.generate(request("gone", held=part.held()))
        assert [s.output_ids for s in again] == [s.output_ids for s in whole]
        assert [s.logprobs for s in again] == [s.logprobs for s in whole]
        repeated = pool.service.status()["drawn_tokens"] - drawn - (2 * TOKENS - kept)
        assert repeated <= 2 * INTERVAL  # what came between the cancel and its notice

        # What is whole already costs no engine anything.
        drawn = pool.service.status()["drawn_tokens"]
        done = [HeldSample(s.output_ids, s.logprobs, s.versions) for s in whole]
        assert await client.generate(request("done", held=done)) == again
        assert pool.service.status()["drawn_tokens"] == drawn


async def test_short_answers_and_callers_that_do_not_ask_get_plain_ones(
    tmp_path: Path, model: Path
) -> None:
    async with open_pool(tmp_path, model) as pool, client_of(pool) as client:
        await pool.publish(0)
        told: list[Any] = []
        short = {"max_new_tokens": 6, "ignore_eos": True}
        await client.generate(request("short", sampling=short), told.extend)
        await client.generate(request("long", partial_interval_tokens=0), told.extend)
        assert not told


@pytest.mark.row("C8")
@pytest.mark.parametrize("every_engine_dies", [True, False])
async def test_a_failed_request_gives_what_it_has(
    tmp_path: Path, model: Path, every_engine_dies: bool
) -> None:
    """Over its limit, or without engines: every token that serving got is told."""
    async with (
        open_pool(tmp_path, model, engines=1, faults={0: SLOW}, min_engines=0) as pool,
        client_of(pool) as client,
    ):
        await pool.publish(0)
        part = Unfinished(2)
        error = GenerationFailed
        if every_engine_dies:
            error = (GenerationFailed, ServingUnavailable)
        asked = asyncio.create_task(client.generate(request(timeout_s=1.5), part.take))
        if every_engine_dies:
            async with asyncio.timeout(20):
                while not part.tokens:
                    await asyncio.sleep(0.01)
            engine = pool.service.pool.slots[0].engine
            assert engine is not None
            os.kill(engine.process.main.pid, signal.SIGKILL)
        with pytest.raises(error, match="2 of 2 samples not generated"):
            await asked
        status = pool.service.status()
        assert part.tokens == status["drawn_tokens"] > 0 == status["wasted_tokens"]


async def test_held_tokens_that_no_sample_can_go_on_from_are_refused(
    tmp_path: Path, model: Path
) -> None:
    good = HeldSample([5], [-1.0], [1])
    async with open_pool(tmp_path, model, engines=1) as pool, client_of(pool) as client:
        await pool.publish(0)
        for held, message in (
            ([good], "held has 1 entries for 2 samples"),
            ([good, HeldSample([5, 6], [-1.0], [1])], "differ in length"),
            ([good, HeldSample([5], [-1.0], [0])], "version below 1"),
            ([good, HeldSample([99], [-1.0], [1])], "token 99"),
            ([good, HeldSample(["x"], [-1.0], [1])], "held is not understood"),
        ):
            with pytest.raises(GenerationFailed, match=f"400.*{message}"):
                await client.generate(request("bad", held=held))
        penalty = {"max_new_tokens": 8, "frequency_penalty": 1.0}
        with pytest.raises(GenerationFailed, match="400.*cannot go on"):
            await client.generate(request("bad", held=[good, good], sampling=penalty))
        with pytest.raises(GenerationFailed, match="400.*partial_interval_tokens"):
            await client.generate(request("bad", partial_interval_tokens=-1))
