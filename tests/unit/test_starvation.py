"""A pipeline that gets nowhere says so, with the reason, and ends where it is told to."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from rollout_parts import Host, Running, ScriptedServing

from torchtitan_rl_ft.observability.events import EventList
from torchtitan_rl_ft.rollout.generation import GenerationFailed
from torchtitan_rl_ft.rollout.starvation import RolloutStalled, Starvation


class Bench:
    def __init__(self, **limits: Any) -> None:
        self.events, self.now_s = EventList(), 0.0
        self.starvation = Starvation(
            self.events,
            unavailable_limit_s=100.0,
            groups_per_step=4,
            mono_s=lambda: self.now_s,
            **limits,
        )

    def wait(self, seconds: int, in_flight: int = 2) -> None:
        for _ in range(seconds):
            self.starvation.working(in_flight)
            self.starvation.check()
            self.now_s += 1.0

    @property
    def warnings(self) -> list[str]:
        return [e["cause"] for e in self.events.events]


@pytest.mark.row("K4")
def test_silence_is_told_with_its_reason_at_growing_distances() -> None:
    bench = Bench(warn_silent_s=10.0)
    bench.wait(9)
    assert bench.warnings == []
    bench.wait(3)
    [first] = bench.warnings
    assert "10 s while 2 are rolled out: no answer has come" in first
    bench.starvation.failed("status 502: the engine broke off")
    bench.wait(60)
    assert len(bench.warnings) == 3  # after 10, 20, 40 s
    assert "the last failure: status 502" in bench.warnings[-1]
    bench.starvation.accepted()
    bench.wait(9)
    assert len(bench.warnings) == 3


@pytest.mark.row("K4")
def test_silence_ends_the_role_where_it_is_told_to() -> None:
    bench = Bench(max_silent_s=30.0)
    bench.starvation.failed("status 502")
    with pytest.raises(RolloutStalled, match="status 502.*rl.max_silent_s"):
        bench.wait(40)
    assert bench.now_s == 30.0


def test_with_nothing_to_roll_out_silence_is_no_trouble() -> None:
    bench = Bench(max_silent_s=5.0, warn_silent_s=2.0)
    bench.wait(60, in_flight=0)
    assert bench.warnings == []


def test_of_serving_that_cannot_be_asked_one_warning_is_told() -> None:
    bench = Bench(warn_silent_s=10.0)
    for _ in range(20):
        bench.starvation.unavailable("no engine serves")
        bench.wait(1)
    assert all("no generation for" in w for w in bench.warnings)
    assert len(bench.warnings) == 2  # after 5 and 10 s


@pytest.mark.row("K4")
@pytest.mark.parametrize("limit", [3, 0])
async def test_equal_rewards_are_told_at_once_and_end_the_role(tmp_path: Path, limit: int) -> None:
    limits = {"max_flat_batches": limit}
    host = Host(
        tmp_path, ScriptedServing(), reward=lambda p, r: 0.5, steps=6, groups=4, limits=limits
    )
    async with Running(host) as ended:
        host.publish()
        await host.batch()
        [warning] = host.kinds("warn")
        assert "all rewards of each prompt group are equal" in warning["cause"]
        assert len(host.kinds("accept")) == 4  # within that many groups
        for _ in range(limit or 6):
            await host.train()
        if limit:
            with pytest.raises(RolloutStalled, match="3 batches in a row.*rl.max_flat_batches"):
                await asyncio.wait_for(ended, 5)
        else:
            await asyncio.wait_for(ended, 5)


@pytest.mark.row("K4")
async def test_every_call_fails_is_told_and_ends_the_role(tmp_path: Path) -> None:
    serving = ScriptedServing()
    serving.fail = lambda request: GenerationFailed("status 500: out of memory")
    limits = {"max_dropped_batches": 2}
    host = Host(tmp_path, serving, groups=3, max_failures=1, limits=limits)
    async with Running(host) as ended:
        host.publish()
        with pytest.raises(RolloutStalled, match="6 prompt groups in a row.*out of memory"):
            await asyncio.wait_for(ended, 10)
    [warning] = host.kinds("warn")
    assert warning["cause"].startswith("3 prompt groups in a row were dropped")
    assert "out of memory" in warning["cause"]


@pytest.mark.row("K4")
async def test_calls_that_never_end_are_told(tmp_path: Path) -> None:
    serving = ScriptedServing()
    serving.held = asyncio.Event()
    limits = {"warn_silent_s": 0.2, "max_silent_s": 0.5}
    host = Host(tmp_path, serving, groups=3, limits=limits)
    async with Running(host) as ended:
        host.publish()
        with pytest.raises(RolloutStalled, match="no answer has come"):
            await asyncio.wait_for(ended, 10)
    assert "while 3 are rolled out" in host.kinds("warn")[0]["cause"]
