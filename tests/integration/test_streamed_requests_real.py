"""What real SGLang engines streamed is kept and continued."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import httpx
import psutil
import pytest
from conftest import ServingRole

from torchtitan_rl_ft.serving.continuation import request_body
from torchtitan_rl_ft.serving.engine_client import EngineClient
from torchtitan_rl_ft.serving.requests import GenerateRequest
from torchtitan_rl_ft.serving.samples import Draft, Leg

pytestmark = pytest.mark.timeout(150)

TOKENS = 240
"""So many that all samples of an engine run at once: it has room for 8,192."""

SAMPLING = {"max_new_tokens": TOKENS, "ignore_eos": True}
GROUPS, SAMPLES = 16, 4
LAST_BIT = 2e-6
"""A CPU's matrix product may differ by as much with the shape of the batch."""


@pytest.mark.row("C8")
def test_a_continued_sample_has_the_tokens_of_an_undisturbed_one(
    real_serving: ServingRole,
) -> None:
    """Equal weights, same seeds: whatever was drawn before, on either engine."""
    seeds = list(range(40, 48))
    asked = GenerateRequest("whole", [3, 4, 5], 8, SAMPLING, seeds, 60.0)
    whole = real_serving.generate("whole", n=8, sampling=SAMPLING, seeds=seeds)
    version = whole[0]["versions"][0]
    cuts = [1, 2, 31, 32, 33, 120, 238, 239]

    async def continued(url: str) -> list[Draft]:
        drafts = [
            Draft(s["output_ids"][:cut], s["logprobs"][:cut], s["versions"][:cut])
            for s, cut in zip(whole, cuts, strict=True)
        ]
        legs = [Leg(draft, "engine", version) for draft in drafts]
        async with aiohttp.ClientSession() as http:
            client = EngineClient(http, url, "engine")
            body = request_body(asked, drafts, range(8), 32)
            await client.generate(body, lambda m: legs[m["index"]].take(m), 60.0)
        return drafts

    for engine in real_serving.engines():
        drafts = asyncio.run(continued(engine["url"]))
        assert [d.output_ids for d in drafts] == [s["output_ids"] for s in whole]
        for draft, sample in zip(drafts, whole, strict=True):
            assert draft.finish_reason == sample["finish_reason"] == "length"
            assert draft.logprobs == pytest.approx(sample["logprobs"], abs=LAST_BIT)


@pytest.mark.row("C7")
@pytest.mark.row("C8")
@pytest.mark.row("D8")
def test_an_engine_killed_half_way_costs_no_token_that_it_told(real_serving: ServingRole) -> None:
    """64 samples in flight, one of two engines killed at half of a long generation, and the next
    version published at once: what it told is kept as it was, under the old version."""
    with ThreadPoolExecutor(GROUPS) as threads:
        groups = threads.map(lambda g: group(real_serving, "undisturbed", g), range(GROUPS))
        undisturbed = [sample for samples in groups for sample in samples]
    before = real_serving.status()
    victim = real_serving.engines()[1]
    with ThreadPoolExecutor(GROUPS) as threads:
        asked = [threads.submit(group, real_serving, "killed", g) for g in range(GROUPS)]
        half = GROUPS * SAMPLES // 2 * TOKENS // 2
        real_serving.until(lambda: tokens_held(victim) > half, 20)
        os.kill(victim["pid"], signal.SIGKILL)
        real_serving.publish(20, scale=1.3, wait="first")
        disturbed = [s for future in asked for s in future.result()]

    old, new = before["version"], before["version"] + 1
    assert len(disturbed) == GROUPS * SAMPLES
    for sample, whole in zip(disturbed, undisturbed, strict=True):
        assert len(sample["output_ids"]) == len(sample["logprobs"]) == TOKENS
        kept = sample["versions"].count(old)
        assert sample["versions"] == [old] * kept + [new] * (TOKENS - kept)
        assert sample["output_ids"][:kept] == whole["output_ids"][:kept]
        assert sample["logprobs"][:kept] == pytest.approx(whole["logprobs"][:kept], abs=LAST_BIT)

    moves = [e for e in real_serving.events("move") if e["data"]["request"].startswith("killed-")]
    assert {e["data"]["subject"] for e in moves} == {"engine-1"}
    moved = [e["data"]["request"] for e in moves]
    assert sorted(moved) == sorted(set(moved))  # one try each was enough
    assert len(moved) == GROUPS / 2
    status = real_serving.status()
    kept = status["continued_tokens"] - before["continued_tokens"]
    assert kept == sum(e["data"]["tokens"] for e in moves)
    assert status["wasted_tokens"] == before["wasted_tokens"]
    # Drawn twice is at most what the victim can have drawn, without what is kept.
    total = GROUPS * SAMPLES * TOKENS
    assert total + (total / 2 - kept) < 1.6 * total
    assert kept > total / 8
    real_serving.until_served(new)


def tokens_held(engine: dict[str, Any]) -> int:
    """Of running requests, by SGLang's own count."""
    return httpx.get(engine["url"] + "/v1/loads").json()["loads"][0]["num_used_tokens"]


def group(role: ServingRole, name: str, g: int) -> list[dict[str, Any]]:
    seeds = [100 * g + i for i in range(SAMPLES)]
    return role.generate(f"{name}-{g}", n=SAMPLES, sampling=SAMPLING, seeds=seeds)


@pytest.mark.row("C8")
def test_a_lent_engine_loses_no_token_and_comes_back(real_serving: ServingRole) -> None:
    """In the middle of 64 samples its place is lent, then returned: every sample is that of an
    undisturbed run, and the newcomer serves the version that was published meanwhile."""
    with ThreadPoolExecutor(GROUPS) as threads:
        groups = threads.map(lambda g: group(real_serving, "before", g), range(GROUPS))
        undisturbed = [sample for samples in groups for sample in samples]
    before = real_serving.status()
    pids = [engine["pid"] for engine in real_serving.engines()]
    with ThreadPoolExecutor(GROUPS) as threads:
        asked = [threads.submit(group, real_serving, "lent", g) for g in range(GROUPS)]
        some = GROUPS * SAMPLES // 2 * TOKENS // 4
        real_serving.until(lambda: tokens_held(real_serving.engines()[1]) > some, 60)
        lent = real_serving.client.post(
            "/v1/lend", {"timeout_s": 20.0, "borrower": "trainer-1"}, deadline_s=40
        )
        samples = [s for future in asked for s in future.result()]
    slot = lent["slot"]
    assert lent == {"slot": slot, "devices": []} and real_serving.engines()[slot]["pid"] is None
    with pytest.raises(psutil.NoSuchProcess):
        psutil.Process(pids[slot])
    assert [s["output_ids"] for s in samples] == [s["output_ids"] for s in undisturbed]
    after = real_serving.status()
    assert after["wasted_tokens"] == before["wasted_tokens"]
    assert after["continued_tokens"] > before["continued_tokens"]
    # What the engine had drawn was all used: no token was drawn twice.
    drawn = after["drawn_tokens"] - before["drawn_tokens"]
    assert drawn == GROUPS * SAMPLES * TOKENS
    new = real_serving.publish(60, scale=1.2, wait="first")["version"]
    assert real_serving.client.post("/v1/return", {"slot": slot}, deadline_s=5) == {}
    real_serving.until_served(new)
