"""What SGLang 0.5.23 tells of a sample, message by message, in its own shapes."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

from aiohttp import web


class Output:
    """Tokens of one sample. Streamed: the first token is told at once, then every `interval`
    tokens, then the end. Told in pieces (`incremental`) or from the start each time."""

    def __init__(
        self, prompt_tokens: int, *, rid: str = "", interval: int = 1, incremental: bool = False
    ) -> None:
        self.rid = rid or uuid.uuid4().hex
        self._prompt_tokens, self._interval = prompt_tokens, interval
        self._incremental = incremental
        self._started = time.monotonic()
        self.ids: list[int] = []
        self._triples: list[list[Any]] = []
        self._spans: list[dict[str, Any]] = []
        self._told = 0  # tokens
        self._answered = False

    def add(self, token: int, logprob: float, version: str) -> None:
        self.ids.append(token)
        self._triples.append([logprob, token, None])
        if not self._spans or self._spans[-1]["version"] != version:
            self._spans.append({"version": version, "start": len(self.ids) - 1, "end": 0})
        self._spans[-1]["end"] = len(self.ids)

    @property
    def due(self) -> bool:
        untold = len(self.ids) - self._told
        return untold >= self._interval or (untold > 0 and not self._told)

    def message(self, version: str, finish: dict[str, Any] | None = None) -> dict[str, Any]:
        """All that was not told yet; with `finish`, the last message."""
        start = self._told if self._incremental else 0
        self._told = len(self.ids)
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": finish,
            "prompt_tokens": self._prompt_tokens,
            "weight_version": version,
            "num_retractions": 0,
            "input_token_logprobs": [],
            "output_token_logprobs": self._triples[start:],
            "output_token_logprobs_length": len(self.ids),
            "reasoning_tokens": 0,
            "completion_tokens": len(self.ids),
            "cached_tokens": 0,
            "cached_tokens_details": None,
            "dp_rank": None,
        }
        if finish is not None:
            meta["weight_versions"] = self._spans or [{"version": version, "start": 0, "end": 0}]
            meta["e2e_latency"] = time.monotonic() - self._started
        if not self._answered:
            meta["response_sent_to_client_ts"] = time.time()
        self._answered = True
        return self._said(self.ids[start:], meta)

    def aborted_in_queue(self, version: str) -> dict[str, Any]:
        """The last message of a request that was not running when it was aborted: tokens that
        were not told are lost, the last one that was is repeated, log-probs come all again."""
        told = self._told
        spans = [{**s, "end": min(s["end"], told)} for s in self._spans if s["start"] < told]
        meta = {
            "id": self.rid,
            "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
            "weight_version": version,
            "e2e_latency": time.monotonic() - self._started,
            "weight_versions": spans or [{"version": version, "start": 0, "end": 0}],
            "input_token_logprobs": [],
            "output_token_logprobs": self._triples[:told],
            "output_token_logprobs_length": told,
            "completion_tokens": told,
        }
        return self._said(self.ids[told - 1 : told] if told else [], meta)

    def _said(self, ids: list[int], meta: dict[str, Any]) -> dict[str, Any]:
        return {"text": " ".join(map(str, ids)), "output_ids": ids, "meta_info": meta}


class EventStream:
    """Server-sent events of one streamed request."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8"}
        )

    async def open(self) -> None:
        await self._response.prepare(self._request)

    async def send(self, message: dict[str, Any]) -> None:
        await self._response.write(b"data: " + json.dumps(message).encode() + b"\n\n")

    async def refuse(self, message: str, code: int = 400) -> web.StreamResponse:
        error = {"message": message, "type": "invalid_request_error", "code": code}
        await self.send({"error": {**error, "retryable": False}})
        return await self.close()

    async def close(self) -> web.StreamResponse:
        await self._response.write(b"data: [DONE]\n\n")
        await self._response.write_eof()
        return self._response
