"""A request's way through the gateway, which chooses the engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import aiohttp

from torchtitan_rl_ft.config.sections import EngineGroup
from torchtitan_rl_ft.serving.engine import Engine
from torchtitan_rl_ft.serving.engine_client import EngineClient, EngineTimeout, EngineUnreachable
from torchtitan_rl_ft.serving.gateway_client import GatewayClient
from torchtitan_rl_ft.serving.samples import AnswerInvalid

NAME = "gateway"
CHOSEN = "x-smg-routed-worker-id"
OWN_ERROR = "x-smg-error-code"
ROUTING_KEY = "x-smg-routing-key"
BROKEN = "stream_error"
"""Type of the message with which the gateway ends a stream that the engine broke off."""


class GatewayRoute(EngineClient):
    """Looks like an engine to the router; which one it is shows with the head of the answer. It
    serves `version`, and an answer of an older one is refused as an engine's would be."""

    slot = -1  # none: the gateway cannot be told to avoid an engine

    def __init__(
        self,
        http: aiohttp.ClientSession,
        gateway: GatewayClient,
        version: int,
        group: EngineGroup,
        engines: Callable[[], Iterable[Engine]],
    ) -> None:
        super().__init__(http, gateway.url, NAME)
        self.version, self.group, self._engines = version, group, engines
        self.stream_headers |= {**gateway.headers, ROUTING_KEY: uuid.uuid4().hex}
        self.gone = asyncio.Event()
        """The engine that answers was retired."""
        self._chosen: Engine | None = None
        self._samples = 0
        self._engine_at_fault = True
        self._watch: asyncio.Task[None] | None = None

    # What the router takes for an engine ----------------------------------------------------

    @property
    def client(self) -> GatewayRoute:
        return self

    @property
    def reason(self) -> str:
        return self._chosen.reason if self._chosen is not None else ""

    def begin(self, samples: int) -> None:
        self._samples = samples

    def end(self, samples: int) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._chosen is not None:
            self._chosen.end(samples)

    def made_progress(self) -> None:
        if self._chosen is not None:
            self._chosen.made_progress()

    def suspect(self, reason: str) -> None:
        """The engine that answered, or the one that the gateway names. A connection that the
        gateway itself has lost says nothing about an engine."""
        if not self._engine_at_fault:
            return
        if self._chosen is not None:
            self._chosen.suspect(reason)
            return
        for engine in self._engines():
            if f"{engine.client.url}/" in reason:
                engine.suspect(reason)

    # Answer ---------------------------------------------------------------------------------

    async def generate(
        self, body: dict[str, Any], take: Callable[[dict[str, Any]], None], timeout_s: float
    ) -> None:
        """Always as a stream: its head names the engine while that one works."""
        try:
            await self.stream({**body, "stream": True}, take, timeout_s)
        except _Reported as e:
            raise EngineUnreachable(str(e)) from None
        except EngineTimeout:
            raise
        except EngineUnreachable:
            self._engine_at_fault = False
            raise

    async def _answered(self, response: aiohttp.ClientResponse) -> None:
        """Raises EngineUnreachable, AnswerInvalid."""
        if OWN_ERROR in response.headers:
            code = response.headers[OWN_ERROR]
            raise _Reported(f"{NAME}: {code}: {(await response.text())[:300]}")
        url = response.headers.get(CHOSEN, "").rstrip("/")
        chosen = next((e for e in self._engines() if e.client.url == url), None)
        if chosen is None:
            raise AnswerInvalid(f"{NAME}: answer of an engine that is not to be asked now: {url!r}")
        self._chosen, self.name = chosen, chosen.name
        chosen.begin(self._samples)
        self._watch = asyncio.create_task(self._until_gone(chosen))

    async def _until_gone(self, chosen: Engine) -> None:
        await chosen.gone.wait()
        self.gone.set()

    def _understood(self, event: bytes) -> dict[str, Any]:
        if BROKEN.encode() in event:  # messages are many and long: each is read once
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                error = json.loads(event).get("error") or {}
                if error.get("type") == BROKEN:
                    raise _Reported(f"{self.name}: {error.get('message')}")
        return super()._understood(event)


class _Reported(EngineUnreachable):
    """The gateway says that the engine did not answer, or broke off."""
