"""Requests to a holder: for serving and for other holders. Roles without an event loop use
rpc/client.py."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import aiohttp

from torchtitan_rl_ft.weights.holder.exchange import NoAnswer, exchange
from torchtitan_rl_ft.weights.holder.settings import Key
from torchtitan_rl_ft.weights.pieces import Piece, Range, piece_from_json

BUSY = 409
SUPERSEDED = 410
OTHER_POLICY = 422
NO_MEMORY = 507
OTHER_MODEL = OTHER_LIBRARY = 412
NOT_ABLE = 503

ANSWER_S = 5.0
"""A relay ends a fetch by itself in time, and says why, however much its machine has to do."""

NOTHING_WRITTEN = (400, 401, 404, BUSY, OTHER_MODEL, OTHER_LIBRARY, NOT_ABLE)
"""Answers to a push that was refused: nothing was, or will be, written."""


class HolderError(Exception):
    """A holder did not do what it was asked. `status` is its HTTP status, 0 when none came."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Fetched:
    """A version that a relay holds whole and checked: a folder like any other. `bytes_from` counts
    by holder what came from it."""

    path: str
    manifest_digest: str
    seconds: float
    bytes_from: dict[str, int]


@dataclass(frozen=True)
class Offer:
    """A receiver's memory, registered for one push: `agent` is its NIXL agent's metadata, `address`
    where byte 0 of the image is, `nbytes` how many there are."""

    agent: bytes
    address: int
    nbytes: int
    nixl: str

    def to_json(self) -> dict[str, Any]:
        return {
            "agent": base64.b64encode(self.agent).decode(),
            "address": self.address,
            "nbytes": self.nbytes,
            "nixl": self.nixl,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Offer:
        """Raises ValueError, KeyError, TypeError."""
        return cls(
            base64.b64decode(data["agent"], validate=True),
            int(data["address"]),
            int(data["nbytes"]),
            str(data["nixl"]),
        )


class HolderClient:
    """Every call has a limit; none is repeated here. Raises HolderError."""

    def __init__(self, http: aiohttp.ClientSession, url: str, token: str) -> None:
        self._http, self.url, self._token = http, url, token

    async def fetch(
        self,
        key: Key,
        layout_digest: str,
        nbytes: int,
        timeout_s: float,
        manifest_digest: str | None = None,
    ) -> Fetched:
        """Have a relay get a version, whole. The same again joins the one under way."""
        body = {
            "step": key.step,
            "token": key.token,
            "layout_digest": layout_digest,
            "nbytes": nbytes,
            "timeout_s": timeout_s,
            "manifest_digest": manifest_digest,
        }
        answer = await self._ask("POST", "/v1/fetch", timeout_s + ANSWER_S, json=body)
        return Fetched(**{k: answer[k] for k in Fetched.__dataclass_fields__})

    async def pieces(
        self, key: Key, timeout_s: float, ranges: Iterable[Range] | None = None
    ) -> tuple[bytes, list[Piece]]:
        """The header of a version's image and the pieces that the holder has of it; with `ranges`
        what is pushed for them, see `pieces.clip`."""
        body: dict[str, Any] = {"step": key.step, "token": key.token}
        if ranges is not None:
            body["ranges"] = [list(r) for r in ranges]
        answer = await self._ask("POST", "/v1/pieces", timeout_s, json=body)
        try:
            header = base64.b64decode(answer["header"], validate=True)
            return header, [piece_from_json(p) for p in answer["pieces"]]
        except (ValueError, KeyError, TypeError) as e:
            raise HolderError(f"{self.url}/v1/pieces: answer not understood: {e}") from e

    async def push(
        self,
        key: Key,
        layout_digest: str,
        ranges: Iterable[Range],
        offer: Offer,
        stall_timeout_s: float,
        timeout_s: float,
    ) -> None:
        """Have a holder write `ranges` into the memory offered; answered when they are written."""
        body = {
            "step": key.step,
            "token": key.token,
            "layout_digest": layout_digest,
            "ranges": [list(r) for r in ranges],
            "stall_timeout_s": stall_timeout_s,
            **offer.to_json(),
        }
        await self._ask("POST", "/v1/push", timeout_s, json=body)

    async def assets(self, key: Key, timeout_s: float) -> dict[str, bytes]:
        """The small files of a version, by name."""
        params = {"step": str(key.step), "token": key.token}
        answer = await self._ask("GET", "/v1/assets", timeout_s, params=params)
        try:
            files = {str(n): base64.b64decode(d, validate=True) for n, d in answer["files"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise HolderError(f"{self.url}/v1/assets: answer not understood: {e}") from e
        return files

    async def status(self, timeout_s: float) -> dict[str, Any]:
        return await self._ask("GET", "/v1/status", timeout_s)

    async def _ask(self, method: str, path: str, timeout_s: float, **kwargs: Any) -> dict[str, Any]:
        try:
            status, answer = await exchange(
                self._http, method, self.url + path, self._token, timeout_s, **kwargs
            )
        except NoAnswer as e:
            raise HolderError(str(e)) from e
        if status != 200:
            raise HolderError(_message(answer, status), status)
        return answer


def _message(answer: Any, status: int) -> str:
    return str(answer["error"]) if isinstance(answer, dict) and "error" in answer else str(status)
