"""Calls that are made to the real and to the fake SGLang, and what of an answer is compared.

    python tests/fakes/transcript.py URL WEIGHTS_PATH > tests/fakes/transcript.json

records the answers of a real server.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import httpx

RECORDED = Path(__file__).with_name("transcript.json")
PROMPT = [3, 4, 5]
SHORT = {"max_new_tokens": 4, "ignore_eos": True}

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


def replay(url: str, weights: Path) -> dict[str, Any]:
    """Name of a call -> what is compared of its answer."""
    with httpx.Client(base_url=url, timeout=30, trust_env=False) as http:
        return {
            name: compared(name, path, http.request(method, path, json=body))
            for name, method, path, body in calls(weights)
        }


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
