"""The routes by which holders of weights tell what they hold, and are told who gives them what
(docs/architecture.md)."""

from __future__ import annotations

from typing import Any, Literal, cast

from aiohttp import web

from torchtitan_rl_ft.rpc.server import RequestError, json_body
from torchtitan_rl_ft.serving.directory import Held, NotWanted, Replaced, Report, Superseded
from torchtitan_rl_ft.serving.holder_book import HolderBook
from torchtitan_rl_ft.weights.holder.settings import Key
from torchtitan_rl_ft.weights.pieces import Piece, Range, piece_from_json

MAX_LEASE_POLL_S = 30.0


class HolderRoutes:
    def __init__(self, book: HolderBook) -> None:
        self._book = book

    def table(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/holders", self.report),
            web.post("/v1/holders/lease", self.lease),
            web.post("/v1/holders/returned", self.returned),
            web.get("/v1/holders", self.show),
        ]

    async def report(self, request: web.Request) -> web.Response:
        told = _report(await json_body(request))
        try:
            answer = self._book.report(told)
        except Replaced as e:
            raise RequestError(409, str(e)) from e
        return web.json_response({"keep": answer.keep, "known": answer.known})

    async def lease(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        try:
            name, key = str(body["name"]), _key(body)
            missing = [_range(r) for r in body["missing"]]
            timeout_s = float(body["timeout_s"])
        except (KeyError, ValueError, TypeError, OverflowError) as e:
            raise _not_understood(e) from e
        try:
            leases = await self._book.lease(
                name, key, missing, max(0.0, min(timeout_s, MAX_LEASE_POLL_S))
            )
        except NotWanted as e:
            raise RequestError(404, str(e)) from e
        except Superseded as e:
            raise RequestError(410, str(e)) from e
        found = [{"id": x.id, "url": x.url, "name": x.giver, "ranges": x.ranges} for x in leases]
        return web.json_response({"leases": found})

    async def returned(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        lease, ok, cause = body.get("lease"), body.get("ok"), body.get("cause")
        if not isinstance(lease, str) or not isinstance(ok, bool):
            raise RequestError(400, "lease (text) and ok (boolean) are needed")
        self._book.returned(lease, ok, None if cause is None else str(cause))
        return web.json_response({})

    async def show(self, request: web.Request) -> web.Response:
        return web.json_response(self._book.to_json())


# Bodies ---------------------------------------------------------------------------------------


def _report(body: dict[str, Any]) -> Report:
    try:
        if (kind := body["kind"]) not in ("source", "relay"):
            raise ValueError(f"kind is {kind!r}: source or relay")
        if not str(body["url"]).startswith("http://"):
            raise ValueError(f"url is {body['url']!r}: http://host:port")
        return Report(
            str(body["name"]),
            cast(Literal["source", "relay"], kind),
            str(body["url"]),
            int(body["pid"]),
            float(body["start_time"]),
            str(body["host"]),
            tuple(_held(h) for h in body["held"]),
        )
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as e:
        raise _not_understood(e) from e


def _held(body: dict[str, Any]) -> Held:
    told = body.get("pieces")
    pieces: tuple[Piece, ...] | None = None
    if told is not None:
        pieces = tuple(piece_from_json(p) for p in told)
    return Held(_key(body), str(body["layout_digest"]), body["whole"] is True, pieces)


def _key(body: dict[str, Any]) -> Key:
    step = body["step"]
    if type(step) is not int or step < 0:
        raise ValueError(f"step is {step!r}: an integer from 0 on")
    return Key(step, str(body["token"]))


def _range(given: Any) -> Range:
    start, end = (int(x) for x in given)
    if not 0 <= start < end:
        raise ValueError(f"{given!r} is no range of bytes")
    return start, end


def _not_understood(error: Exception) -> RequestError:
    return RequestError(400, f"not understood: {type(error).__name__}: {error}")
