"""An SGLang gateway in front of the engines: kept alive, and its list of engines kept true."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.host.ports import free_ports
from torchtitan_rl_ft.observability.events import EventSink, Kind
from torchtitan_rl_ft.run_folder import TOKEN_ENV, RunFolder
from torchtitan_rl_ft.serving.changes import Changes
from torchtitan_rl_ft.serving.deregistration import DeregistrationFailed
from torchtitan_rl_ft.serving.engine import Engine
from torchtitan_rl_ft.serving.gateway_client import GatewayClient, GatewayError
from torchtitan_rl_ft.serving.gateway_process import HOST, KEY_ENV
from torchtitan_rl_ft.serving.gateway_route import GatewayRoute
from torchtitan_rl_ft.serving.kept_child import KeptChild

NAME = "gateway"
START_LIMIT_S = 30.0
CALL_LIMIT_S = 1.5
SETTLE_S = 0.02
"""The gateway lists what it was told some milliseconds later."""

SETTLE_ROUNDS = 25
RETRY_S = 0.25
AUDIT_S = 1.0
"""How often the list is compared when nothing has changed here."""

SILENT_CALLS = 3
"""Unanswered in a row, the gateway is replaced: it may be stopped or stuck."""


class GatewayProgram(Protocol):
    """The command line of a gateway at `port`; `metrics_port` is free as well."""

    def __call__(self, port: int, metrics_port: int) -> list[str]: ...


def smg_program(port: int, metrics_port: int) -> list[str]:
    module = "torchtitan_rl_ft.serving.gateway_process"
    return [sys.executable, "-m", module, str(port), str(metrics_port)]


class Gateway:
    """`wanted` gives the engines that may get requests now; `folder` where logs are."""

    def __init__(
        self,
        folder: Callable[[], RunFolder],
        events: EventSink,
        http: aiohttp.ClientSession,
        changes: Changes,
        wanted: Callable[[], Iterable[Engine]],
        program: GatewayProgram = smg_program,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._events, self._http = folder, events, http
        self._changes, self._wanted = changes, wanted
        self._program, self._clock = program, clock
        what = "the gateway (rollout.router)"
        self._kept = KeptChild(NAME, what, folder, events, self, clock)
        self._ids: dict[str, str] = {}  # of all on the gateway's list, by URL
        self._ready: set[str] = set()
        self._added: dict[str, float] = {}  # monotonic time of what is about to be listed
        self._complained: set[str] = set()
        self._silent = self._unsettled = 0
        self._next_client: GatewayClient | None = None
        self.client: GatewayClient | None = None
        """None while there is no gateway that answers."""

    def listed_of(self, engines: Iterable[Engine]) -> list[Engine]:
        listed = self.listed
        return [e for e in engines if e.client.url in listed]

    def route(self, listed: Sequence[Engine]) -> GatewayRoute:
        """For one request to any of the engines in `listed`, which serve the same version."""
        assert self.client is not None
        first = listed[0]
        return GatewayRoute(
            self._http, self.client, first.version or 0, first.group, lambda: self._wanted()
        )

    @property
    def listed(self) -> set[str]:
        """URLs of the engines that the gateway gives requests to."""
        return self._ready if self.client is not None else set()

    def to_json(self) -> dict[str, Any]:
        child = self._kept.child
        return {
            "url": self.client.url if self.client is not None else None,
            "pid": child.id.pid if child is not None else None,
            "start_time": child.id.start_time if child is not None else None,
            "log": str(child.log) if child is not None else None,
            "restarts": max(0, self._kept.starts - 1),
            "listed": sorted(self.listed),
            "known": sorted(self._ids),
        }

    # Process --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled. Raises ChildFailed when it does not stay up."""
        await self._kept.run()

    def start(self, log: Path) -> process.Child:
        """Raises OSError."""
        port, metrics_port = free_ports(2)
        key = secrets.token_urlsafe(24)
        env = {k: v for k, v in os.environ.items() if k != TOKEN_ENV}
        env |= {KEY_ENV: key, "NO_COLOR": "1"}
        self._next_client = GatewayClient(self._http, f"http://{HOST}:{port}", key)
        return process.spawn(self._program(port, metrics_port), log=log, env=env)

    async def attend(self, child: process.Child) -> str:
        assert self._next_client is not None
        return await self._keep(self._next_client)

    def let_go(self) -> None:
        self.client, self._ids, self._ready, self._added = None, {}, set(), {}
        self._changes.notify()

    # List -----------------------------------------------------------------------------------

    async def _keep(self, client: GatewayClient) -> str:
        """Keep the gateway's list equal to `wanted`; returns why it has to be replaced."""
        if not await self._come_up(client):
            return f"did not answer within {START_LIMIT_S:g} s"
        self.client, self._silent = client, 0
        self._complained.clear()
        self._events.emit(Kind.READY, subject=NAME, url=client.url)
        while self._silent < SILENT_CALLS:
            pause_s = await self._round(client)
            if pause_s < AUDIT_S:
                await asyncio.sleep(pause_s)
            else:
                await self._changes.wait_until(self._differs, pause_s)
        return f"{self._silent} calls in a row were not answered"

    def _differs(self) -> bool:
        return self._wanted_urls() != self._ids.keys()

    def _wanted_urls(self) -> set[str]:
        return {e.client.url for e in self._wanted()}

    async def _come_up(self, client: GatewayClient) -> bool:
        end = self._clock() + START_LIMIT_S
        while self._clock() < end:
            try:
                await client.workers(CALL_LIMIT_S)
                return True
            except GatewayError:
                await asyncio.sleep(SETTLE_S)
        return False

    async def _round(self, client: GatewayClient) -> float:
        """One comparison, and what follows from it; returns the seconds until the next one."""
        try:
            workers = await client.workers(CALL_LIMIT_S)
        except GatewayError as e:
            self._silent += 1
            self._complain("list", str(e))
            return RETRY_S
        self._silent = 0
        self._complained.discard("list")
        wanted = self._wanted_urls()
        self._ids = {w.url: w.id for w in workers}
        ready = {w.url for w in workers if w.ready}
        if ready != self._ready:
            self._ready = ready
            self._changes.notify()
        now = self._clock()
        added = self._added.items()
        self._added = {u: at for u, at in added if u not in self._ids and now - at < RETRY_S}
        surplus = self._ids.keys() - wanted
        missing = wanted - self._ids.keys() - self._added.keys()
        tries = [*(self._remove(client, url, self._ids[url]) for url in surplus)]
        tries += [self._add(client, url) for url in missing]
        if tries and not all(await asyncio.gather(*tries)):
            return RETRY_S
        if not tries and ready == wanted:
            self._unsettled = 0
            return AUDIT_S
        self._unsettled += 1
        return SETTLE_S if self._unsettled <= SETTLE_ROUNDS else RETRY_S

    async def forget(self, engine: Engine) -> None:
        """Take a retired engine off the list, now. Raises DeregistrationFailed; the next rounds
        try again, whoever else does."""
        client, url = self.client, engine.client.url
        if client is None or url not in self._ids:
            return
        self._ready.discard(url)
        try:
            await client.remove(self._ids[url], CALL_LIMIT_S)
        except GatewayError as e:
            raise DeregistrationFailed(f"gateway: {e}") from e
        self._ids.pop(url, None)

    async def _remove(self, client: GatewayClient, url: str, worker_id: str) -> bool:
        self._ready.discard(url)
        return await self._try("removed", url, client.remove(worker_id, CALL_LIMIT_S))

    async def _add(self, client: GatewayClient, url: str) -> bool:
        return await self._try("listed", url, self._ask_for(client, url))

    async def _ask_for(self, client: GatewayClient, url: str) -> None:
        if await client.add(url, CALL_LIMIT_S):
            self._added[url] = self._clock()

    async def _try(self, what: str, url: str, call: Any) -> bool:
        try:
            await call
        except GatewayError as e:
            self._complain(url, f"{url} not {what}, tried again: {e}")
            return False
        self._complained.discard(url)
        return True

    def _complain(self, subject: str, cause: str) -> None:
        """Once, until it works again."""
        if subject not in self._complained:
            self._complained.add(subject)
            self._events.emit(Kind.WARN, cause=f"gateway: {cause}", subject=NAME)
