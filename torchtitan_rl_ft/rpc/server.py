"""HTTP servers of the roles: loopback unless told otherwise, every route behind the run's token."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from torchtitan_rl_ft.rpc.limited_runner import LimitedRunner

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_BODY_BYTES = 256 * 1024 * 1024


class RequestError(Exception):
    """The request cannot be served; the message goes to the caller as `{"error": ...}`."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def json_body(request: web.Request) -> dict[str, Any]:
    """Raises RequestError (400)."""
    try:
        body = await request.json()
    except (ValueError, RecursionError) as e:  # the latter: nested too deep
        raise RequestError(400, f"body is not JSON: {e}") from e
    if not isinstance(body, dict):
        raise RequestError(400, "body is not a JSON object")
    return body


def error_response(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)


def authorised(token: str) -> Any:
    """Middleware that answers 401 before a handler runs unless the run's token is presented."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            return error_response(401, "missing or wrong token")
        try:
            return await handler(request)
        except RequestError as e:
            return error_response(e.status, str(e))
        except web.HTTPException:
            raise
        except Exception as e:
            logger.exception("%s %s failed", request.method, request.path)
            return error_response(500, f"{type(e).__name__}: {e}")

    return check


def make_app(token: str, routes: list[web.RouteDef]) -> web.Application:
    """An application whose every route, present and future, needs the token."""
    app = web.Application(middlewares=[authorised(token)], client_max_size=MAX_BODY_BYTES)
    app.router.add_routes(routes)
    return app


async def start(
    app: web.Application,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    grace_s: float = 2.0,
    limited: bool = False,
) -> tuple[str, web.AppRunner]:
    """Bind and serve; returns (url, runner). `port=0` takes a free one. The runner's clean-up waits
    `grace_s` for answers that are under way. `limited`: as limited_runner.py says.

    Raises OSError when the port is in use.
    """
    make = LimitedRunner if limited else web.AppRunner
    runner = make(app, access_log=None, shutdown_timeout=grace_s)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    bound = runner.addresses[0][1]
    return f"http://{host}:{bound}", runner
