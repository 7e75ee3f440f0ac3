"""Holders as processes of their own, with the directory of serving in the test's."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from torchtitan_rl_ft.config.weights import WeightsSection
from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.host.process import Child
from torchtitan_rl_ft.rpc import server
from torchtitan_rl_ft.run_folder import TOKEN_ENV, ProcessId
from torchtitan_rl_ft.serving.changes import Changes
from torchtitan_rl_ft.serving.directory import Directory
from torchtitan_rl_ft.serving.holder_book import HolderBook
from torchtitan_rl_ft.serving.holder_routes import HolderRoutes
from torchtitan_rl_ft.weights.holder import launch
from torchtitan_rl_ft.weights.holder.client import Fetched, HolderClient
from torchtitan_rl_ft.weights.holder.leftovers import remove_run
from torchtitan_rl_ft.weights.holder.settings import HolderSettings, Key, Kind
from torchtitan_rl_ft.weights.image import Image
from torchtitan_rl_ft.weights.pieces import Range

TOKEN = "secret of the run"
PROGRAM = "torchtitan_rl_ft.weights.holder"
READY_S = 120.0


class NoEvents:
    def emit(self, kind: Any, **fields: Any) -> None:
        pass


@dataclass
class Holder:
    settings: HolderSettings
    child: Child
    client: HolderClient

    @property
    def name(self) -> str:
        return self.settings.name

    def kill(self) -> None:
        self.child.send(signal.SIGKILL)

    def stop(self) -> None:
        self.child.send(signal.SIGSTOP)

    def thaw(self) -> None:
        self.child.send(signal.SIGCONT)

    async def process(self) -> dict[str, Any]:
        """Descriptors, threads and memory of the process."""
        return (await self.client.status(5.0))["process"]


@dataclass
class Policy:
    """A version for tests: every byte of the image from a seed."""

    key: Key
    image: Image
    data: bytes = field(repr=False)

    @classmethod
    def make(cls, mib: float, step: int = 1, seed: int = 0, token: str = "abcdef0123") -> Policy:
        """Of about `mib` MiB: one tensor of half of it, the others smaller and smaller, many tiny
        ones at the end."""
        words = int(mib * (1 << 20)) // 4
        specs: dict[str, tuple[str, list[int]]] = {}
        while words > 4096:
            specs[f"layer.{len(specs):03}"] = ("F32", [words // 2])
            words -= words // 2
        specs |= {f"norm.{i:03}": ("BF16", [37 + i]) for i in range(20)}
        image = Image(specs)
        count = image.nbytes - len(image.header)
        data = np.random.default_rng(seed + step).integers(0, 256, count, np.uint8).tobytes()
        return cls(Key(step, token), image, image.header + data)

    def halves(self) -> list[list[Range]]:
        """What two ranks would hold: alternating rows of each tensor."""
        first, second = [], []
        for span in self.image.tensors.values():
            middle = (span.start + span.end) // 2
            first.append((span.start, middle))
            second.append((middle, span.end))
        return [first, second]


class Site:
    def __init__(
        self, folder: Path, http: aiohttp.ClientSession, book: HolderBook, url: str
    ) -> None:
        self.folder, self.book, self.url = folder, book, url
        self.http = http
        self.children: list[Child] = []
        self.weights = WeightsSection(piece_mb=1, stall_timeout_s=2.0, fetch_timeout_s=30.0)
        self.run_id = f"test-{os.getpid()}-{time.monotonic_ns()}"

    async def start(self, name: str, kind: Kind, netns: str = "", **weights: Any) -> Holder:
        """`netns`: a network namespace to run it in."""
        settings = HolderSettings(
            name,
            kind,
            self.run_id,
            replace(self.weights, **weights),
            ProcessId.current(),
            serving_url=self.url,
        )
        log = self.folder / f"{name}.log"
        env = {**os.environ, TOKEN_ENV: TOKEN}
        if netns:
            argv = ["ip", "netns", "exec", netns, sys.executable, "-m", PROGRAM, settings.to_json()]
            child = process.spawn(argv, log=log, env=env)
        else:
            child = launch.start(settings, token=TOKEN, log=log, env=env)
        self.children.append(child)
        end_s = time.monotonic() + READY_S
        while (found := launch.address(settings)) is None or found.pid != child.pid:
            assert child.returncode is None, log.read_text()
            assert time.monotonic() < end_s, log.read_text()
            await asyncio.sleep(0.02)
        return Holder(settings, child, HolderClient(self.http, found.url, TOKEN))

    async def offer(
        self, source: Holder, policy: Policy, ranges: list[Range] | None = None
    ) -> None:
        """As the rank of a source does."""
        ranges = ranges or [(len(policy.image.header), policy.image.nbytes)]
        body = {**policy.key._asdict(), "header": base64.b64encode(policy.image.header).decode()}
        file = (await self.post(source, "/v1/reserve", body))["file"]
        with open(file, "r+b") as f:
            for start, end in ranges:
                f.seek(start)
                f.write(policy.data[start:end])
        assets = self.folder / "assets"
        assets.mkdir(exist_ok=True)
        (assets / "config.json").write_text('{"model_type": "qwen3"}')
        body = {
            **policy.key._asdict(),
            "file": file,
            "ranges": [list(r) for r in ranges],
            "assets": str(assets),
        }
        if not (await self.post(source, "/v1/offer", body))["known"]:  # a slow machine
            end_s = time.monotonic() + READY_S
            while not self._knows(source, policy.key):
                assert time.monotonic() < end_s, self.log(source)
                await asyncio.sleep(0.02)

    def _knows(self, holder: Holder, key: Key) -> bool:
        told = {h["name"]: h["held"] for h in self.book.to_json()["holders"]}
        return any((v["step"], v["token"]) == key for v in told.get(holder.name, ()))

    def want(self, policy: Policy) -> None:
        self.book.want(policy.key, policy.image.layout_digest, policy.image.nbytes)

    async def fetch(self, relay: Holder, policy: Policy, timeout_s: float = 25.0) -> Fetched:
        return await relay.client.fetch(
            policy.key, policy.image.layout_digest, policy.image.nbytes, timeout_s
        )

    async def post(self, holder: Holder, path: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self.http.post(
            holder.client.url + path, json=body, headers={"Authorization": f"Bearer {TOKEN}"}
        ) as response:
            answer = await response.json()
            assert response.status == 200, answer
            return answer

    def log(self, holder: Holder) -> str:
        return (self.folder / f"{holder.name}.log").read_text()


@contextlib.asynccontextmanager
async def holder_site(folder: Path, host: str = "127.0.0.1") -> AsyncIterator[Site]:
    book = HolderBook(Directory(), NoEvents(), Changes())
    app = server.make_app(TOKEN, HolderRoutes(book).table())
    url, runner = await server.start(app, host)
    async with aiohttp.ClientSession() as http:
        site = Site(folder, http, book, url)
        try:
            yield site
        finally:
            for child in site.children:
                child.send(signal.SIGKILL)
                await child.wait()
            remove_run(site.weights.memory_folder, site.run_id)
            await runner.cleanup()
