"""The HTTP interface of one SGLang 0.5.23 server."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import aiohttp

from torchtitan_rl_ft.serving.samples import AnswerInvalid
from torchtitan_rl_ft.serving.streaming import DONE, EventSplitter, stream_refusal

Take = Callable[[dict[str, Any]], None]
"""Is given the messages of an answer, in order."""

MEMORY = ("weights", "kv_cache", "cuda_graph")
"""Kinds of an engine's memory (sglang/srt/constants.py)."""

NOWHERE = "2.2.2.2"
"""SGLang's FAKE_BOOTSTRAP_HOST: a half answers a request by itself, nothing is transferred."""

PROBE_PREFIX = "probe-"
"""Of the ids of our probes."""


class EngineUnreachable(Exception):
    """No answer: connection refused or lost, or not within the limit."""


class EngineTimeout(EngineUnreachable):
    """Not within the caller's limit; says little about the engine when the limit was short."""


class EngineRefused(Exception):
    """The engine answered with an error; `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"status {status}: {message}")
        self.status, self.message = status, message


class EngineClient:
    """Requests to one engine. Every one has a limit; none is repeated here.

    Raises EngineUnreachable, EngineRefused and AnswerInvalid.
    """

    def __init__(
        self, http: aiohttp.ClientSession, url: str, name: str, *, half: bool = False
    ) -> None:
        """`half`: a prefill or decode engine, which answers nothing without a room."""
        self._http, self.url, self.name = http, url, name
        self._half = half
        self._fenced = False
        self.released: set[str] = set()
        """Kinds of memory that the engine has given up."""
        self.stream_headers = {"Connection": "close"}

    def fence(self) -> None:
        """The engine is retired: no request goes to its address any more, which another process
        may get, and no answer that is still on its way is used."""
        self._fenced = True

    async def model_info(self, timeout_s: float) -> dict[str, Any]:
        return await self._json("GET", "/model_info", timeout_s=timeout_s)

    async def generate(self, body: dict[str, Any], take: Take, timeout_s: float) -> None:
        """Ask /generate and give each message to `take`: those of the stream, until the engine
        says that it was the last one; or, when `body` asks for none, one for each sample. What
        `take` raises ends the request, in the engine too, and goes through."""
        if body.get("stream"):
            await self.stream(body, take, timeout_s)
            return
        answer = await self._json("POST", "/generate", body, timeout_s=timeout_s)
        for index, message in enumerate(answer if isinstance(answer, list) else [answer]):
            if not isinstance(message, dict):
                raise AnswerInvalid(f"{self.name} /generate: not understood: {message!r:.100}")
            take({**message, "index": index})

    async def stream(self, body: dict[str, Any], take: Take, timeout_s: float) -> None:
        """As `generate`, with a body that asks for a stream. The connection is used once: two
        seconds after a bad request SGLang closes the one that it came on, whatever runs there."""
        limit = aiohttp.ClientTimeout(total=timeout_s)
        self._check_fence("/generate")
        try:
            async with self._http.post(
                self.url + "/generate", json=body, headers=self.stream_headers, timeout=limit
            ) as response:
                await self._answered(response)
                if response.status != 200:
                    raise EngineRefused(response.status, await _message(response))
                events = EventSplitter()
                async for data in response.content.iter_any():
                    self._check_fence("/generate")
                    for event in events.feed(data):
                        if event == DONE:
                            return
                        take(self._understood(event))
        except TimeoutError:
            raise EngineTimeout(f"{self.name} /generate: not done in {timeout_s:.3g} s") from None
        except (aiohttp.ClientError, OSError) as e:
            raise EngineUnreachable(f"{self.name} /generate: {type(e).__name__}: {e}") from e
        raise EngineUnreachable(f"{self.name} /generate: the answer broke off")

    async def _answered(self, response: aiohttp.ClientResponse) -> None:
        """Looks at the head of an answer, whatever its status."""

    def _understood(self, event: bytes) -> dict[str, Any]:
        """A message; raises EngineRefused where it is an error, AnswerInvalid where it is none."""
        try:
            message = json.loads(event)
            refusal = stream_refusal(message)
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            raise AnswerInvalid(f"{self.name} /generate: not understood: {event[:100]!r}") from e
        if refusal is not None:
            raise EngineRefused(*refusal)
        return message

    async def probe(self, timeout_s: float) -> None:
        """Let the engine generate one token; a healthy idle one takes some 10 ms, a paused one
        does not answer. SGLang's own /health_generate takes a second and is content with any
        message of the scheduler; this answer is matched to its question."""
        rid = PROBE_PREFIX + uuid.uuid4().hex
        body = {
            "rid": rid,
            "input_ids": [0],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "log_metrics": False,
        }
        if self._half:
            body |= {"bootstrap_host": NOWHERE, "bootstrap_room": 0}
        answer = await self._json("POST", "/generate", body, timeout_s=timeout_s)
        found = answer.get("meta_info", {}).get("id") if isinstance(answer, dict) else None
        if found != rid:
            raise AnswerInvalid(f"{self.name}: probe {rid} got the answer of {found}")

    async def load_figures(self, timeout_s: float) -> tuple[float, int]:
        """What the scheduler published last, without asking it: Unix time of the figures (of the
        rank that published least lately), and prompt tokens read since the start."""
        answer = await self._json("GET", "/v1/loads?include=core", timeout_s=timeout_s)
        try:
            loads = answer["loads"]
            published_s = min(float(rank["timestamp"]) for rank in loads)
            return published_s, sum(int(rank["total_prefill_uncached_tokens"]) for rank in loads)
        except (KeyError, TypeError, ValueError) as e:
            raise AnswerInvalid(f"{self.name}: load figures not understood: {e}") from e

    # Weights ------------------------------------------------------------------------------

    async def pause(self, mode: str, timeout_s: float) -> None:
        """`retract`: running requests are recomputed; `in_place`: they keep their cache;
        `abort`: they end with what they have."""
        await self._json("POST", "/pause_generation", {"mode": mode}, timeout_s=timeout_s)

    async def resume(self, timeout_s: float) -> None:
        await self._json("POST", "/continue_generation", {}, timeout_s=timeout_s)

    async def abort_all(self, timeout_s: float) -> None:
        """End all requests, running and waiting."""
        body = {"rid": "", "abort_all": True}
        await self._bytes("POST", "/abort_request", body, timeout_s)

    async def load(self, path: str, version: int, flush_cache: bool, timeout_s: float) -> None:
        """Take the weights in `path`. With `flush_cache` a cache that could not be flushed is an
        error (requests still running in `in_place` mode)."""
        body = {"model_path": path, "weight_version": str(version), "flush_cache": flush_cache}
        answer = await self._json("POST", "/update_weights_from_disk", body, timeout_s=timeout_s)
        if answer.get("success") is not True:
            raise AnswerInvalid(f"{self.name}: update not confirmed: {answer}")

    async def flush(self, timeout_s: float) -> None:
        """Empty the prefix cache. An engine that cannot (requests run) refuses."""
        await self._bytes("POST", "/flush_cache", None, timeout_s)

    async def held_version(self, timeout_s: float) -> int | None:
        """The published version that the engine says it holds; None for its start weights."""
        version = (await self.model_info(timeout_s)).get("weight_version")
        return int(version) if isinstance(version, str) and version.isdigit() else None

    async def checksums(self, timeout_s: float) -> list[dict[str, str]]:
        """Checksum of each parameter, by SGLang's parameter name, for each rank."""
        body = {"action": "checksum"}
        answer = await self._json("POST", "/weights_checker", body, timeout_s=timeout_s)
        try:
            ranks = [dict(rank["checksums"]) for rank in answer["ranks"]]
        except (KeyError, TypeError) as e:
            raise AnswerInvalid(f"{self.name}: no checksums in the answer: {e}") from e
        if not ranks:
            raise AnswerInvalid(f"{self.name}: no rank gave checksums")
        return ranks

    # Memory -------------------------------------------------------------------------------

    async def queues(self, timeout_s: float) -> dict[str, int]:
        """Requests in each of the scheduler's queues, by SGLang's names, over all ranks: those
        that run or wait, and those of disaggregated engines, which count as neither."""
        answer = await self._json("GET", "/v1/loads", timeout_s=timeout_s)
        found: Counter[str] = Counter()
        try:
            for rank in answer["loads"]:
                found["running"] += int(rank["num_running_reqs"])
                found["waiting"] += int(rank["num_waiting_reqs"])
                for name in ("grammar", "paused", "retracted"):
                    found[name] += int(rank["queues"][name])
                for name, count in (rank.get("disaggregation") or {}).items():
                    if name.endswith("_queue_reqs"):
                        found[name.removesuffix("_reqs")] += int(count)
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise AnswerInvalid(f"{self.name}: queues not understood: {e}") from e
        return dict(found)

    async def release_memory(self, timeout_s: float) -> None:
        """Give up weights, cache and graphs. The engine has to be idle, or its scheduler ends."""
        self.released = set(MEMORY)
        path, body = "/release_memory_occupation", {"tags": list(MEMORY)}
        await self._bytes("POST", path, body, timeout_s)

    async def resume_memory(self, kinds: Iterable[str], timeout_s: float) -> None:
        """Take back those of `kinds` that were given up. Weights come back as anything."""
        tags = [k for k in kinds if k in self.released]
        if tags:
            self.released -= set(tags)
            path = "/resume_memory_occupation"
            await self._bytes("POST", path, {"tags": tags}, timeout_s)

    # Profiles -----------------------------------------------------------------------------

    async def start_profile(self, folder: str, name: str, timeout_s: float) -> None:
        """Traces are written to `folder` when the profile is stopped; `name` begins their names.
        Never twice: SGLang loses the first one."""
        # Stacks and shapes make traces that take longer to write than the steps took.
        body: dict[str, Any] = {"output_dir": folder, "profile_id": name}
        body |= {"with_stack": False, "record_shapes": False}
        await self._bytes("POST", "/start_profile", body, timeout_s)

    async def stop_profile(self, timeout_s: float) -> None:
        """Returns when the traces are written; the engine computes nothing meanwhile."""
        await self._bytes("POST", "/stop_profile", None, timeout_s)

    # Transport ----------------------------------------------------------------------------

    async def _json(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout_s: float
    ) -> Any:
        data, response = await self._bytes(method, path, body, timeout_s)
        try:
            return await response.json(content_type=None)
        except ValueError as e:
            raise AnswerInvalid(f"{self.name} {path}: not JSON: {data[:100]!r}") from e

    async def _bytes(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float
    ) -> tuple[bytes, aiohttp.ClientResponse]:
        limit = aiohttp.ClientTimeout(total=timeout_s)
        self._check_fence(path)
        try:
            async with self._http.request(method, self.url + path, json=body, timeout=limit) as r:
                data = await r.read()
                self._check_fence(path)
                if r.status != 200:
                    raise EngineRefused(r.status, await _message(r))
                return data, r
        except TimeoutError:
            raise EngineTimeout(f"{self.name} {path}: no answer in {timeout_s:.3g} s") from None
        except (aiohttp.ClientError, OSError) as e:
            raise EngineUnreachable(f"{self.name} {path}: {type(e).__name__}: {e}") from e

    def _check_fence(self, path: str) -> None:
        if self._fenced:
            raise EngineUnreachable(f"{self.name} {path}: this engine is retired")


async def _message(response: aiohttp.ClientResponse) -> str:
    """SGLang has four shapes of error bodies: {"error": {"message"}}, {"error": text},
    {"message"} and {"detail"}; and empty ones."""
    text = await response.text()
    try:
        body = await response.json(content_type=None)
        error = body.get("error", body)
        found = error if isinstance(error, str) else error.get("message", error.get("detail"))
        return str(found if found is not None else text)[:500]
    except (ValueError, AttributeError):
        return text[:500]
