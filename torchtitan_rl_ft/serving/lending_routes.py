"""The routes by which a job's supervisor borrows an engine's place (docs/architecture.md)."""

from __future__ import annotations

from aiohttp import web

from torchtitan_rl_ft.rpc.server import RequestError, json_body
from torchtitan_rl_ft.serving.lending import NotLent
from torchtitan_rl_ft.serving.ownership import NotOwner, Ownership
from torchtitan_rl_ft.serving.service import ServingService


class LendingRoutes:
    def __init__(self, service: ServingService, ownership: Ownership) -> None:
        self._service, self._ownership = service, ownership

    def table(self) -> list[web.RouteDef]:
        return [web.post("/v1/lend", self.lend), web.post("/v1/return", self.give_back)]

    async def lend(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        try:
            timeout_s, borrower = float(body["timeout_s"]), str(body.get("borrower") or "")
        except (KeyError, ValueError, TypeError) as e:
            raise RequestError(400, f"timeout_s is needed: {type(e).__name__}: {e}") from e
        if not timeout_s > 0:
            raise RequestError(400, f"timeout_s is {timeout_s}: a positive number")
        devices = body.get("devices", 0)
        if type(devices) is not int or devices < 0:
            raise RequestError(400, f"devices is {devices!r}: an integer from 0 on")
        try:
            borrows = self._ownership.borrower(body.get("attempt"))
            slot = await self._service.lending.lend(borrows, borrower, timeout_s, devices)
        except (NotOwner, NotLent) as e:
            raise RequestError(409, str(e)) from e
        return web.json_response({"slot": slot, "devices": self._service.devices(slot)})

    async def give_back(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        slot = body.get("slot")
        if type(slot) is not int:
            raise RequestError(400, f"slot is {slot!r}: a slot's number")
        try:
            self._ownership.borrower(body.get("attempt"))
            await self._service.lending.give_back(slot)
        except (NotOwner, NotLent) as e:
            raise RequestError(409, str(e)) from e
        return web.json_response({})
