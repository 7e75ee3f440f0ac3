"""How a fake engine generates: whole answers and streams, stopped by pauses and aborts."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from fake_answers import EventStream, Output
from fake_disaggregation import RoomMissing, TransferFailed
from fake_state import EngineState

CONTEXT_TOKENS = 512
Tell = Callable[[dict[str, Any]], Awaitable[None]]

ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}

KNOWN_SAMPLING = {
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "n",
    "sampling_seed",
    "ignore_eos",
    "stop_token_ids",
    "min_p",
    "stream_interval",
}


class UnknownField(ValueError):
    """SGLang answers this one in another shape."""


class Generation(EngineState):
    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        stream = EventStream(request) if body.get("stream") else None
        try:
            prompts, parameters = self._checked(body)
        except UnknownField as e:
            return web.json_response({"error": str(e)}, status=400)
        except ValueError as e:
            if stream is not None:
                await stream.open()
                return await stream.refuse(str(e))
            return web.json_response({"error": {"message": str(e)}}, status=400)
        try:
            rooms = self.half.rooms(body, len(prompts)) if self.half else None
        except RoomMissing as e:
            return web.json_response({"error": {"message": str(e)}}, status=400)
        if str(body.get("rid", "")).startswith("probe-"):
            return await self.probe(body["rid"])
        self.requests += 1
        every = self.faults.get("drop_task")
        if every and self.requests % every == 0:
            return web.Response(status=500, text="Internal Server Error")
        if prompts[0] == self.faults.get("poison"):
            os.kill(os.getpid(), signal.SIGKILL)
        single = isinstance(body["input_ids"][0], int) and len(prompts) == 1
        outputs = self._outputs(prompts, parameters, body, streamed=stream is not None)
        if stream is not None:
            await stream.open()
        await self.go.wait()
        self.running += 1
        self.idle.clear()
        tasks = [
            asyncio.create_task(
                self._answer(prompt, p, output, _to(stream, i, single), rooms[i] if rooms else None)
            )
            for i, (prompt, p, output) in enumerate(zip(prompts, parameters, outputs, strict=True))
        ]
        try:
            samples = await asyncio.gather(*tasks)
        except TransferFailed as e:
            if stream is not None:
                return await stream.refuse(str(e), 500)
            return web.json_response({"error": {"message": str(e)}}, status=500)
        finally:  # also when the caller has gone
            for task in tasks:
                task.cancel()
            for output in outputs:
                self.samples.pop(output.rid, None)
            self.running -= 1
            if not self.running:
                self.idle.set()
        if stream is not None:
            return await stream.close()
        return web.json_response(samples[0] if single else samples)

    def _outputs(
        self,
        prompts: list[list[int]],
        parameters: list[dict[str, Any]],
        body: dict[str, Any],
        *,
        streamed: bool,
    ) -> list[Output]:
        rids = body.get("rid") or [""] * len(prompts)
        outputs = [
            Output(
                len(prompt),
                rid=rid,
                interval=p.get("stream_interval") or self.stream_interval,
                incremental=streamed and self.incremental,
            )
            for prompt, p, rid in zip(
                prompts, parameters, [rids] if isinstance(rids, str) else rids, strict=True
            )
        ]
        self.samples.update({output.rid: asyncio.Event() for output in outputs})
        return outputs

    def _checked(self, body: dict[str, Any]) -> tuple[list[list[int]], list[dict[str, Any]]]:
        ids = body.get("input_ids")
        if ids is None:
            raise ValueError("Either text, input_ids or input_embeds should be provided.")
        if not ids:
            raise ValueError("input_ids cannot be empty.")
        prompts = [ids] if isinstance(ids[0], int) else ids
        given = body.get("sampling_params") or {}
        parameters = [given] * len(prompts) if isinstance(given, dict) else given
        n = parameters[0].get("n", 1)
        for prompt, p in zip(prompts, parameters, strict=True):
            if len(prompt) >= CONTEXT_TOKENS:
                raise ValueError("The input is longer than the model's context length.")
            if prompt == self.faults.get("reject"):
                raise ValueError("this prompt is rejected")
            if p.get("temperature", 1.0) < 0:
                raise ValueError("temperature must be a non-negative finite number")
            if unknown := p.keys() - KNOWN_SAMPLING:
                raise UnknownField(f"unknown field `{min(unknown)}`")
        return prompts * n, parameters * n

    async def _answer(
        self,
        prompt: list[int],
        parameters: dict[str, Any],
        output: Output,
        tell: Tell | None,
        room: tuple[str, int, int] | None,
    ) -> dict[str, Any]:
        """A sample, or this half of it. Raises TransferFailed."""
        if self.half is None or room is None:
            return await self._sample(prompt, parameters, output, tell)
        host, port, number = room
        if self.half.mode == "decode":
            cache = await self.half.fetch(host, port, number)
            if cache["prompt"] != prompt:
                raise TransferFailed(f"room {number} is another request's")
            return await self._sample(prompt, parameters, output, tell, cache["weights"])
        await self._prefill(prompt)
        cache = {"prompt": prompt, "weights": self.cached}
        handed = asyncio.create_task(self.half.hand_over(number, cache))
        ended = asyncio.create_task(self.samples[output.rid].wait())
        try:
            await asyncio.wait({handed, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            handed.cancel()
            ended.cancel()
        one = {**parameters, "max_new_tokens": 1}
        return await self._sample(prompt, one, output, tell)

    async def _sample(
        self,
        prompt: list[int],
        parameters: dict[str, Any],
        output: Output,
        tell: Tell | None,
        cache: str | None = None,
    ) -> dict[str, Any]:
        """Tell what is generated, or return it, when `tell` is None. `cache`: weights that read
        the prompt elsewhere."""
        seed = parameters.get("sampling_seed", 42)
        limit = parameters.get("max_new_tokens", 128)
        stops = {2, *parameters.get("stop_token_ids", [])}
        finish: dict[str, Any] = {"type": "length", "length": limit}
        aborted = self.samples[output.rid]
        while len(output.ids) < limit:
            await asyncio.sleep(self.faults.get("token_s", 0))
            if not self.go.is_set() and self.paused != "abort":
                await _either(self.go, aborted)
                if aborted.is_set():
                    message = output.aborted_in_queue(self.version)
                    if tell is not None:
                        await tell(message)
                    return message
            if not output.ids and cache is None:
                await self._prefill(prompt)
            # One step more, as the real one, which looks for no stop token in it.
            last = aborted.is_set() or self.paused == "abort"
            weights = self.cached if cache in (None, self.cached) else f"{cache}+{self.cached}"
            key = (prompt + output.ids, weights, seed)
            token, logprob = await self._next(key, parameters, stops)
            if self.faults.get("break_streams"):
                raise ConnectionResetError("break_streams")
            output.add(token, logprob, self.version)
            if last:
                finish = ABORTED
                break
            if token in stops and not parameters.get("ignore_eos"):
                finish = {"type": "stop", "matched": token}
                break
            if tell is not None and output.due and len(output.ids) < limit:
                await tell(self._shown(output.message(self.version)))
        message = self._shown(output.message(self.version, finish))
        if tell is not None:
            await tell(message)
        return message

    async def _prefill(self, prompt: list[int]) -> None:
        """Read the prompt: the worker does nothing else meanwhile."""
        if compute_s := self.faults.get("prefill_s"):
            await self.worker.word("prefill", compute_s=compute_s)
        self.prefilled += len(prompt)

    async def _next(
        self, key: tuple[Any, ...], parameters: dict[str, Any], stops: set[int]
    ) -> tuple[int, float]:
        """A token and its log-prob: a function of all tokens before it, weights and seed."""
        if self.memory is not None:
            self.memory.need("weights", "kv_cache")
        word = await self.worker.word(*key)
        token = word % self.vocabulary
        if parameters.get("ignore_eos") and token in stops:
            token = self.vocabulary - 1
        return token, math.log((1 + word % 1000) / 1001)

    def _shown(self, message: dict[str, Any]) -> dict[str, Any]:
        if self.faults.get("no_version"):
            message["meta_info"].pop("weight_version", None)
            message["meta_info"].pop("weight_versions", None)
        return message

    async def probe(self, rid: str) -> web.Response:
        """A generate request of one token, as the service under test asks for."""
        self.calls.append((time.monotonic(), "probe"))
        if status := self.faults.get("probe_status"):
            return web.json_response({"error": {"message": "no probe"}}, status=status)
        if self.faults.get("probe_hang"):
            await asyncio.Event().wait()
        await asyncio.sleep(self.faults.get("slow_probe", 0))
        await self.go.wait()
        await self.worker.word("probe")
        self.prefilled += 1
        meta = {"id": self.faults.get("probe_id", rid), "finish_reason": {"type": "length"}}
        self.calls.append((time.monotonic(), "probe answered"))
        return web.json_response({"text": "8", "output_ids": [11], "meta_info": meta})

    async def abort_request(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.faults.get("ignore_abort"):
            return web.Response()
        for rid, aborted in self.samples.items():
            if body.get("abort_all") or rid == body.get("rid"):
                aborted.set()
        return web.Response()


def _to(stream: EventStream | None, index: int, single: bool) -> Tell | None:
    """Where a sample's messages go; SGLang numbers them unless the request is a single one."""
    if stream is None:
        return None

    async def tell(message: dict[str, Any]) -> None:
        await stream.send(message if single else {**message, "index": index})

    return tell


async def _either(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
