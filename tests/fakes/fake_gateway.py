"""A gateway that looks like smg: lists engines, hands requests to them in turn, fails on demand.

Faults are set by `POST /fault {name: value}`:

    delete_status=N   the next DELETE answers N and removes nothing
    add_status=N      the next POST /workers answers N and adds nothing
    deaf              no answer to anything but /fault and /calls
"""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from typing import Any

import aiohttp
from aiohttp import web

from torchtitan_rl_ft.serving.gateway_process import HOST, KEY_ENV

OPEN = ("/fault", "/calls")


class FakeGateway:
    def __init__(self, key: str, http: aiohttp.ClientSession) -> None:
        self.key, self.http = key, http
        self.workers: dict[str, str] = {}
        self.faults: dict[str, Any] = {}
        self.calls: list[str] = []
        self.turn = 0

    @web.middleware
    async def guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path not in OPEN:
            self.calls.append(f"{request.method} {request.path.split('/')[1]}")
            if self.faults.get("deaf"):
                await asyncio.Event().wait()
            if request.headers.get("Authorization") != f"Bearer {self.key}":
                return web.json_response({"error": {"message": "Invalid API key"}}, status=401)
        return await handler(request)

    async def list(self, request: web.Request) -> web.Response:
        shown = [{"id": i, "url": url, "status": "ready"} for i, url in self.workers.items()]
        return web.json_response({"workers": shown, "total": len(shown)})

    async def add(self, request: web.Request) -> web.Response:
        url = (await request.json())["url"]
        if status := self.faults.pop("add_status", None):
            return web.Response(status=status, text="Internal Server Error")
        if url in self.workers.values():
            return web.json_response({"code": "WORKER_ALREADY_EXISTS"}, status=409)
        self.workers[uuid.uuid4().hex] = url
        return web.json_response({"status": "accepted"}, status=202)

    async def remove(self, request: web.Request) -> web.Response:
        if status := self.faults.pop("delete_status", None):
            return web.Response(status=status, text="Internal Server Error")
        known = self.workers.pop(request.match_info["id"], None)
        return web.json_response({}, status=202 if known else 404)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Bytes are passed on as they come."""
        urls = list(self.workers.values())
        if not urls:
            return web.json_response({"error": {"message": "no available workers"}}, status=503)
        self.turn += 1
        url = urls[self.turn % len(urls)]
        try:
            async with self.http.post(f"{url}/generate", data=await request.read()) as r:
                answer = web.StreamResponse(
                    status=r.status,
                    headers={
                        "Content-Type": r.headers.get("Content-Type", "text/plain"),
                        "x-smg-routed-worker-id": url,
                    },
                )
                await answer.prepare(request)
                async for chunk in r.content.iter_any():
                    await answer.write(chunk)
                return answer
        except aiohttp.ClientError as e:
            message = f"error sending request for url ({url}/generate): {e}"
            return web.json_response({"error": {"message": message}}, status=500)

    async def set_fault(self, request: web.Request) -> web.Response:
        self.faults.update(await request.json())
        return web.json_response({})

    async def log(self, request: web.Request) -> web.Response:
        return web.json_response(self.calls)


async def main(port: int) -> None:
    async with aiohttp.ClientSession() as http:
        gateway = FakeGateway(os.environ[KEY_ENV], http)
        app = web.Application(middlewares=[gateway.guard])
        app.router.add_get("/workers", gateway.list)
        app.router.add_post("/workers", gateway.add)
        app.router.add_delete("/workers/{id}", gateway.remove)
        app.router.add_post("/generate", gateway.generate)
        app.router.add_post("/fault", gateway.set_fault)
        app.router.add_get("/calls", gateway.log)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, HOST, port).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
