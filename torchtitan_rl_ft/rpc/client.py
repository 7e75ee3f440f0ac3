"""Blocking HTTP client for roles without an event loop (trainers, the command line)."""

from __future__ import annotations

import time
from typing import Any

import httpx


class RoleUnreachable(Exception):
    """A role did not answer within the caller's deadline."""


class RoleRefused(Exception):
    """A role answered with an error; `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RoleClient:
    """JSON requests to one role. Requests that it makes may be repeated, so every POST
    route of a role is idempotent.

    `find_url` is asked anew before each try: a restarted role has another port.
    """

    def __init__(self, name: str, find_url: Any, token: str, retry_delay_s: float = 0.2) -> None:
        self._name = name
        self._find_url = find_url
        self._retry_delay_s = retry_delay_s
        self._http = httpx.Client(headers={"Authorization": f"Bearer {token}"}, trust_env=False)

    def get(self, path: str, *, deadline_s: float, **params: Any) -> Any:
        return self._request("GET", path, deadline_s, params=params).json()

    def get_bytes(self, path: str, *, deadline_s: float) -> bytes:
        return self._request("GET", path, deadline_s).content

    def post(self, path: str, body: dict[str, Any], *, deadline_s: float) -> Any:
        return self._request("POST", path, deadline_s, json=body).json()

    def _request(self, method: str, path: str, deadline_s: float, **kwargs: Any) -> httpx.Response:
        """Repeat until an answer comes or `deadline_s` has passed.

        Raises RoleUnreachable, RoleRefused (never repeated: the role has decided).
        """
        end = time.monotonic() + deadline_s
        last = "no address registered"
        while True:
            left = end - time.monotonic()
            url = self._find_url()
            if url is not None and left > 0:
                try:
                    response = self._http.request(method, url + path, timeout=left, **kwargs)
                except httpx.TransportError as e:
                    last = f"{type(e).__name__}: {e}"
                else:
                    if response.is_success:
                        return response
                    raise RoleRefused(response.status_code, _message(response))
            if end - time.monotonic() <= self._retry_delay_s:
                raise RoleUnreachable(
                    f"{self._name} did not answer {method} {path} within {deadline_s:g} s ({last})"
                )
            time.sleep(self._retry_delay_s)

    def close(self) -> None:
        self._http.close()


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        return f"status {response.status_code}: {response.text[:200]}"
