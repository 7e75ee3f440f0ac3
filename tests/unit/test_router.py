"""A request's way from engine to engine, on engines that do what a script says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan_rl_ft.observability.events import EventList
from torchtitan_rl_ft.serving.changes import Changes
from torchtitan_rl_ft.serving.engine_client import EngineRefused, EngineUnreachable
from torchtitan_rl_ft.serving.requests import GenerateRequest, RequestFailed, RequestRejected
from torchtitan_rl_ft.serving.router import MAX_ABORTS, EngineGone, Router
from torchtitan_rl_ft.serving.samples import Sample

EOS = 2
ABORT = {"type": "abort", "message": "Aborted", "status_code": None}

Take = Callable[[dict[str, Any]], None]
Script = Callable[["ScriptedEngine", dict[str, Any], Take], Awaitable[None]]


def token(seed: int, position: int) -> int:
    """What every engine draws there."""
    return 3 + (seed * 7 + position * 5) % 11


def whole(seed: int, n: int) -> list[int]:
    return [token(seed, p) for p in range(n)]


@dataclass
class ScriptedEngine:
    slot: int
    script: Script
    version: int = 7
    name: str = ""
    reason: str = "killed"
    in_flight: int = 0
    progress: int = 0
    suspicions: list[str] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    takes: list[Take] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.name = self.name or f"engine-{self.slot}"
        self.gone = asyncio.Event()
        self.client = self
        self.group = SimpleNamespace(name="policy")

    async def generate(self, body: dict[str, Any], take: Take, timeout_s: float) -> None:
        self.asked.append(body)
        self.takes.append(take)
        await self.script(self, body, take)

    def begin(self, samples: int) -> None:
        self.in_flight += samples

    def end(self, samples: int) -> None:
        self.in_flight -= samples

    def made_progress(self) -> None:
        self.progress += 1

    def suspect(self, reason: str) -> None:
        self.suspicions.append(reason)


def say(
    engine: ScriptedEngine,
    body: dict[str, Any],
    take: Take,
    index: int,
    start: int,
    end: int | None = None,
    finish: dict[str, Any] | None = None,
    **meta: Any,
) -> None:
    """Tokens start..end (of this engine's part) of a sample; to its end when `end` is None."""
    held = len(body["input_ids"][index]) - 2
    asked = body["sampling_params"][index]
    last = asked["max_new_tokens"] if end is None else end
    ids = [token(asked["sampling_seed"], held + p) for p in range(start, last)]
    if end is None and finish is None:
        finish = {"type": "length", "length": last}
    told = {
        "finish_reason": finish,
        "weight_version": str(engine.version),
        "completion_tokens": last,
        "output_token_logprobs": [[-0.5, t, None] for t in ids],
        **meta,
    }
    if finish is not None:
        told["weight_versions"] = [{"version": str(engine.version), "start": 0, "end": last}]
    take({"index": index, "output_ids": ids, "meta_info": told})


async def answers(engine: ScriptedEngine, body: dict[str, Any], take: Take) -> None:
    for index in range(len(body["input_ids"])):
        say(engine, body, take, index, 0)


class Bench:
    def __init__(self, *scripts: Script) -> None:
        self.engines = [ScriptedEngine(i, script) for i, script in enumerate(scripts)]
        self.events = EventList()
        pool: Any = SimpleNamespace(
            servers=lambda group: [e for e in self.engines if not e.gone.is_set()]
        )
        self.router = Router(
            pool, Changes(), self.events, 5.0, interval_tokens=4, stops={"policy": {EOS}}
        )

    async def generate(self, n: int = 2, trace: bool = False, **sampling: Any) -> list[Sample]:
        asked = {"max_new_tokens": 10, **sampling}
        seeds = list(range(1, n + 1))
        request = GenerateRequest("r", [1, 1], n, asked, seeds, 5.0, trace=trace)
        return await self.router.generate(request)

    @property
    def counts(self) -> tuple[int, int]:
        return self.router.wasted_tokens, self.router.continued_tokens

    @property
    def moves(self) -> list[dict[str, Any]]:
        return [e for e in self.events.events if e["kind"] == "move"]


# Continued ------------------------------------------------------------------------------------


@pytest.mark.row("C8")
async def test_another_engine_goes_on_from_what_was_told() -> None:
    async def dies(engine: ScriptedEngine, body: dict[str, Any], take: Take) -> None:
        say(engine, body, take, 0, 0, 1)
        say(engine, body, take, 1, 0)
        say(engine, body, take, 0, 1, 5)
        raise EngineUnreachable("connection lost")

    bench = Bench(dies, answers)
    bench.engines[1].version = 8
    first, second = await bench.generate()
    assert first.output_ids == whole(1, 10)
    assert second.output_ids == whole(2, 10)
    assert (first.versions, second.versions) == ([7] * 5 + [8] * 5, [7] * 10)
    assert (first.min_version, first.max_version, first.engine) == (7, 8, "engine-1")
    [asked] = bench.engines[1].asked
    assert asked["input_ids"] == [[1, 1, *whole(1, 5)]]
    assert asked["sampling_params"] == [{"max_new_tokens": 5, "sampling_seed": 1}]
    assert bench.counts == (0, 5)
    [move] = bench.moves
    assert (move["request"], move["subject"], move["samples"], move["tokens"]) == (
        "r",
        "engine-0",
        1,
        5,
    )
    assert bench.engines[0].suspicions == ["connection lost"]
    assert [e.progress for e in bench.engines] == [3, 1]
    assert [e.in_flight for e in bench.engines] == [0, 0]


@pytest.mark.row("C8")
async def test_many_engines_may_have_a_part_in_a_sample() -> None:
    def part(n: int) -> Script:
        async def dies(engine: ScriptedEngine, body: dict[str, Any], take: Take) -> None:
            say(engine, body, take, 0, 0, n)
            raise EngineRefused(503, "overloaded")

        return dies

    bench = Bench(part(1), part(2), part(3), answers)
    [sample] = await bench.generate(n=1)
    assert sample.output_ids == whole(1, 10)
    assert bench.counts == (0, 6)
    assert [len(e.asked) for e in bench.engines] == [1, 1, 1, 1]
    assert all(not e.suspicions for e in bench.engines)  # it answered


@pytest.mark.row("C10")
async def test_aborted_samples_go_on_and_avoid_nobody() -> None:
    async def aborts_once(engine: ScriptedEngine, body: dict[str, Any], take: Take) -> None:
        if len(engine.asked) > 1:
            return await answers(engine, body, take)
        say(engine, body, take, 0, 0, 4, ABORT)
        say(engine, body, take, 1, 0, 0, ABORT)

    bench = Bench(aborts_once)
    samples = await bench.generate()
    assert [s.output_ids for s in samples] == [whole(1, 10), whole(2, 10)]
    assert {s.finish_reason for s in samples} == {"length"}
    assert bench.counts == (0, 4)


async def test_aborts_that_leave_tokens_are_not_counted() -> None:
    """A long sample lives through many publishes."""

    async def aborts(engine: ScriptedEngine, body: dict[str, Any], take: Take) -> None:
        say(engine, body, take, 0, 0, 1, ABORT)

    bench = Bench(aborts)
    [sample] = await bench.generate(n=1, max_new_tokens=2 * MAX_ABORTS)
    assert sample.output_ids == whole(1, 2 * MAX_ABORTS)
    assert bench.counts == (0, 2 * MAX_ABORTS - 1)
    with pytest.raises(RequestFailed, match=f"0 failures and {MAX_ABORTS} aborts"):
        await bench.generate(n=1, stop=["END"], max_new_tokens=2 * MAX_ABORTS)


async def test_aborts_are_bounded() -> None:
    async def aborts(engine: ScriptedEngine, body: dict[str, Any], take: Take) -> None:
        say(engine, body, take, 0, 0, 0, ABORT)

    bench = Bench(aborts)
    with pytest.raises(RequestFailed, match=f"0 failures and {MAX_ABORTS} aborts"):
        await bench.generate(n=1)


@pytest.mark.row("C8")
@pytest.mark.parametrize(("end", "finish"), [("stop", "stop"), ("length", "length")])
async def test_a_sample_whose_end_was_not_told_is_not_extended(end: str, finish: str) -> None:
    """SGLang looks for no end in the step in which a request is aborted."""

    async def aborts(engine: ScriptedEngine, body: dict[str, Any], take: Take) -> None:
        say(engine, body, take, 0, 0, 4)
        if end == "length":
            say(engine, body, take, 0, 4, 10, ABORT)
            return
        last = {"output_token_logprobs": [[-0.5, EOS, None]], "completion_tokens": 5}
        meta = {"finish_reason": ABORT, "weight_version": "7", **last}
        take({"index": 0, "output_ids": [EOS], "meta_info": meta})

    bench = Bench(aborts)
    [sample] = await bench.generate(n=1)
    assert sample.finish_reason == finish
    assert sample.output_ids == (whole(1, 10) if end == "length" else [*whole(1, 4), EOS])
    assert len(bench.engines[0].asked) == 1
    assert (bench.moves, bench.counts) == ([], (0, 0))


async def test_all_told_and_the_connection_lost_is_an_answer() -> None:
    async def dies_at_the_end(engine: ScriptedEngine, body: dict[str, Any], take: Take) -> None:
        await answers(engine, body, take)
        raise EngineUnreachable("the answer broke off")

    bench = Bench(dies_at_the_end)
    assert len(await bench.generate()) == 2
    assert len(bench.engines[0].asked) == 1


# Fenced ---------------------------------------------------------------------------------------


@pytest.mark.scenario("Z-3")
@pytest.mark.row("C8")
async def test_what_a_retired_engine_still_says_is_not_used() -> None:
    """Also not when its address has another life meanwhile: the life is what counts."""
    told = asyncio.Event()

    async def hangs(engine: ScriptedEngine, body: dict[str, Any], take: Take) -> None:
        say(engine, body, take, 0, 0, 2)
        told.set()
        await asyncio.Event().wait()

    bench = Bench(hangs)
    asking = asyncio.create_task(bench.generate(n=1))
    await told.wait()
    [first] = bench.engines
    first.gone.set()
    second = ScriptedEngine(0, answers)
    bench.engines.append(second)
    [sample] = await asking
    assert sample.output_ids == whole(1, 10)
    [late] = first.takes
    with pytest.raises(EngineGone, match="engine-0 was retired: killed"):
        say(first, first.asked[0], late, 0, 2)
    assert sample.output_ids == whole(1, 10)
    assert (first.in_flight, first.progress, second.progress) == (0, 1, 1)
    assert bench.counts == (0, 2)


# Thrown away ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"weight_version": "default"},
        {"weight_version": "6"},
        {"completion_tokens": 9},
        {"output_token_logprobs": [[float("nan"), token(1, 4), None]]},
    ],
)
async def test_an_engine_that_says_something_wrong_has_said_nothing(wrong: dict) -> None:
    async def errs(engine: ScriptedEngine, body: dict[str, Any], take: Take) -> None:
        say(engine, body, take, 1, 0)
        say(engine, body, take, 0, 0, 4)
        say(engine, body, take, 0, 4, 5, **wrong)

    bench = Bench(errs, answers)
    samples = await bench.generate()
    assert {s.engine for s in samples} == {"engine-1"}
    assert bench.engines[1].asked[0]["input_ids"] == [[1, 1], [1, 1]]
    assert bench.counts == (14, 0)
    assert len(bench.engines[0].suspicions) == 1


@pytest.mark.parametrize("index", [2, -1, "0", None])
async def test_a_sample_that_nobody_asked_for(index: Any) -> None:
    async def errs(engine: ScriptedEngine, body: dict[str, Any], take: Take) -> None:
        take({"index": index, "output_ids": [], "meta_info": {}})

    bench = Bench(errs, answers)
    assert len(await bench.generate()) == 2
    assert "was not asked for" in bench.moves[0]["cause"]


async def test_an_answer_that_leaves_a_sample_out_is_none() -> None:
    async def forgets(engine: ScriptedEngine, body: dict[str, Any], take: Take) -> None:
        say(engine, body, take, 0, 0)

    bench = Bench(forgets, answers)
    assert {s.engine for s in await bench.generate()} == {"engine-1"}
    assert bench.counts == (10, 0)


async def test_what_looks_at_the_whole_output_starts_anew() -> None:
    async def dies(engine: ScriptedEngine, body: dict[str, Any], take: Take) -> None:
        say(engine, body, take, 0, 0, 5)
        raise EngineUnreachable("connection lost")

    bench = Bench(dies, answers)
    await bench.generate(n=1, frequency_penalty=0.5)
    assert bench.engines[1].asked[0]["input_ids"] == [[1, 1]]
    assert bench.counts == (5, 0)


async def test_a_caller_that_leaves_ends_the_request() -> None:
    told, ended = asyncio.Event(), asyncio.Event()

    async def hangs(engine: ScriptedEngine, body: dict[str, Any], take: Take) -> None:
        say(engine, body, take, 0, 0, 5)
        told.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    bench = Bench(hangs)
    asking = asyncio.create_task(bench.generate())
    await told.wait()
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    await asyncio.wait_for(ended.wait(), 1)
    assert bench.counts == (5, 0)
    assert bench.engines[0].in_flight == 0


# Bounds and refusals --------------------------------------------------------------------------


@pytest.mark.row("C7")
async def test_tries_are_bounded_and_go_round() -> None:
    async def dies(engine: ScriptedEngine, body: dict[str, Any], take: Take) -> None:
        say(engine, body, take, 0, 0, 1)
        raise EngineUnreachable("connection lost")

    bench = Bench(dies, dies)
    with pytest.raises(RequestFailed, match="after 4 failures and 0 aborts") as failed:
        await bench.generate(n=1)
    assert failed.value.tried
    assert sum(len(e.asked) for e in bench.engines) == 4
    assert len(bench.engines[1].asked) >= 1
    assert bench.counts == (4, 4)
    assert len(bench.moves) == 4


async def test_a_bad_request_goes_back_at_once() -> None:
    async def refuses(engine: ScriptedEngine, body: dict[str, Any], take: Take) -> None:
        raise EngineRefused(400, "too long")

    bench = Bench(refuses, answers)
    with pytest.raises(RequestRejected, match="too long"):
        await bench.generate()
    assert not bench.engines[1].asked
    assert not bench.moves


async def test_a_continuation_that_is_refused_starts_anew() -> None:
    """The request was good: an engine had begun to answer it."""

    async def dies(engine: ScriptedEngine, body: dict[str, Any], take: Take) -> None:
        say(engine, body, take, 0, 0, 3)
        raise EngineUnreachable("connection lost")

    async def refuses(engine: ScriptedEngine, body: dict[str, Any], take: Take) -> None:
        raise EngineRefused(400, "too long")

    bench = Bench(dies, refuses, answers)
    [sample] = await bench.generate(n=1)
    assert sample.output_ids == whole(1, 10)
    assert bench.engines[2].asked[0]["input_ids"] == [[1, 1]]
    assert bench.router.wasted_tokens == 3


async def test_a_traced_request_says_which_engine_worked_when() -> None:
    async def half_then_gone(engine: ScriptedEngine, body: dict[str, Any], take: Take) -> None:
        say(engine, body, take, 0, 0, 3)
        say(engine, body, take, 1, 0)
        raise EngineUnreachable("gone")

    async def measured(engine: ScriptedEngine, body: dict[str, Any], take: Take) -> None:
        say(engine, body, take, 0, 0, queue_time=0.25, first_token_latency=0.5)

    bench = Bench(half_then_gone, measured)
    first, second = await bench.generate(2, trace=True)
    assert [(leg[0], leg[4]) for leg in first.legs] == [("engine-0", 3), ("engine-1", 7)]
    assert [(leg[0], leg[4]) for leg in second.legs] == [("engine-0", 10)]
    (_, sent_ms, first_ms, end_ms, _, queue_ms), other = first.legs
    assert 0 <= sent_ms <= first_ms <= end_ms <= other[1] and queue_ms is None
    assert other[5] == 250.0 and other[1] <= other[2] <= other[3]
    assert "legs" in first.to_json()
    (untraced,) = await Bench(answers).generate(1)
    assert "legs" not in untraced.to_json()
