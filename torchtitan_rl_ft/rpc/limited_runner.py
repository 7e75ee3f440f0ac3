"""An HTTP server that strangers may ask: with a bound for what they can hold of this process."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from aiohttp import web

MOST_CONNECTIONS = 128
"""Of one server; more are closed at once. Each is an open file of a process that has others to
open."""

KEEPALIVE_S = 15.0
"""A connection without a request is closed after this; aiohttp's own limit is an hour."""


class LimitedRunner(web.AppRunner):
    """A web.AppRunner whose server takes so many connections at a time."""

    def __init__(self, app: web.Application, **more: Any) -> None:
        super().__init__(app, keepalive_timeout=KEEPALIVE_S, **more)
        self._most = MOST_CONNECTIONS

    @property
    def server(self) -> web.Server | None:
        """Called for a protocol for each connection."""
        made = super().server
        return None if made is None else cast(web.Server, _Limited(made, self._most))


class _Limited:
    def __init__(self, server: web.Server, most: int) -> None:
        self._server, self._most = server, most

    def __call__(self) -> asyncio.BaseProtocol:
        full = len(self._server.connections) >= self._most
        return _Refused() if full else self._server()


class _Refused(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).abort()
