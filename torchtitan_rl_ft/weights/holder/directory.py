"""What a holder asks of the directory of holders, which is in serving."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import aiohttp

from torchtitan_rl_ft.weights.holder.client import SUPERSEDED
from torchtitan_rl_ft.weights.holder.exchange import NoAnswer, exchange
from torchtitan_rl_ft.weights.holder.settings import Key
from torchtitan_rl_ft.weights.pieces import Range, merge

REPLACED = 409


class DirectoryError(Exception):
    """The directory cannot be reached, or did not understand."""


class Replaced(Exception):
    """Another process has this holder's name: this one is to end."""


class Superseded(Exception):
    """A newer version has taken the place of the one that was asked for."""


@dataclass(frozen=True)
class Lease:
    """The right to ask one holder for ranges, for a while."""

    id: str
    url: str
    name: str
    ranges: list[Range]


@dataclass(frozen=True)
class Answer:
    """The directory's answer to a report: what to `keep`, and whose pieces it knows."""

    keep: set[Key]
    known: set[Key]


class DirectoryClient:
    """`find_url` is asked before each request: serving moves when it is restarted. Raises
    DirectoryError."""

    def __init__(
        self, http: aiohttp.ClientSession, find_url: Callable[[], str | None], token: str
    ) -> None:
        self._http, self._find_url, self._token = http, find_url, token

    async def report(self, body: dict[str, Any], timeout_s: float) -> Answer:
        """Raises Replaced."""
        try:
            answer = await self._post("/v1/holders", body, timeout_s)
        except _Refused as e:
            if e.status == REPLACED:
                raise Replaced(str(e)) from None
            raise
        try:
            return Answer(
                {Key(int(s), str(t)) for s, t in answer["keep"]},
                {Key(int(s), str(t)) for s, t in answer["known"]},
            )
        except (ValueError, KeyError, TypeError) as e:
            raise DirectoryError(f"/v1/holders: answer not understood: {e}") from e

    async def lease(
        self, name: str, key: Key, missing: Iterable[Range], timeout_s: float
    ) -> list[Lease]:
        """Whom to ask for what, none after `timeout_s`. Raises Superseded."""
        body = {
            "name": name,
            "step": key.step,
            "token": key.token,
            "missing": [list(r) for r in missing],
            "timeout_s": timeout_s,
        }
        try:
            answer = await self._post("/v1/holders/lease", body, timeout_s + 1.0)
        except _Refused as e:
            if e.status == SUPERSEDED:
                raise Superseded(str(e)) from None
            raise
        try:
            return [
                Lease(
                    str(found["id"]),
                    str(found["url"]),
                    str(found["name"]),
                    merge((int(start), int(end)) for start, end in found["ranges"]),
                )
                for found in answer["leases"]
            ]
        except (ValueError, KeyError, TypeError) as e:
            raise DirectoryError(f"/v1/holders/lease: answer not understood: {e}") from e

    async def returned(self, lease: Lease, cause: str | None, timeout_s: float) -> None:
        """The lease is not used any more; `cause`: why its holder is of no use."""
        body: dict[str, Any] = {"lease": lease.id, "ok": cause is None}
        if cause is not None:
            body["cause"] = cause
        await self._post("/v1/holders/returned", body, timeout_s)

    async def _post(self, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        url = self._find_url()
        if url is None:
            raise DirectoryError("serving has no address yet")
        try:
            status, answer = await exchange(
                self._http, "POST", url + path, self._token, timeout_s, json=body
            )
        except NoAnswer as e:
            raise DirectoryError(str(e)) from e
        if status != 200:
            raise _Refused(f"{path}: {answer!r:.300}", status)
        return answer


class _Refused(DirectoryError):
    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
