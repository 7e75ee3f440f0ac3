"""What the supervisor serves to those who look: the status page, its JSON, /metrics and /health.

On loopback, without the run's token, and read-only: GET alone, by the names of loopback alone (a
page of another origin cannot reach it under a name of its own), nothing of another role is passed
on. Nothing is computed while nobody asks. An error of it never ends the job: it is one warning.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import functools
import hashlib
import importlib.resources
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from torchtitan_rl_ft.config.resolve import Resolved
from torchtitan_rl_ft.observability.events import EventSink, Kind
from torchtitan_rl_ft.observability.health import Health, HealthLimits, health
from torchtitan_rl_ft.observability.json_text import text_of
from torchtitan_rl_ft.observability.live_ettr import LiveEttr, measured_json
from torchtitan_rl_ft.observability.run_follower import RunFollower
from torchtitan_rl_ft.roles.report import SUPERVISOR
from torchtitan_rl_ft.rpc import server

logger = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "::1")

MEASURE_TIMEOUT_S = 0.5
"""How long an answer waits for a newer ETTR; then it has the last one."""

GRACE_S = 0.5
"""For answers that are under way at the end of the job."""

HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class StatusPage:
    """The answers, from the state that `follower` keeps."""

    def __init__(
        self,
        follower: RunFollower,
        live: LiveEttr,
        limits: HealthLimits,
        events: EventSink,
        *,
        ettr_window_s: float,
        now_mono_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._follower, self._live, self._limits = follower, live, limits
        self._events, self._ettr_window_s, self._now_mono_s = events, ettr_window_s, now_mono_s
        self._failed = False

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.router.add_routes(
            [
                web.get("/", self._page, allow_head=False),
                web.get("/api/status", self._status, allow_head=False),
                web.get("/api/events", self._tell_events, allow_head=False),
                web.get("/metrics", self._metrics, allow_head=False),
                web.get("/health", self._tell_health, allow_head=False),
            ]
        )
        return app

    @property
    def health(self) -> Health:
        return health(self._follower.state, self._now_mono_s(), self._limits)

    def status(self) -> dict[str, Any]:
        """All of /api/status."""
        state, folder = self._follower.state, self._follower.folder
        return {
            "run": folder.path.name,
            "folder": str(folder.path),
            "health": self.health.to_json(),
            **state.to_json(self._now_mono_s()),
            "unreadable_lines": self._follower.unreadable,
            "ettr_window_s": self._ettr_window_s,
            "measured": measured_json(self._live.measured),
        }

    # Answers ----------------------------------------------------------------------------

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if not is_loopback(request.headers.get("Host", "")):
            return _text(403, "this page is served to loopback alone: http://127.0.0.1:PORT/")
        try:
            answer = await handler(request)
        except web.HTTPException as e:
            answer = _text(e.status, e.reason)
            if "Allow" in e.headers:
                answer.headers["Allow"] = e.headers["Allow"]
        except Exception as e:  # in the supervisor: the job goes on
            logger.exception("%s failed", request.path)
            if not self._failed:
                self._failed = True
                self.warn(f"the status page failed: {request.path}: {type(e).__name__}: {e}")
            answer = _text(500, "this cannot be told: see the supervisor's log")
        answer.headers.update(HEADERS)
        return answer

    async def _page(self, request: web.Request) -> web.Response:
        text, policy = page()
        headers = {"Content-Security-Policy": policy}
        return web.Response(text=text, content_type="text/html", headers=headers)

    async def _status(self, request: web.Request) -> web.Response:
        self._follower.poll()
        await self._measure()
        return _json(self.status())

    async def _tell_events(self, request: web.Request) -> web.Response:
        after = request.query.get("after", "0")
        if not re.fullmatch(r"[0-9]{1,15}", after):
            return _text(400, "after is the number of an event")
        self._follower.poll()
        return _json(self._follower.state.events_after(int(after)))

    async def _metrics(self, request: web.Request) -> web.Response:
        from torchtitan_rl_ft.observability import prometheus  # for those who scrape

        self._follower.poll()
        await self._measure()
        collector = prometheus.RunCollector(
            self._follower.state,
            lambda: self._live.measured,
            lambda: self.health,
            self._now_mono_s,
            self._follower.folder.path.name,
        )
        content_type = "text/plain; version=0.0.4; charset=utf-8"
        return web.Response(
            body=prometheus.exposition(collector), headers={"Content-Type": content_type}
        )

    async def _tell_health(self, request: web.Request) -> web.Response:
        self._follower.poll()
        found = self.health
        return _json(found.to_json(), status=200 if found.ok else 503)

    async def _measure(self) -> None:
        self._live.look()
        end_s = time.monotonic() + MEASURE_TIMEOUT_S
        while self._live.looking and time.monotonic() < end_s:
            await asyncio.sleep(0.01)

    def warn(self, cause: str) -> None:
        with contextlib.suppress(OSError):  # a full disk: the job goes on
            self._events.emit(Kind.WARN, cause=cause)


def is_loopback(host: str) -> bool:
    """Of a Host header, with any port: it may have come through a tunnel."""
    try:
        return urlsplit(f"//{host}").hostname in LOOPBACK
    except ValueError:
        return False


@functools.cache
def page() -> tuple[str, str]:
    """The page, and the policy that allows its own script and style alone."""
    package = importlib.resources.files("torchtitan_rl_ft.observability")
    text = (package / "status_page.html").read_text(encoding="utf-8")
    allowed = {
        name: " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'"
            for part in re.findall(f"<{name}>(.*?)</{name}>", text, re.DOTALL)
        )
        for name in ("script", "style")
    }
    policy = (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return text, policy


def _json(value: Any, status: int = 200) -> web.Response:
    return web.json_response(value, status=status, dumps=text_of)


def _text(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=text + "\n")


# The supervisor's side ------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def served(
    resolved: Resolved, follower: RunFollower, events: EventSink
) -> AsyncIterator[str | None]:
    """The page of a job while the context lasts; its address, None when it is not wanted or cannot
    be. A port in use is one warning: another one is taken."""
    section = resolved.sections.observability
    if not section.status_page:
        yield None
        return
    async with contextlib.AsyncExitStack() as stack:
        url, made = None, page_of(resolved, follower, events)
        try:
            url = await _start(made, section.status_port, stack)
            announce(follower, url)
        except Exception as e:  # in the supervisor: the job goes on
            logger.exception("the status page cannot be served")
            made.warn(f"the status page cannot be served: {type(e).__name__}: {e}")
        yield url


def page_of(resolved: Resolved, follower: RunFollower, events: EventSink) -> StatusPage:
    section, recovery = resolved.sections.observability, resolved.sections.recovery
    live = LiveEttr(
        follower.folder.events, window_s=section.ettr_window_s, every_s=section.ettr_sample_s
    )
    stall_s = max(recovery.batch_wait_timeout_s, recovery.phase_timeout_s)
    limits = HealthLimits(resolved.sections.rollout.engine_start_timeout_s + stall_s, stall_s)
    return StatusPage(follower, live, limits, events, ettr_window_s=section.ettr_window_s)


async def _start(made: StatusPage, port: int, stack: contextlib.AsyncExitStack) -> str:
    """Raises OSError."""
    try:
        url, runner = await server.start(made.app(), port=port, grace_s=GRACE_S, limited=True)
    except OSError as e:
        if port == 0:
            raise
        url, runner = await server.start(made.app(), grace_s=GRACE_S, limited=True)
        made.warn(f"the status page: port {port} of loopback: {e.strerror or e}: it is at {url}/")
    stack.push_async_callback(runner.cleanup)
    return url


def announce(follower: RunFollower, url: str) -> None:
    """In the registry, under the supervisor's name. Raises OSError."""
    if (supervisor := follower.folder.role(SUPERVISOR)) is not None:
        follower.folder.announce(dataclasses.replace(supervisor, url=url))
