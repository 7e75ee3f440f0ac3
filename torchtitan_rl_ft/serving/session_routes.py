"""The routes of a session's owner (docs/architecture.md)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from torchtitan_rl_ft.rpc.server import RequestError
from torchtitan_rl_ft.serving.ownership import Claim, NotOwner, Ownership
from torchtitan_rl_ft.session_folder import Trainer


class SessionRoutes:
    """`serve` goes on for each new owner, `dispose` ends the engines and then the role."""

    def __init__(
        self,
        ownership: Ownership,
        engines: Callable[[], int],
        version: Callable[[], int],
        serve: Callable[[Claim], Awaitable[None]],
        dispose: Callable[[], Awaitable[None]],
    ) -> None:
        self._ownership, self._engines, self._version = ownership, engines, version
        self._serve, self._dispose = serve, dispose

    def table(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/attach", self.attach),
            web.post("/v1/detach", self.detach),
            web.post("/v1/trainers", self.trainers),
        ]

    async def attach(self, request: web.Request) -> web.Response:
        try:
            claim = Claim.from_json(await request.json())
        except (ValueError, KeyError, TypeError) as e:
            raise RequestError(400, f"no claim: {type(e).__name__}: {e}") from e
        try:
            await self._ownership.attach(claim)
        except NotOwner as e:
            raise RequestError(409, str(e)) from e
        await self._serve(claim)
        return web.json_response({"version": self._version(), "engines": self._engines()})

    async def detach(self, request: web.Request) -> web.Response:
        try:
            body = await request.json()
            attempt, outcome = str(body["attempt"]), str(body["outcome"])
        except (ValueError, KeyError, TypeError) as e:
            raise RequestError(400, f"attempt and outcome are needed: {e}") from e
        if outcome not in ("retain", "dispose"):
            raise RequestError(400, f"outcome is {outcome!r}: retain or dispose")
        try:
            if outcome == "retain":
                await self._ownership.detach(attempt)
            else:
                self._ownership.check_own(attempt)
                await self._dispose()
        except NotOwner as e:
            raise RequestError(409, str(e)) from e
        return web.json_response({})

    async def trainers(self, request: web.Request) -> web.Response:
        try:
            trainer = Trainer(**await request.json())
        except (ValueError, TypeError) as e:
            raise RequestError(400, f"no trainer: {e}") from e
        try:
            await self._ownership.register(trainer)
        except NotOwner as e:
            raise RequestError(409, str(e)) from e
        return web.json_response({})
