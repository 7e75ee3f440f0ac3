"""The rollout role's own HTTP routes, beside the ledger's."""

from __future__ import annotations

from typing import Any, Protocol

from aiohttp import web

from torchtitan_rl_ft.rpc.server import RequestError


class Driven(Protocol):
    """What feeds the trainers: the rollout loop, or dumps."""

    def status(self) -> dict[str, Any]: ...

    def drain(self, reason: str) -> None: ...


def routes(loop: Driven) -> list[web.RouteDef]:
    """`GET /v1/status`: what the loop is doing. `POST /v1/stop {"reason"}`: start nothing new,
    accept what is in flight, then stop the trainers; answers at once."""

    async def status(request: web.Request) -> web.StreamResponse:
        return web.json_response(loop.status())

    async def stop(request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json() if request.can_read_body else {}
        except ValueError as e:
            raise RequestError(400, f"the body is not JSON: {e}") from e
        if not isinstance(body, dict):
            raise RequestError(400, "the body is not a JSON object")
        reason = str(body.get("reason") or "asked to stop")
        loop.drain(reason)
        return web.json_response({})

    return [web.get("/v1/status", status), web.post("/v1/stop", stop)]
