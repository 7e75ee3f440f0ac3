"""A prefill and a decode engine that answer together, as SGLang's disaggregation wants it.

Both are given the same request at the same time, with the place where they meet: the prefill
engine's host and bootstrap port, and a room, a number that only this request has. The prefill
engine reads the prompt and hands its cache over, the decode engine generates; its answer counts.
Protocol: `bootstrap_*` of GenerateReqInput in sglang/srt/managers/io_struct.py; room 0 means "none"
in sglang/srt/disaggregation/utils.py.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from torchtitan_rl_ft.config.sections import EngineGroup
from torchtitan_rl_ft.serving.engine import Engine
from torchtitan_rl_ft.serving.engine_client import EngineClient, Take

LAST_ROOM = 2**63 - 1


class Pair:
    """To the router, one engine: the decode one, with another half."""

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self._prefill, self._decode = prefill, decode
        self.slot, self.name = decode.slot, f"{prefill.name}+{decode.name}"
        self.group: EngineGroup = decode.group
        self.version = decode.version
        self.client = PairedClient(prefill, decode)
        self.gone = EitherGone(prefill, decode)

    @property
    def in_flight(self) -> int:
        return self._decode.in_flight

    @property
    def reason(self) -> str:
        return self._prefill.reason if self._prefill.gone.is_set() else self._decode.reason

    def begin(self, samples: int) -> None:
        for engine in (self._prefill, self._decode):
            engine.begin(samples)

    def end(self, samples: int) -> None:
        for engine in (self._prefill, self._decode):
            engine.end(samples)

    def made_progress(self) -> None:
        """A token was decoded from a prompt that the other half has read."""
        self._prefill.made_progress()
        self._decode.made_progress()

    def suspect(self, reason: str) -> None:
        """Nobody can tell from outside which half is at fault."""
        self._prefill.suspect(reason)
        self._decode.suspect(reason)


Server = Engine | Pair
"""What a request goes to."""


def pairs(ready: Iterable[Engine]) -> list[Pair]:
    """Each decode engine of `ready` with the prefill engine of its unit that has the fewest
    samples in flight."""
    ready = list(ready)
    found = []
    for decode in ready:
        if decode.group.role != "decode":
            continue
        halves = [e for e in ready if e.group.role == "prefill" and e.plan.unit == decode.plan.unit]
        if halves:
            found.append(Pair(min(halves, key=lambda e: (e.in_flight, e.slot)), decode))
    return found


class EitherGone:
    """Set when one of two engines is retired."""

    def __init__(self, *engines: Engine) -> None:
        self._events = [e.gone for e in engines]

    def is_set(self) -> bool:
        return any(e.is_set() for e in self._events)

    async def wait(self) -> None:
        waits = [asyncio.create_task(e.wait()) for e in self._events]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


class PairedClient:
    """Sends requests to both halves."""

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self._halves: tuple[EngineClient, EngineClient] = (prefill.client, decode.client)
        self._host = urlsplit(prefill.client.url).hostname
        self._port = prefill.process.bootstrap_port

    async def generate(self, body: dict[str, Any], take: Take, timeout_s: float) -> None:
        """As EngineClient.generate. When one half fails, the request is ended in the other."""
        body = with_rooms(body, str(self._host), self._port)
        reads, writes = self._halves
        prefill = asyncio.create_task(reads.generate(body, _drop, timeout_s))
        decode = asyncio.create_task(writes.generate(body, take, timeout_s))
        try:
            await asyncio.wait({prefill, decode}, return_when=asyncio.FIRST_COMPLETED)
            if not decode.done():
                prefill.result()
            await decode
        finally:
            prefill.cancel()
            decode.cancel()
            await asyncio.gather(prefill, decode, return_exceptions=True)


def with_rooms(body: dict[str, Any], host: str, port: int | None) -> dict[str, Any]:
    """`body` with a room for each sample. Samples that share a request become requests: SGLang
    would give all of them one room."""
    ids, parameters = body["input_ids"], body["sampling_params"]
    if isinstance(parameters, dict):
        own = {k: v for k, v in parameters.items() if k != "n"}
        n = parameters.get("n", 1)
        ids, parameters = [ids] * n, [own] * n
    n = len(ids)
    return {
        **body,
        "input_ids": ids,
        "sampling_params": parameters,
        "bootstrap_host": [host] * n,
        "bootstrap_port": [port] * n,
        "bootstrap_room": random.SystemRandom().sample(range(1, LAST_ROOM), n),
    }


def _drop(message: dict[str, Any]) -> None:
    """What the prefill engine says of a sample; the decode engine says it again."""
