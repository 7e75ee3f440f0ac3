"""Pure decisions of serving: start budget, choice of an engine, answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl_ft.serving.budget import LONGEST_DELAY_S, StartBudget
from torchtitan_rl_ft.serving.router import choose
from torchtitan_rl_ft.serving.samples import AnswerInvalid, parse_samples

# Budget -----------------------------------------------------------------------------------------


def test_the_first_restart_is_immediate_then_delays_double() -> None:
    budget = StartBudget(max_starts=6, window_s=100)
    delays = []
    for second in range(6):
        delays.append(budget.delay_s(second))
        budget = budget.started(second)
    assert delays == [0.0, 0.0, 0.5, 1.0, 2.0, 4.0]
    assert budget.delay_s(6) is None
    assert budget.delay_s(100.5) is not None  # the first start has left the window


@given(st.lists(st.floats(0, 50), max_size=40), st.integers(1, 8), st.floats(1, 100))
def test_never_more_starts_than_allowed_in_a_window(
    gaps: list[float], max_starts: int, window_s: float
) -> None:
    budget, now, starts = StartBudget(max_starts, window_s), 0.0, []
    for gap in gaps:
        now += gap
        delay = budget.delay_s(now)
        if delay is None:
            continue
        assert 0 <= delay <= LONGEST_DELAY_S
        budget = budget.started(now)
        starts.append(now)
        assert sum(now - s < window_s for s in starts) <= max_starts


# Choice -----------------------------------------------------------------------------------------


@dataclass
class Candidate:
    slot: int
    in_flight: int


@pytest.mark.parametrize(
    ("loads", "avoid", "chosen"),
    [
        ([], set(), None),
        ([3], set(), 0),
        ([3, 1, 2], set(), 1),
        ([2, 2, 2], set(), 0),
        ([3, 1, 2], {1}, 2),
        ([3, 1], {0, 1}, 1),  # none other is left
    ],
)
def test_choice(loads: list[int], avoid: set[int], chosen: int | None) -> None:
    engines = [Candidate(i, load) for i, load in enumerate(loads)]
    found = choose(engines, avoid)
    assert (found.slot if found else None) == chosen


# Answers ----------------------------------------------------------------------------------------


def answer(ids: list[int], spans: Any = "one", **meta: Any) -> dict[str, Any]:
    if spans == "one":
        spans = [{"version": "7", "start": 0, "end": len(ids)}]
    found = {
        "finish_reason": {"type": "length", "length": len(ids)},
        "weight_version": "7",
        "weight_versions": spans,
        "output_token_logprobs": [[-0.5 * i, t, None] for i, t in enumerate(ids)],
        **meta,
    }
    return {"output_ids": ids, "meta_info": {k: v for k, v in found.items() if v is not None}}


def test_a_sample_with_two_versions() -> None:
    spans = [
        {"version": "3", "start": 0, "end": 2},
        {"version": "4", "start": 2, "end": 5},
    ]
    [sample] = parse_samples(answer([5, 6, 7, 8, 9], spans), 1, "engine-1")
    assert sample.versions == [3, 3, 4, 4, 4]
    assert (sample.min_version, sample.max_version) == (3, 4)
    assert sample.logprobs == [0.0, -0.5, -1.0, -1.5, -2.0]
    assert (sample.finish_reason, sample.engine) == ("length", "engine-1")


def test_an_aborted_sample_may_be_empty() -> None:
    spans = [{"version": "3", "start": 0, "end": 0}]
    empty = answer([], spans, weight_version="3", finish_reason={"type": "abort"})
    [sample] = parse_samples([empty], 1, "e")
    assert (sample.output_ids, sample.versions, sample.min_version) == ([], [], 3)
    [sample] = parse_samples([answer([], None, finish_reason={"type": "abort"})], 1, "e")
    assert sample.max_version == 7


@pytest.mark.scenario("V-3")
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (answer([1, 2], None, weight_version=None), "none that was published"),
        (answer([1, 2], [{"version": "default", "start": 0, "end": 2}]), "'default' is none"),
        (answer([1, 2], [{"version": "1", "start": 0, "end": 1}]), "do not cover"),
        (answer([1, 2], [{"version": "1", "start": 1, "end": 2}]), "leave a gap"),
        (answer([1, 2], output_token_logprobs=[[0.0, 1, None]]), "not those of"),
        (answer([1], output_token_logprobs=[[float("nan"), 1, None]]), "not finite"),
        (answer([1], output_token_logprobs=[[None, 1, None]]), "not understood"),
        (answer([1], finish_reason=None), "not understood"),
        ({"text": "x"}, "not understood"),
        ([answer([1]), answer([2])], "answered 2 samples, 1 were asked for"),
    ],
)
def test_answers_that_cannot_be_used_name_why(broken: Any, message: str) -> None:
    with pytest.raises(AnswerInvalid, match=message):
        parse_samples(broken, 1, "engine-0")
