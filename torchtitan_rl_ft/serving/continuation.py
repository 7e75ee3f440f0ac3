"""How a sample that an engine did not finish goes on at another one. Pure but for `stop_tokens`.

Engines draw token number p of a sequence with (seed, p), so prompt and tokens so far, with the same
seed, give the tokens that the first engine would have given, as far as the logits are equal.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.serving.progress import stream_limit
from torchtitan_rl_ft.serving.requests import GenerateRequest
from torchtitan_rl_ft.serving.samples import Draft

OVER_THE_OUTPUT: Mapping[str, object] = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "stop": None,
    "stop_regex": None,
    "custom_params": None,
    "watermark": None,
}
"""Sampling parameters that look at all tokens of the output, and where they are off. An engine
takes the tokens so far for prompt, so such a sample starts anew."""


ALWAYS_STOP = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")
"""Texts of tokens that end a sample of any model, in SGLang."""


def can_continue(sampling: Mapping[str, object]) -> bool:
    """Whether a sample drawn like this can go on from its tokens."""
    return all(sampling.get(name) in (None, off) for name, off in OVER_THE_OUTPUT.items())


def settle(draft: Draft, request: GenerateRequest, stops: Collection[int]) -> None:
    """Finish a draft that needs no more tokens: SGLang looks neither for a stop token nor at the
    length in the step in which a request is aborted."""
    if draft.finish_reason is not None or not draft.output_ids:
        return
    ends = {*stops, *request.stop_token_ids}
    if not request.sampling.get("ignore_eos") and draft.output_ids[-1] in ends:
        draft.finish_reason = "stop"
    elif len(draft.output_ids) >= request.max_new_tokens:
        draft.finish_reason = "length"


def request_body(
    request: GenerateRequest, drafts: Sequence[Draft], missing: Sequence[int], interval_tokens: int
) -> dict[str, Any]:
    """SGLang's /generate body for what the drafts `missing` lack; answers come in their order.

    With seeds, or tokens so far, they go as one request each, because SGLang gives one seed to
    all samples of a request. Otherwise the prompt goes once: its cache is shared. Nothing is
    streamed when an engine would tell the first token and the end only.
    """
    if request.partial_interval_tokens:
        own = stream_limit(request.partial_interval_tokens, interval_tokens)[0]
        if own < interval_tokens:
            interval_tokens = own
            sampling = {**request.sampling, "stream_interval": own}
            request = replace(request, sampling=sampling)
    begun = any(drafts[i].output_ids for i in missing)
    longest = request.max_new_tokens - min(len(drafts[i].output_ids) for i in missing)
    if request.seeds is None and not begun:
        ids: Any = request.input_ids
        parameters: Any = {**request.sampling, "n": len(missing)}
    else:
        ids = [request.input_ids + drafts[i].output_ids for i in missing]
        parameters = [_parameters(request, drafts[i], i) for i in missing]
    return {
        "input_ids": ids,
        "sampling_params": parameters,
        "return_logprob": True,
        "stream": longest > interval_tokens,
    }


def _parameters(request: GenerateRequest, draft: Draft, index: int) -> dict[str, object]:
    held = len(draft.output_ids)
    parameters = dict(request.sampling)
    if held:
        parameters["max_new_tokens"] = request.max_new_tokens - held
        if request.min_new_tokens:
            parameters["min_new_tokens"] = max(0, request.min_new_tokens - held)
    if request.seeds is not None:
        parameters["sampling_seed"] = request.seeds[index]
    return parameters


def stop_tokens(model: Path) -> frozenset[int]:
    """Tokens that end a sample of the model in folder `model` by themselves, as SGLang reads
    them: from its configurations and its tokenizer. Raises OSError, ValueError."""
    stops: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        found = _read(model / name).get("eos_token_id")
        stops.update(found if isinstance(found, list) else [] if found is None else [found])
    eos = _read(model / "tokenizer_config.json").get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    for token in _read(model / "tokenizer.json").get("added_tokens", []):
        if token["content"] in (text, *ALWAYS_STOP):
            stops.add(token["id"])
    return frozenset(stops)


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_bytes()) if file.is_file() else {}
