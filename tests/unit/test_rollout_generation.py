"""The serving client over HTTP, answers checked, judging, seeds."""

from __future__ import annotations

import asyncio
import math
import threading
import time

import aiohttp
import pytest
from aiohttp import web

from torchtitan_rl_ft.rollout.generation import (
    GenerateRequest,
    GenerationFailed,
    ServingClient,
    ServingUnavailable,
    checked_samples,
    sample_seed,
)
from torchtitan_rl_ft.rollout.judging import Judge, RewardFailed
from torchtitan_rl_ft.rollout.protocols import Prompt, Response
from torchtitan_rl_ft.rpc.server import make_app, start

REQUEST = GenerateRequest("group-1.0", [5, 6], 2, {"temperature": 1.0}, [1, 2], 0.3)


def sample(**changes):
    good = {
        "output_ids": [4, 2],
        "logprobs": [-0.1, -0.2],
        "versions": [3, 3],
        "finish_reason": "stop",
        "engine": "engine-0",
        "min_version": 3,
        "max_version": 3,
    }
    return {**good, **changes}


class Served:
    """A role that answers what it is told to."""

    def __init__(self, answer) -> None:
        self.answer, self.bodies = answer, []

    async def __aenter__(self) -> ServingClient:
        async def generate(request):
            self.bodies.append(await request.json())
            return await self.answer(request)

        routes = [web.post("/v1/generate", generate), web.get("/v1/version", self.answer)]
        url, self.runner = await start(make_app("secret", routes))
        self.session = aiohttp.ClientSession()
        return ServingClient(self.session, lambda: url, "secret")

    async def __aexit__(self, *_):
        await self.session.close()
        await self.runner.cleanup()


def answering(body, status=200):
    async def answer(request):
        return web.json_response(body, status=status)

    return answer


async def test_request_and_answer():
    served = Served(answering({"samples": [sample(), sample(logprobs=[None, -0.2])]}))
    async with served as client:
        first, second = await client.generate(REQUEST)
    assert first.output_ids == [4, 2] and first.finish_reason == "stop"
    assert math.isnan(second.logprobs[0])
    assert served.bodies == [
        {
            "request_id": "group-1.0",
            "input_ids": [5, 6],
            "n": 2,
            "sampling": {"temperature": 1.0},
            "seeds": [1, 2],
            "timeout_s": 0.3,
        }
    ]


@pytest.mark.parametrize(
    ("status", "error"),
    [(503, ServingUnavailable), (400, GenerationFailed), (500, GenerationFailed)],
)
async def test_statuses(status, error):
    async with Served(answering({"error": "because"}, status)) as client:
        with pytest.raises(error, match="because"):
            await client.generate(REQUEST)


async def test_nobody_there():
    async with aiohttp.ClientSession() as session:
        with pytest.raises(ServingUnavailable, match="has not come up"):
            await ServingClient(session, lambda: None, "t").generate(REQUEST)
        with pytest.raises(ServingUnavailable, match="Connect"):
            await ServingClient(session, lambda: "http://127.0.0.1:9", "t").generate(REQUEST)


async def test_answer_in_no_time_is_the_prompts_failure(monkeypatch):
    monkeypatch.setattr("torchtitan_rl_ft.rollout.generation.GRACE_S", 0.0)

    async def late(request):
        await asyncio.sleep(5)

    async with Served(late) as client:
        with pytest.raises(GenerationFailed, match="no answer"):
            await client.generate(REQUEST)


async def test_policy():
    state = {"version": 4, "step": 3, "token": "abc", "serving": 2}
    async with Served(answering(state)) as client:
        policy = await client.policy(3, 1.0)
        assert (policy.version, policy.step, policy.token) == (4, 3, "abc")
        assert await client.policy(4, 1.0) is None
    async with Served(answering({**state, "serving": 0})) as client:
        assert await client.policy(3, 1.0) is None
    async with Served(answering({"version": None, "step": None, "token": None})) as client:
        assert await client.policy(-1, 1.0) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"finish_reason": "abort"}, "ended with 'abort'"),
        ({"logprobs": [-0.1]}, "2 tokens, 1 log-probs, 2 versions"),
        ({"versions": [3, None]}, "policy version"),
        ({"min_version": "default"}, "policy version"),
    ],
)
def test_unfit_samples_are_refused(changes, message):
    with pytest.raises(GenerationFailed, match=message):
        checked_samples({"samples": [sample(), sample(**changes)]}, 2)


def test_missing_fields_and_samples_are_refused():
    broken = sample()
    del broken["versions"]
    with pytest.raises(GenerationFailed, match="lacks 'versions'"):
        checked_samples({"samples": [broken]}, 1)
    with pytest.raises(GenerationFailed, match="asked for 2 samples, got 1"):
        checked_samples({"samples": [sample()]}, 2)


@pytest.mark.scenario("C-6")
def test_seeds_differ_by_run_epoch_prompt_and_sample():
    seeds = {
        sample_seed(run, epoch, index, i)
        for run in range(3)
        for epoch in range(3)
        for index in range(20)
        for i in range(16)
    }
    assert len(seeds) == 3 * 3 * 20 * 16
    assert all(0 <= s < 2**31 for s in seeds)
    assert sample_seed(0, 1, 2, 3) == sample_seed(0, 1, 2, 3)


# Judging --------------------------------------------------------------------------------------

PROMPT = Prompt("1>", "1")
RESPONSES = [Response("1", [4], "stop"), Response("2", [5], "stop")]


async def test_plain_reward_runs_beside_the_event_loop():
    threads = set()

    def reward(prompt, response):
        threads.add(threading.get_ident())
        return response.text == prompt.answer

    assert await Judge(reward, timeout_s=5.0).rewards(PROMPT, RESPONSES) == [1.0, 0.0]
    assert threading.get_ident() not in threads


async def test_async_reward_judges_a_group_at_once():
    both = asyncio.Barrier(2)

    class Reward:
        closed = False

        async def __call__(self, prompt, response):
            await both.wait()
            return None if response.text == "2" else 1

        async def close(self):
            self.closed = True

    reward = Reward()
    judge = Judge(reward, timeout_s=5.0)
    first, second = await judge.rewards(PROMPT, RESPONSES)
    assert first == 1.0 and math.isnan(second)
    await judge.close()
    assert reward.closed


@pytest.mark.parametrize("value", [math.inf, math.nan, None])
async def test_no_verdict(value):
    assert all(
        math.isnan(r)
        for r in await Judge(lambda p, r: value, timeout_s=5.0).rewards(PROMPT, RESPONSES)
    )


async def test_failing_rewards():
    with pytest.raises(RewardFailed, match="no number"):
        await Judge(lambda p, r: "good", timeout_s=5.0).rewards(PROMPT, RESPONSES)
    with pytest.raises(RewardFailed, match="ZeroDivisionError"):
        await Judge(lambda p, r: 1 / 0, timeout_s=5.0).rewards(PROMPT, RESPONSES)
    judge = Judge(lambda p, r: time.sleep(1), timeout_s=0.05)
    with pytest.raises(RewardFailed, match="no reward within 0.05 s"):
        await judge.rewards(PROMPT, RESPONSES)


def test_failing_filter():
    judge = Judge(lambda p, r: 0, lambda p, rewards: 1 / 0, timeout_s=5.0)
    with pytest.raises(RewardFailed, match="filter: ZeroDivisionError"):
        judge.reason_to_drop(PROMPT, [0.0])
    assert Judge(lambda p, r: 0, timeout_s=5.0).reason_to_drop(PROMPT, [0.0]) is None
