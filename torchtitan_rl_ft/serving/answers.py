"""Generate requests in work, those who wait for them, and how these are told."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

from torchtitan_rl_ft.rpc.server import RequestError
from torchtitan_rl_ft.serving.progress import Account, Progress
from torchtitan_rl_ft.serving.requests import GenerateRequest, RequestFailed, RequestRejected
from torchtitan_rl_ft.serving.samples import FROZEN_VERSION, Sample

ABANDONED_POLL_S = 0.25

LINES = "application/x-ndjson"


class Answer:
    """A generate request in work, and those who wait for it."""

    def __init__(
        self, asked: GenerateRequest, progress: Progress, task: asyncio.Task[list[Sample]]
    ) -> None:
        self._asked, self.progress, self._task = asked, progress, task
        self._waiting = 0
        task.add_done_callback(lambda _: progress.changes.notify())

    @property
    def done(self) -> bool:
        return self._task.done()

    def serves(self, asked: GenerateRequest, version: int) -> bool:
        """Whether it is, or will be, the answer to `asked` under the current `version`."""
        if asked != self._asked or self._task.cancelling():
            return False
        if not self.done:
            return True
        if self._task.cancelled() or self._task.exception() is not None:
            return False
        current = (version, FROZEN_VERSION)
        return all(s.max_version in current for s in self._task.result())

    async def result(self, request: web.Request, told: Told | None = None) -> dict[str, Any]:
        """The answer's body, once it is there; `told` is told before. Raises RequestError."""
        self._waiting += 1
        try:
            while not self.done:
                if told is None:
                    await asyncio.wait({self._task}, timeout=ABANDONED_POLL_S)
                else:
                    await self.progress.changes.wait_until(
                        lambda: self.done or told.due, ABANDONED_POLL_S
                    )
                if request.transport is None or request.transport.is_closing():
                    raise RequestError(499, "the caller has gone")
                if told is not None and told.due and not self.done:
                    await told.tell()
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._task.cancel()  # nothing, when it is done
        return {"samples": [s.to_json() for s in self._samples()]}

    def _samples(self) -> list[Sample]:
        try:
            return self._task.result()
        except RequestRejected as e:
            raise RequestError(400, str(e)) from e
        except RequestFailed as e:
            raise RequestError(502 if e.tried else 503, str(e)) from e


class Told:
    """A caller that is told of unfinished samples. Lines of JSON: `{"partial": [...]}`, then the
    answer, or `{"error", "status"}`. What is answered before there was anything to tell is an
    answer like any other."""

    def __init__(self, request: web.Request, account: Account) -> None:
        self._request, self._account = request, account
        self._stream: web.StreamResponse | None = None

    @property
    def due(self) -> bool:
        return self._account.due

    async def of(self, answer: Answer) -> web.StreamResponse:
        try:
            body = await answer.result(self._request, self)
        except RequestError as e:
            return await self._failed(e)
        if self._stream is None:
            return web.json_response(body)
        return await self._last(body)

    async def tell(self) -> None:
        """What the caller lacks. Raises RequestError when it has gone."""
        await self._line({"partial": self._account.news()})

    async def _failed(self, error: RequestError) -> web.StreamResponse:
        """With the rest of the tokens, from which the caller may go on."""
        untold = error.status != 400 and self._account.lacks
        if error.status == 499 or (self._stream is None and not untold):
            raise error
        await self.tell()
        return await self._last({"error": str(error), "status": error.status})

    async def _last(self, body: dict[str, Any]) -> web.StreamResponse:
        stream = await self._line(body)
        await stream.write_eof()
        return stream

    async def _line(self, body: dict[str, Any]) -> web.StreamResponse:
        try:
            if self._stream is None:
                self._stream = web.StreamResponse(headers={"Content-Type": LINES})
                await self._stream.prepare(self._request)
            await self._stream.write(json.dumps(body).encode() + b"\n")
        except ConnectionError as e:
            raise RequestError(499, "the caller has gone") from e
        return self._stream
