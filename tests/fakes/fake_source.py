"""A source that only keeps files and notes what it is offered (weights/holder has the real one).

    python tests/fakes/fake_source.py SETTINGS

RUN/offers-<name>.jsonl gets a line for each offer. While RUN/slow-<name> is there, an offer is
answered only when it is gone; with RUN/full-<name> there is no memory.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
from pathlib import Path

from aiohttp import web

from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.rpc.server import RequestError, json_body, make_app, start
from torchtitan_rl_ft.run_folder import TOKEN_ENV
from torchtitan_rl_ft.weights.holder import launch
from torchtitan_rl_ft.weights.holder.settings import HolderSettings
from torchtitan_rl_ft.weights.image import WEIGHTS_FILE, Image


def start_fake(
    settings: HolderSettings, *, token: str, log: Path, env: dict[str, str]
) -> process.Child:
    argv = [sys.executable, __file__, settings.to_json()]
    return process.spawn(argv, log=log, env={**env, TOKEN_ENV: token})


class FakeSource:
    def __init__(self, settings: HolderSettings) -> None:
        self._settings, self._run = settings, Path(settings.run_folder)
        self._files: list[Path] = []

    def _told(self, what: str) -> bool:
        return (self._run / f"{what}-{self._settings.name}").exists()

    async def reserve(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        if self._told("full"):
            raise RequestError(507, "no memory for another version")
        header = base64.b64decode(body["header"])
        folder = self._settings.folder / f"step-{body['step']}-{body['token'][:8]}"
        path = folder / WEIGHTS_FILE
        folder.mkdir(parents=True, exist_ok=True)
        if len(self._files) >= 2:
            os.replace(self._files.pop(0), path)
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        os.ftruncate(fd, Image.from_header(header).nbytes)
        os.pwrite(fd, header, 0)
        os.close(fd)
        self._files.append(path)
        return web.json_response({"file": str(path)})

    async def offer(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        while self._told("slow"):
            await asyncio.sleep(0.01)
        with open(self._run / f"offers-{self._settings.name}.jsonl", "a") as f:
            f.write(json.dumps({**body, "pid": os.getpid()}) + "\n")
        return web.json_response({})


async def main() -> None:
    settings = HolderSettings.from_json(sys.argv[1])
    fake = FakeSource(settings)
    routes = [web.post("/v1/reserve", fake.reserve), web.post("/v1/offer", fake.offer)]
    url, _ = await start(make_app(os.environ[TOKEN_ENV], routes))
    settings.folder.mkdir(parents=True, exist_ok=True)
    launch.announce(settings, url)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
