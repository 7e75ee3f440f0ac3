"""Engines are checked after every rollout and after the evaluation, at a bounded price."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from rollout_parts import Host, ScriptedServing

from torchtitan_rl_ft.observability.events import EventList
from torchtitan_rl_ft.rollout.engine_check import LONGEST_S, VERDICT_S, EngineCheck
from torchtitan_rl_ft.rollout.generation import GenerationFailed, ServingUnavailable

pytestmark = pytest.mark.row("B2")


async def started(host: Host) -> asyncio.Task:
    host.publish()
    return asyncio.create_task(host.loop.run())


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def stopped(host: Host, running: asyncio.Task) -> None:
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    host.close()


async def test_no_batch_before_its_check(tmp_path):
    host = Host(tmp_path, ScriptedServing(), steps=3)
    serving = host.serving
    serving.check_held = asyncio.Event()
    running = await started(host)
    await until(lambda: serving.checks)
    await asyncio.sleep(0.3)
    assert serving.checks == [2.0 + VERDICT_S]  # one, although the loop looked more often
    assert len(serving.requests) == 3
    assert host.journal.head() is None
    serving.check_held.set()
    batch = await host.train()
    assert batch.meta["rollout/engine_check_s"] >= 0.2
    await host.train()
    assert len(serving.checks) == 2
    await stopped(host, running)


async def test_rollouts_go_on_during_a_check(tmp_path):
    host = Host(tmp_path, ScriptedServing(), mode="async", max_policy_age=2, steps=10)
    host.serving.check_held = asyncio.Event()
    running = await started(host)
    await until(lambda: len(host.serving.requests) > 3)  # more than one batch of prompts
    await asyncio.sleep(0.1)
    assert host.journal.head() is None
    await stopped(host, running)


@pytest.mark.parametrize("error", [ServingUnavailable("no serving"), GenerationFailed("late")])
async def test_a_check_that_cannot_be_made_costs_a_warning(tmp_path, error):
    host = Host(tmp_path, ScriptedServing(), steps=2)
    host.serving.check_fails = error
    running = await started(host)
    await host.train()
    await host.train()
    causes = [e["cause"] for e in host.kinds("warn")]
    assert causes == [f"engines not checked: {error}"] * 2
    await stopped(host, running)


async def test_the_evaluation_is_followed_by_a_check(tmp_path):
    host = Host(tmp_path, ScriptedServing(), steps=1, eval_prompts=2)
    running = await started(host)
    await host.train()
    await asyncio.wait_for(running, 5)
    assert len(host.serving.checks) == 2
    host.close()


async def test_a_long_health_limit_does_not_hold_the_trainer_up(tmp_path):
    host = Host(tmp_path, ScriptedServing(), steps=1, health_check_timeout_s=600.0)
    running = await started(host)
    await host.batch()
    assert host.serving.checks == [LONGEST_S]
    await stopped(host, running)


@pytest.mark.row("B5")
@pytest.mark.parametrize("colocated", [False, True])
async def test_colocated_engines_give_their_memory_up_before_the_batch_is_seen(colocated):
    class Serving:
        calls: list[str] = []

        async def check(self, timeout_s: float) -> list[int]:
            self.calls.append("check")
            return []

        async def release(self, timeout_s: float) -> list[int]:
            self.calls.append("release")
            raise GenerationFailed("engine-0 is not idle after 2 s: running 1")

    serving, events, woken = Serving(), EventList(), asyncio.Event()
    serving.calls = []
    check = EngineCheck(serving, events, 2.0, on_done=woken.set, colocated=colocated)
    assert not check.done()  # no batch is sealed before this is true
    await woken.wait()
    assert check.done()
    assert serving.calls == (["check", "release"] if colocated else ["check"])
    warned = [e["cause"] for e in events.events]
    assert bool(warned) == colocated and all("engine-0 is not idle" in w for w in warned)
    await check.close()
