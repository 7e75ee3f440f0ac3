"""The HTTP interface of an SGLang gateway (smg 1.13): who is listed, and requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import aiohttp

MODEL = "policy"
"""All engines are listed under one name, whatever their model path is."""


CONFLICT = 409


class GatewayError(Exception):
    """The gateway did not do what it was asked."""


@dataclass(frozen=True)
class Worker:
    """An engine on the gateway's list. Only a `ready` one is given requests."""

    id: str
    url: str
    ready: bool


class GatewayClient:
    """Every call has a limit; none is repeated here. Raises GatewayError."""

    def __init__(self, http: aiohttp.ClientSession, url: str, key: str) -> None:
        self._http, self.url, self._key = http, url, key
        self.headers = {"Authorization": f"Bearer {key}"}

    async def workers(self, timeout_s: float) -> list[Worker]:
        answer = await self._ask("GET", "/workers", timeout_s)
        try:
            return [
                Worker(w["id"], w["url"].rstrip("/"), w["status"] == "ready")
                for w in answer["workers"]
            ]
        except (KeyError, TypeError, AttributeError) as e:
            raise GatewayError(f"GET /workers: answer not understood: {answer!r:.200}") from e

    async def add(self, url: str, timeout_s: float) -> bool:
        """Ask for `url` to be listed: it is, some milliseconds later. False while it still is
        listed, perhaps on its way out. `runtime` spares the gateway to find out what answers
        there."""
        worker = {
            "url": url,
            "runtime": "sglang",
            "worker_type": "regular",
            "connection_mode": "http",
            "models": [{"id": MODEL}],
            "api_key": self._key,  # engines ask for none; without one each addition is a warning
            # Two seconds after a bad request SGLang closes the connection that it came on, whatever
            # runs there: each is used once.
            "http_pool": {"pool_max_idle_per_host": 0},
        }
        answer = await self._ask(
            "POST", "/workers", timeout_s, worker, accepted=(200, 201, 202, CONFLICT)
        )
        return "code" not in answer

    async def remove(self, worker_id: str, timeout_s: float) -> None:
        """Requests that it is answering go on."""
        path = f"/workers/{worker_id}"
        await self._ask("DELETE", path, timeout_s, accepted=(200, 202, 204, 404))

    async def _ask(
        self,
        method: str,
        path: str,
        timeout_s: float,
        body: dict[str, Any] | None = None,
        accepted: tuple[int, ...] = (200,),
    ) -> Any:
        limit = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._http.request(
                method, self.url + path, json=body, headers=self.headers, timeout=limit
            ) as r:
                if r.status not in accepted:
                    text = (await r.text())[:200]
                    raise GatewayError(f"{method} {path}: status {r.status}: {text}")
                return await r.json(content_type=None)
        except TimeoutError:
            raise GatewayError(f"{method} {path}: no answer in {timeout_s:.3g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as e:
            raise GatewayError(f"{method} {path}: {type(e).__name__}: {e}") from e
