"""Disaggregated halves and nodes of the fake engine.

A prefill server keeps the key-value cache of a room until a decode server has fetched it from its
bootstrap port; both are asked at the same time, as SGLang wants it. Node 0 of several comes up
when all have joined it, and computes nothing any more when one is lost.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from aiohttp import web

HEALTH_HOST = "2.2.2.2"
"""SGLang's FAKE_BOOTSTRAP_HOST: a probe of one half transfers nothing."""


class RoomMissing(ValueError):
    """SGLang refuses a request without a room."""


class TransferFailed(Exception):
    """SGLang's 500: the other half is gone, or the room is not its."""


class Half:
    """One half: "prefill" or "decode"."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self._rooms: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._taken: dict[int, asyncio.Event] = {}
        self.in_transfer = 0

    async def serve(self, host: str, port: int) -> None:
        app = web.Application()
        app.router.add_get("/kv/{room}", self._give)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, host, port).start()

    def rooms(self, body: dict[str, Any], n: int) -> list[tuple[str, int, int]]:
        """(host, port, room) of each prompt of a request. Raises RoomMissing."""
        fields = [body.get(f"bootstrap_{name}") for name in ("host", "port", "room")]
        if fields[0] == HEALTH_HOST:
            return [(HEALTH_HOST, 0, 0)] * n
        columns = [f if isinstance(f, list) else [f] * n for f in fields]
        rooms = columns[2]
        if any(len(c) != n for c in columns) or None in columns[0] + rooms:
            raise RoomMissing("Disaggregated request received without bootstrap room id.")
        if len(set(rooms)) != n or not all(0 < r < 2**63 for r in rooms):
            raise RoomMissing(f"rooms {rooms} are not one for each prompt")
        return list(zip(*columns, strict=True))

    async def hand_over(self, room: int, cache: dict[str, Any]) -> None:
        """Prefill: until a decode server has the cache."""
        self.in_transfer += 1
        taken = self._taken.setdefault(room, asyncio.Event())
        self._room(room).set_result(cache)
        try:
            await taken.wait()
        finally:
            self.in_transfer -= 1
            self._rooms.pop(room, None)
            self._taken.pop(room, None)

    async def fetch(self, host: str, port: int, room: int) -> dict[str, Any]:
        """Decode. Raises TransferFailed."""
        self.in_transfer += 1
        try:
            async with (
                aiohttp.ClientSession() as http,
                http.get(f"http://{host}:{port}/kv/{room}") as response,
            ):
                return await response.json()
        except aiohttp.ClientError as e:
            raise TransferFailed(f"Decode transfer failed for room {room}: {e}") from e
        finally:
            self.in_transfer -= 1

    async def _give(self, request: web.Request) -> web.Response:
        room = int(request.match_info["room"])
        cache = await self._room(room)
        self._taken.setdefault(room, asyncio.Event()).set()
        return web.Response(text=json.dumps(cache), content_type="application/json")

    def _room(self, room: int) -> asyncio.Future[dict[str, Any]]:
        return self._rooms.setdefault(room, asyncio.get_running_loop().create_future())

    def figures(self, stuck: int) -> dict[str, Any]:
        """As SGLang's /v1/loads names them. `stuck`: transfers that never end."""
        waiting = self.in_transfer + stuck
        return {
            "mode": self.mode,
            "prefill_bootstrap_queue_reqs": 0,
            "prefill_inflight_queue_reqs": waiting if self.mode == "prefill" else 0,
            "decode_prealloc_queue_reqs": 0,
            "decode_transfer_queue_reqs": waiting if self.mode == "decode" else 0,
            "decode_retracted_queue_reqs": 0,
        }


async def gather_nodes(host: str, port: int, others: int, lost: Callable[[], None]) -> None:
    """Node 0: until all others have joined. `lost` is called when one goes."""
    joined = asyncio.Event()
    count = 0

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        if count == others:
            joined.set()
        await reader.read()
        lost()

    await asyncio.start_server(hold, host, port)
    await joined.wait()


async def join_node_0(host: str, port: int, forever: Callable[[], Awaitable[None]]) -> None:
    """Another node: joins, and ends with node 0."""
    while True:
        try:
            reader, writer = await asyncio.open_connection(host, port)
            break
        except OSError:
            await asyncio.sleep(0.05)
    await forever()
    await reader.read()
    writer.close()
