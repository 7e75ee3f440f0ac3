"""Calls that are made to the real and to the fake SGLang, and what of an answer is compared.

    python tests/fakes/transcript.py URL WEIGHTS_PATH > tests/fakes/transcript.json

records the answers of a real server.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

RECORDED = Path(__file__).with_name("transcript.json")
PROMPT = [3, 4, 5]
SHORT = {"max_new_tokens": 4, "ignore_eos": True}
STREAMED = {"max_new_tokens": 60, "ignore_eos": True}
LONG = {"max_new_tokens": 480, "ignore_eos": True}

MODEL_INFO = ("model_path", "is_generation", "weight_version", "model_type", "architectures")


def calls(weights: Path) -> list[tuple[str, str, str, dict[str, Any] | None]]:
    """(name, method, path, body)."""
    one = {"input_ids": PROMPT, "sampling_params": SHORT, "return_logprob": True}
    seeded = [{**SHORT, "sampling_seed": s} for s in (1, 2)]
    return [
        ("model info", "GET", "/model_info", None),
        ("health", "GET", "/health", None),
        ("probe", "GET", "/health_generate", None),
        ("generate", "POST", "/generate", one),
        ("n samples", "POST", "/generate", {**one, "sampling_params": {**SHORT, "n": 3}}),
        (
            "seeded samples",
            "POST",
            "/generate",
            {**one, "input_ids": [PROMPT] * 2, "sampling_params": seeded},
        ),
        ("no input", "POST", "/generate", {"sampling_params": SHORT}),
        ("empty input", "POST", "/generate", {**one, "input_ids": []}),
        ("too long", "POST", "/generate", {**one, "input_ids": [3] * 600}),
        ("bad value", "POST", "/generate", {**one, "sampling_params": {"temperature": -1}}),
        ("unknown field", "POST", "/generate", {**one, "sampling_params": {"no_such": 1}}),
        ("bad mode", "POST", "/pause_generation", {"mode": "sideways"}),
        ("pause", "POST", "/pause_generation", {"mode": "retract"}),
        ("pause again", "POST", "/pause_generation", {"mode": "retract"}),
        ("checksums while paused", "POST", "/weights_checker", {"action": "checksum"}),
        (
            "no such weights",
            "POST",
            "/update_weights_from_disk",
            {"model_path": "/nonexistent/weights", "weight_version": "8"},
        ),
        ("version after failure", "GET", "/model_info", None),
        (
            "update",
            "POST",
            "/update_weights_from_disk",
            {"model_path": str(weights), "weight_version": "9", "flush_cache": True},
        ),
        ("version after update", "GET", "/model_info", None),
        ("resume", "POST", "/continue_generation", {}),
        ("generate after update", "POST", "/generate", one),
        ("bad action", "POST", "/weights_checker", {"action": "no such"}),
        ("abort of nothing", "POST", "/abort_request", {"rid": "nobody"}),
        ("flush", "POST", "/flush_cache", {}),
        ("no such route", "GET", "/no/such/route", None),
    ]


def streams() -> list[tuple[str, dict[str, Any]]]:
    """(name, body) of streamed requests."""
    one = {"input_ids": PROMPT, "sampling_params": STREAMED, "return_logprob": True}
    seeded = [{**STREAMED, "sampling_seed": s} for s in (1, 2)]
    return [
        ("stream", one),
        ("stream of one in a list", {**one, "input_ids": [PROMPT]}),
        ("stream of n samples", {**one, "sampling_params": {**STREAMED, "n": 3}}),
        (
            "stream of seeded samples",
            {**one, "input_ids": [PROMPT] * 2, "sampling_params": seeded},
        ),
        ("stream of no input", {"sampling_params": STREAMED}),
        ("stream of empty input", {**one, "input_ids": []}),
        ("stream too long", {**one, "input_ids": [3] * 600}),
        ("stream of a bad value", {**one, "sampling_params": {"temperature": -1}}),
        ("stream of an unknown field", {**one, "sampling_params": {"no_such": 1}}),
    ]


def replay(url: str, weights: Path) -> dict[str, Any]:
    """Name of a call -> what is compared of its answer."""
    with httpx.Client(base_url=url, timeout=30, trust_env=False) as http:
        found = {
            name: compared(name, path, http.request(method, path, json=body))
            for name, method, path, body in calls(weights)
        }
        for name, body in streams():
            found[name] = streamed(http, body, lambda: None)
        long = {"rid": "aborted", "input_ids": PROMPT, "return_logprob": True}
        long["sampling_params"] = LONG

        def abort() -> None:
            http.post("/abort_request", json={"rid": "aborted"})

        def abort_waiting() -> None:
            http.post("/pause_generation", json={"mode": "retract"})
            abort()
            http.post("/continue_generation", json={})

        found["aborted while it runs"] = streamed(http, long, abort)
        found["aborted while it waits"] = streamed(http, long, abort_waiting)
        return found


def streamed(http: httpx.Client, body: dict[str, Any], meanwhile: Callable[[], None]) -> Any:
    """Shapes of the first messages of samples, of those in between and of the last; after the
    first message of all, `meanwhile` is called. A bad request ends its connection later on, so
    each has one of its own."""
    shapes: dict[str, set[str]] = {}
    indexes: set[str] = set()
    ends: list[Any] = []
    headers = {"Connection": "close"}
    with http.stream("POST", "/generate", json={**body, "stream": True}, headers=headers) as r:
        found = {"status": r.status_code, "type": r.headers["content-type"].split(";")[0]}
        if r.status_code != 200:
            r.read()
            return found | {"error": error_kind(r.json())}
        for line in r.iter_lines():
            if not line:
                continue
            text = line.removeprefix("data: ")
            if text == "[DONE]" or "error" in json.loads(text):
                ends.append(text if text == "[DONE]" else unsized(json.loads(text)))
                continue
            message = json.loads(text)
            message["meta_info"].pop("cached_tokens_details", None)  # depends on what came before
            finish = message["meta_info"]["finish_reason"]
            begun = str(message.get("index")) in indexes
            stage = "last" if finish else "next" if begun else "first"
            shapes.setdefault(stage, set()).add(json.dumps(unsized(message), sort_keys=True))
            indexes.add(str(message.get("index")))
            if len(indexes) == 1 and not begun:
                meanwhile()
            if finish and finish["type"] == "abort":
                shapes.pop("next", None)  # whether it came this far is a matter of time
    shown = {stage: [json.loads(text) for text in sorted(s)] for stage, s in shapes.items()}
    return found | {"indexes": sorted(indexes), "messages": shown, "ends": ends}


def unsized(value: Any) -> Any:
    """The shape of a message; how many tokens it has depends on the server's settings."""
    if isinstance(value, dict):
        return {k: unsized(v) for k, v in sorted(value.items())}
    if isinstance(value, list):
        return [unsized(value[0])] if value else []
    return kind(value)


def compared(name: str, path: str, response: httpx.Response) -> dict[str, Any]:
    """Status, and the shape of the body; of errors only where the message is."""
    found: dict[str, Any] = {"status": response.status_code}
    try:
        body = response.json()
    except ValueError:
        return found | {"body": "text" if response.text else "empty"}
    if response.status_code >= 400:
        return found | {"error": error_kind(body)}
    if path == "/model_info":
        return found | {k: kind(body[k]) for k in MODEL_INFO} | {"version": body["weight_version"]}
    if path == "/weights_checker":
        [rank] = body["ranks"]
        return found | {"keys": sorted(body), "rank": sorted(rank), "sums": rank["checksums"]}
    if path == "/generate":
        samples = body if isinstance(body, list) else [body]
        for sample in samples:
            del sample["meta_info"]["cached_tokens_details"]  # depends on what came before
        versions = [s["meta_info"]["weight_versions"] for s in samples]
        return found | {"body": shape(body), "versions": versions}
    return found | {"body": shape(body)}


def error_kind(body: Any) -> str:
    """Where an error's message is: SGLang has several places."""
    if isinstance(body, dict):
        error = body.get("error")
        if isinstance(error, str):
            return "error: text"
        if isinstance(error, dict) and "message" in error:
            return "error.message"
        for key in ("detail", "message"):
            if key in body:
                return key
    return "none"


def shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: shape(v) for k, v in sorted(value.items())}
    if isinstance(value, list):
        return [shape(value[0]), len(value)] if value else []
    return kind(value)


def kind(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return repr(value)
    return "number" if isinstance(value, int | float) else type(value).__name__


if __name__ == "__main__":
    print(json.dumps(replay(sys.argv[1], Path(sys.argv[2])), indent=1))
