"""What ACCEPT tells of a group for the trace of the run."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

from rollout_parts import Host, ScriptedServing

from torchtitan_rl_ft.observability.events import Kind
from torchtitan_rl_ft.rollout.generation import GenerateRequest, GenerationFailed
from torchtitan_rl_ft.rollout.sample_times import GroupTimes


def test_times_count_from_the_start_and_no_reward_is_null() -> None:
    legs = [[["engine-0", 0.0, None, 90.0, 3, None]]]
    told = GroupTimes(10.0, 10.01, 10.11, 10.2, 0, legs).to_json([math.nan])
    assert told["at_ms"] == [10.0, 110.0, 200.0] and told["rewards"] == [None]


def test_a_request_that_joined_an_earlier_one_is_moved_back() -> None:
    legs = [[["engine-0", 0.0, None, 300.0, 3, None]]]
    told = GroupTimes(10.0, 10.4, 10.5, 10.6, 1, legs).to_json([1.0])
    assert told["at_ms"] == [200.0, 500.0, 600.0]


async def test_each_accepted_group_tells_what_it_went_through(tmp_path: Path) -> None:
    failed: list[str] = []

    def once(request: GenerateRequest) -> Exception | None:
        if request.request_id == "group-1.0":
            failed.append(request.request_id)
            return GenerationFailed("no")
        return None

    serving = ScriptedServing()
    serving.fail = once
    host = Host(tmp_path, serving, trace=True, groups=2, steps=1)
    host.publish()
    run = asyncio.create_task(host.loop.run())
    await host.batch()
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    told = {e["group"]: e["trace"] for e in host.events.events if e["kind"] == Kind.ACCEPT}
    assert set(told) == {1, 2} and failed
    assert [told[1]["failed"], told[2]["failed"]] == [1, 0]
    for trace in told.values():
        asked_ms, generated_ms, judged_ms = trace["at_ms"]
        assert 0 <= asked_ms <= generated_ms <= judged_ms
        assert len(trace["legs"]) == len(trace["rewards"]) == 4
    assert all(r.trace for r in serving.requests)
    [sealed] = [e for e in host.events.events if e["kind"] == Kind.SEAL]
    assert sealed["groups"] == [1, 2]
