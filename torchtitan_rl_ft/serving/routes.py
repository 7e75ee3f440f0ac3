"""The serving role's HTTP interface (docs/architecture.md)."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from torchtitan_rl_ft.config.groups import POLICY
from torchtitan_rl_ft.rpc.server import RequestError, json_body
from torchtitan_rl_ft.serving.answers import Answer, Told
from torchtitan_rl_ft.serving.memory import ReleaseFailed
from torchtitan_rl_ft.serving.ownership import NotOwner, Ownership
from torchtitan_rl_ft.serving.progress import Account, Progress
from torchtitan_rl_ft.serving.releases import Announcement, PublishLate, PublishRefused
from torchtitan_rl_ft.serving.requests import GenerateRequest, Held
from torchtitan_rl_ft.serving.service import NotColocated, ServingService

MAX_LONG_POLL_S = 30.0
MAX_SAMPLES = 4096
KEPT_ANSWERS = 256
CLOSED_POLL_S = 1.0
RESERVED_SAMPLING = ("n", "sampling_seed")


class Routes:
    """`stop` is called by /v1/shutdown once the engines are gone. Without `ownership` nobody owns
    the session: nothing is fenced."""

    def __init__(
        self,
        service: ServingService,
        stop: Callable[[], None],
        ownership: Ownership | None = None,
    ) -> None:
        self._service, self._stop, self._ownership = service, stop, ownership
        self._answers: OrderedDict[str, Answer] = OrderedDict()
        self._stream_interval_tokens = service.stream_interval_tokens

    def table(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/publish", self.publish),
            web.get("/v1/version", self.version),
            web.post("/v1/generate", self.generate),
            web.get("/v1/status", self.status),
            web.post("/v1/check", self.check),
            web.post("/v1/release", self.release),
            web.post("/v1/shutdown", self.shutdown),
        ]

    async def publish(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        wait = body.get("wait", "none")
        if wait not in ("first", "all", "none"):
            raise RequestError(400, f"wait is {wait!r}: first, all or none")
        attempt, ownership = body.get("attempt"), self._ownership

        def permit() -> None:
            if ownership is not None:
                ownership.check_publisher(attempt)

        try:
            permit()
            answer = await self._publish(body, wait, permit)
        except (PublishRefused, NotOwner) as e:
            raise RequestError(409, str(e)) from e
        except PublishLate as e:
            raise RequestError(503, str(e)) from e
        if ownership is not None:
            await ownership.published(attempt)
        return web.json_response(answer)

    async def _publish(
        self, body: dict[str, Any], wait: str, permit: Callable[[], None]
    ) -> dict[str, Any]:
        step, token = _field(body, "step", int), _field(body, "token", str)
        deadline_s = _number(body, "deadline_s")
        if "path" in body:
            version, installed = await self._service.publish(
                step,
                token,
                Path(_field(body, "path", str)),
                _field(body, "manifest_digest", str),
                wait,
                deadline_s,
                permit,
            )
            return {"version": version, "installed": installed}
        asked = Announcement(
            step,
            token,
            None,
            "",
            permit,
            _field(body, "layout_digest", str),
            _positive(body, "nbytes"),
        )
        wait_relays = body.get("wait_relays", "first")
        if wait_relays not in ("first", "all"):
            raise RequestError(400, f"wait_relays is {wait_relays!r}: first or all")
        version, installed, relays = await self._service.publish_image(
            asked, wait, wait_relays, deadline_s
        )
        return {"version": version, "installed": installed, "relays": relays}

    async def version(self, request: web.Request) -> web.Response:
        try:
            after = int(request.query.get("after", "0"))
            timeout_s = float(request.query.get("timeout_s", "0"))
        except ValueError as e:
            raise RequestError(400, f"after and timeout_s are numbers: {e}") from e
        timeout_s = min(timeout_s, MAX_LONG_POLL_S)
        if not await self._service.admission.opened(min(timeout_s, CLOSED_POLL_S)):
            # To the owner's rollouts nothing is served before its trainer has published.
            answer = await self._service.wait_version(after, 0.0)
            awaits = self._ownership.awaits_publish if self._ownership is not None else None
            return web.json_response({**answer, "serving": 0, "awaits_publish": awaits})
        if (awaits := self._service.awaits_publish) is not None:
            # Its trainer writes the same state once more.
            answer = await self._service.wait_version(after, min(timeout_s, CLOSED_POLL_S))
            return web.json_response({**answer, "awaits_publish": awaits})
        return web.json_response(await self._service.wait_version(after, timeout_s))

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """A repeated request joins the first one, or gets its samples while their version is the
        current one, instead of generating again. When every caller has gone, so does the request,
        also in the engine. A caller that wants to be told of unfinished samples gets a stream of
        lines as soon as there is something to tell."""
        asked = _generate_request(await json_body(request))
        admission = self._service.admission
        if not await admission.opened(asked.timeout_s):
            raise RequestError(503, f"no request was taken: {admission.closed}")
        answer = self._answers.get(asked.request_id)
        if answer is None or not answer.serves(asked, self._service.version):
            progress = Progress(asked)
            answer = Answer(
                asked, progress, asyncio.create_task(self._service.generate(asked, progress))
            )
            self._answers[asked.request_id] = answer
            self._forget_old()
        if asked.partial_interval_tokens:
            told = Told(request, Account(answer.progress, asked, self._stream_interval_tokens))
            return await told.of(answer)
        return web.json_response(await answer.result(request))

    def _forget_old(self) -> None:
        for request_id, answer in list(self._answers.items()):
            if len(self._answers) <= KEPT_ANSWERS:
                return
            if answer.done:
                del self._answers[request_id]

    async def status(self, request: web.Request) -> web.Response:
        owned = self._ownership.status() if self._ownership is not None else {}
        return web.json_response({**self._service.status(), **owned})

    async def check(self, request: web.Request) -> web.Response:
        timeout_s = _number(await json_body(request), "timeout_s")
        return web.json_response(await self._service.check(timeout_s))

    async def release(self, request: web.Request) -> web.Response:
        timeout_s = _number(await json_body(request), "timeout_s")
        try:
            released = await self._service.release(timeout_s)
        except NotColocated as e:
            raise RequestError(409, str(e)) from e
        except ReleaseFailed as e:
            raise RequestError(504, str(e)) from e
        return web.json_response({"released": released})

    async def shutdown(self, request: web.Request) -> web.Response:
        await self._service.close()
        asyncio.get_running_loop().call_soon(self._stop)
        return web.json_response({})


# Bodies ---------------------------------------------------------------------------------------


def _generate_request(body: dict[str, Any]) -> GenerateRequest:
    n = _field(body, "n", int)
    if not 1 <= n <= MAX_SAMPLES:
        raise RequestError(400, f"n is {n}: 1 to {MAX_SAMPLES}")
    seeds = body.get("seeds")
    if seeds is not None:
        seeds = _integers(body, "seeds")
        if len(seeds) != n:
            raise RequestError(400, f"{len(seeds)} seeds for {n} samples")
    sampling = body.get("sampling", {})
    if not isinstance(sampling, dict):
        raise RequestError(400, "sampling is an object of SGLang's sampling parameters")
    for name in RESERVED_SAMPLING:
        if name in sampling:
            raise RequestError(400, f"sampling.{name} is set by n and seeds")
    group = body.get("group", POLICY)
    if not isinstance(group, str):
        raise RequestError(400, "group is the name of a group of engines")
    _check_lengths(sampling)
    return GenerateRequest(
        _field(body, "request_id", str),
        _integers(body, "input_ids"),
        n,
        sampling,
        seeds,
        _number(body, "timeout_s"),
        group,
        _held(body, n),
        _partial_interval_tokens(body),
        body.get("trace") is True,
    )


def _partial_interval_tokens(body: dict[str, Any]) -> int:
    value = body.get("partial_interval_tokens", 0)
    if type(value) is not int or value < 0:
        raise RequestError(400, f"partial_interval_tokens is {value!r}: an integer from 0 on")
    return value


def _held(body: dict[str, Any], n: int) -> tuple[Held, ...]:
    given = body.get("held") or []
    try:
        held = tuple(
            Held(
                [int(i) for i in h["output_ids"]],
                [float(x) for x in h["logprobs"]],
                [int(v) for v in h["versions"]],
                None if h["finish_reason"] is None else str(h["finish_reason"]),
            )
            for h in given
        )
    except (KeyError, TypeError, ValueError) as e:
        raise RequestError(400, f"held is not understood: {type(e).__name__}: {e}") from e
    if len(held) not in (0, n):
        raise RequestError(400, f"held has {len(held)} entries for {n} samples")
    for h in held:
        if not len(h.output_ids) == len(h.logprobs) == len(h.versions):
            raise RequestError(400, "held has a sample whose lists differ in length")
        if h.versions and min(h.versions) < 1:
            raise RequestError(400, "held has a version below 1: those of the policy count from 1")
    return held


def _check_lengths(sampling: dict[str, Any]) -> None:
    """Of the sampling parameters that the router reads itself, when a sample goes on."""
    for name in ("max_new_tokens", "min_new_tokens"):
        if name in sampling and (type(sampling[name]) is not int or sampling[name] < 0):
            raise RequestError(400, f"sampling.{name} is {sampling[name]!r}: an integer from 0 on")
    if sampling.get("stop_token_ids") is not None:
        _integers(sampling, "stop_token_ids")


def _field(body: dict[str, Any], name: str, kind: type) -> Any:
    value = body.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise RequestError(400, f"{name} is missing or no {kind.__name__}")
    return value


def _number(body: dict[str, Any], name: str) -> float:
    value = body.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise RequestError(400, f"{name} is missing or no positive number")
    return float(value)


def _positive(body: dict[str, Any], name: str) -> int:
    if (value := _field(body, name, int)) <= 0:
        raise RequestError(400, f"{name} is {value}: a positive number")
    return value


def _integers(body: dict[str, Any], name: str) -> list[int]:
    values = body.get(name)
    if not isinstance(values, list) or not all(type(v) is int for v in values):
        raise RequestError(400, f"{name} is missing or no list of integers")
    return values
