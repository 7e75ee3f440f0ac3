"""What engines stream, checked and put together; what a sample is continued with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torchtitan_rl_ft.serving.continuation import (
    can_continue,
    request_body,
    settle,
    stop_tokens,
)
from torchtitan_rl_ft.serving.requests import GenerateRequest
from torchtitan_rl_ft.serving.samples import AnswerInvalid, Draft, Leg
from torchtitan_rl_ft.serving.streaming import EventSplitter, stream_refusal

LENGTH = {"type": "length", "length": 5}
ABORT = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def message(ids: list[int], held: int = 0, **meta: Any) -> dict[str, Any]:
    """A message with new tokens `ids` after `held` others; fields that are None are left out, but
    for finish_reason."""
    found = {
        "weight_version": "7",
        "completion_tokens": held + len(ids),
        "output_token_logprobs": [[-0.5 * (held + i), t, None] for i, t in enumerate(ids)],
        **meta,
    }
    kept = {k: v for k, v in found.items() if v is not None}
    return {"output_ids": ids, "meta_info": {"finish_reason": None, **kept}}


def leg(version: int = 7, draft: Draft | None = None) -> Leg:
    return Leg(Draft() if draft is None else draft, "engine-0", version)


def spans(*ends: tuple[str, int]) -> list[dict[str, Any]]:
    starts = [0, *(end for _, end in ends)]
    return [
        {"version": v, "start": start, "end": end}
        for (v, end), start in zip(ends, starts, strict=False)
    ]


# Tokens ---------------------------------------------------------------------------------------


def test_pieces_make_a_sample() -> None:
    one = leg(version=3)
    assert one.take(message([5], weight_version="3")) == 1
    assert one.take(message([6, 7], 1, weight_version="3")) == 2
    end = message(
        [8, 9],
        3,
        weight_version="4",
        weight_versions=spans(("3", 2), ("4", 5)),
        finish_reason=LENGTH,
    )
    assert one.take(end) == 2
    sample = one.draft.sample()
    assert sample.output_ids == [5, 6, 7, 8, 9]
    assert sample.logprobs == [0.0, -0.5, -1.0, -1.5, -2.0]
    assert sample.versions == [3, 3, 4, 4, 4]
    assert (sample.min_version, sample.max_version) == (3, 4)
    assert (sample.finish_reason, sample.engine) == ("length", "engine-0")


def test_messages_may_repeat_all_tokens() -> None:
    """So does an engine without --incremental-streaming-output."""
    one = leg()
    assert one.take(message([5, 6])) == 2
    assert one.take(message([5, 6, 7])) == 1
    assert one.draft.output_ids == [5, 6, 7]
    assert one.draft.logprobs == [0.0, -0.5, -1.0]


def test_an_abort_in_the_queue_repeats_the_last_token() -> None:
    one = leg()
    one.take(message([5, 6]))
    last = message([5, 6], finish_reason={"type": "abort", "message": "Abort in waiting queue"})
    assert one.take({**last, "output_ids": [6]}) == 0
    assert one.ended
    assert (one.draft.output_ids, one.draft.finish_reason) == ([5, 6], None)
    # The same with a message before it that was still on its way: SGLang joins the two.
    two = leg()
    two.take(message([5]))
    both = message([6, 7], 1, finish_reason=ABORT)
    triples = both["meta_info"]["output_token_logprobs"]
    both["meta_info"]["output_token_logprobs"] = triples + [[0.0, 5, None], *triples]
    assert two.take({**both, "output_ids": [6, 7, 7]}) == 2
    assert two.draft.output_ids == [5, 6, 7]
    assert two.draft.logprobs == [0.0, -0.5, -1.0]


def test_a_sample_without_tokens_has_the_version_that_gave_it() -> None:
    one = leg(version=3)
    end = message([], weight_version="3", weight_versions=spans(("3", 0)), finish_reason=LENGTH)
    assert one.take(end) == 0
    sample = one.draft.sample()
    assert (sample.output_ids, sample.min_version, sample.max_version) == ([], 3, 3)


@pytest.mark.row("C8")
@pytest.mark.row("D8")
def test_a_prefix_keeps_its_versions_when_another_engine_goes_on() -> None:
    one = leg(version=3)
    one.take(message([5, 6, 7], weight_version="3"))
    two = Leg(one.draft, "engine-1", 4)
    two.take(message([8], weight_version="4"))
    two.take(
        message([9], 1, weight_version="4", weight_versions=spans(("4", 2)), finish_reason=LENGTH)
    )
    sample = one.draft.sample()
    assert sample.output_ids == [5, 6, 7, 8, 9]
    assert sample.versions == [3, 3, 3, 4, 4]
    assert (sample.min_version, sample.max_version, sample.engine) == (3, 4, "engine-1")


def test_tokens_of_unknown_version_are_given_the_older_one() -> None:
    """Of a dead engine: its message after an install may begin with tokens from before."""
    one = leg(version=3)
    one.take(message([5, 6], weight_version="3"))
    one.take(message([7, 8], 2, weight_version="4"))
    one.take(message([9], 4, weight_version="4"))
    assert one.draft.versions == [3, 3, 3, 3, 4]


@pytest.mark.scenario("V-3")
@pytest.mark.parametrize(
    ("broken", "cause"),
    [
        (message([8, 9], 2, weight_version=None), "none that was published"),
        (message([8, 9], 2, weight_version="default"), "'default' is none"),
        (message([8, 9], 2, weight_version="6"), "of before 7"),
        (message([8, 9], 2, weight_versions=spans(("7", 3))), "do not cover"),
        (
            message([8, 9], 2, weight_versions=[{"version": "7", "start": 1, "end": 4}]),
            "leave a gap",
        ),
        (message([8, 9], 2, output_token_logprobs=[[0.0, 8, None]]), "2 to 4 have 1 log-probs"),
        (message([8, 9], 3), "2 to 5 have 2 log-probs"),  # a message was lost
        (message([8, 9], 0), "not those of"),
        (message([], 1), "tokens 2 to 1"),
        ({**message([8, 9], 2), "output_ids": [8]}, "not those of"),
        ({**message([8, 9], 2), "output_ids": [8, 9, 9]}, "not those of"),
        ({**message([8, 9], 2), "output_ids": [8, 10]}, "not those of"),
        (message([8], 2, output_token_logprobs=[[float("nan"), 8, None]]), "not finite"),
        (message([8], 2, output_token_logprobs=[[None, 8, None]]), "not understood"),
        (message([8], 2, finish_reason="length"), "not understood"),
        (message([8], 2, completion_tokens=None), "not understood"),
        ({"text": "x"}, "not understood"),
    ],
)
def test_messages_that_cannot_be_used_name_why_and_change_nothing(broken: Any, cause: str) -> None:
    one = leg()
    one.take(message([5, 6]))
    with pytest.raises(AnswerInvalid, match=cause):
        one.take(broken)
    assert one.draft == Draft([5, 6], [0.0, -0.5], [7, 7], None, "engine-0", 7)


def test_nothing_comes_after_the_end() -> None:
    one = leg()
    one.take(message([5], finish_reason=LENGTH))
    with pytest.raises(AnswerInvalid, match="after its end"):
        one.take(message([6], 1))
    assert one.undo() == 1
    assert one.draft.finish_reason is None


# Continuation ---------------------------------------------------------------------------------


def request(**fields: Any) -> GenerateRequest:
    sampling = {"max_new_tokens": 6, "temperature": 0.5}
    given: dict[str, Any] = {
        "request_id": "r",
        "input_ids": [3, 4],
        "n": 3,
        "sampling": sampling,
        "seeds": [11, 12, 13],
        "timeout_s": 1.0,
        **fields,
    }
    given["sampling"] = sampling | given["sampling"]
    return GenerateRequest(**given)


@pytest.mark.row("C8")
def test_what_is_missing_is_asked_with_the_tokens_so_far() -> None:
    drafts = [Draft([5, 6]), Draft([7], finish_reason="stop"), Draft()]
    asked = request(sampling={"min_new_tokens": 3})
    body = request_body(asked, drafts, [0, 2], 4)
    assert body["input_ids"] == [[3, 4, 5, 6], [3, 4]]
    assert body["sampling_params"] == [
        {"max_new_tokens": 4, "min_new_tokens": 1, "temperature": 0.5, "sampling_seed": 11},
        {"max_new_tokens": 6, "min_new_tokens": 3, "temperature": 0.5, "sampling_seed": 13},
    ]
    assert body["stream"] is body["return_logprob"] is True


def test_without_seeds_the_prompt_goes_once_until_something_was_sampled() -> None:
    asked = request(seeds=None)
    body = request_body(asked, [Draft(), Draft(), Draft()], [0, 1, 2], 8)
    assert (body["input_ids"], body["sampling_params"]["n"]) == ([3, 4], 3)
    body = request_body(asked, [Draft([5]), Draft(), Draft()], [0, 2], 8)
    assert body["input_ids"] == [[3, 4, 5], [3, 4]]
    assert [p["max_new_tokens"] for p in body["sampling_params"]] == [5, 6]
    assert all("sampling_seed" not in p for p in body["sampling_params"])


@pytest.mark.parametrize(
    ("output", "interval", "streamed"), [(0, 5, True), (0, 6, False), (4, 1, True), (4, 2, False)]
)
def test_what_one_message_would_tell_is_not_streamed(
    output: int, interval: int, streamed: bool
) -> None:
    body = request_body(request(n=1, seeds=[1]), [Draft([5] * output)], [0], interval)
    assert body["stream"] is streamed


@pytest.mark.parametrize(
    ("output", "sampling", "finish"),
    [
        ([], {}, None),
        ([5, 6], {}, None),
        ([5, 2], {}, "stop"),
        ([2, 5], {}, None),
        ([5, 2], {"ignore_eos": True}, None),
        ([5, 9], {"stop_token_ids": [9]}, "stop"),
        ([5, 9], {"stop_token_ids": [9], "ignore_eos": True}, None),
        ([5] * 6, {}, "length"),
        ([5] * 5 + [2], {}, "stop"),
        ([5] * 5 + [2], {"ignore_eos": True}, "length"),
    ],
)
def test_a_draft_that_is_whole_is_not_extended(
    output: list[int], sampling: dict[str, Any], finish: str | None
) -> None:
    draft = Draft(output)
    settle(draft, request(sampling=sampling), {2})
    assert draft.finish_reason == finish


@pytest.mark.parametrize(
    ("sampling", "can"),
    [
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 4, "min_p": 0.1}, True),
        ({"repetition_penalty": 1.0, "frequency_penalty": 0, "stop": None}, True),
        ({"repetition_penalty": 1.1}, False),
        ({"regex": "a+"}, False),
        ({"stop": ["END"]}, False),
    ],
)
def test_what_depends_on_the_whole_output_starts_anew(sampling: dict, can: bool) -> None:
    assert can_continue(sampling) is can


def test_stop_tokens_are_read_where_sglang_reads_them(tmp_path: Path) -> None:
    assert stop_tokens(tmp_path) == set()
    files = {
        "config.json": {"eos_token_id": 1},
        "generation_config.json": {"eos_token_id": [1, 2]},
        "tokenizer_config.json": {"eos_token": {"content": "</s>"}},
        "tokenizer.json": {
            "added_tokens": [
                {"id": 3, "content": "</s>"},
                {"id": 4, "content": "<pad>"},
                {"id": 5, "content": "<|eom_id|>"},
            ]
        },
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert stop_tokens(tmp_path) == {1, 2, 3, 5}


# The wire -------------------------------------------------------------------------------------


def test_events_are_whole_however_they_arrive() -> None:
    events = [b"x" * 200_000, b'{"a": 1}', b"[DONE]"]
    data = b"".join(b"data: " + e + b"\n\n" for e in events)
    for size in (1, 7, 65536, len(data)):
        splitter, found = EventSplitter(), []
        pieces = data if size > 1 else data[-60:]
        for start in range(0, len(pieces), size):
            found += splitter.feed(pieces[start : start + size])
        assert found == (events if size > 1 else events[1:])


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ({"error": {"message": "too long", "code": 400}}, (400, "too long")),
        (message([5]), None),
        (message([5], finish_reason=LENGTH), None),
        (message([5], finish_reason=ABORT), None),
        (message([5], finish_reason={"type": "abort", "message": "queued"}), None),
        (
            message([], finish_reason={**ABORT, "status_code": 503, "message": "timeout"}),
            (503, "timeout"),
        ),
    ],
)
def test_refusals_within_a_stream(given: dict, refusal: tuple[int, str] | None) -> None:
    assert stream_refusal(given) == refusal
