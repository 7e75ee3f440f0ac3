"""Weights over holders: a real source, real relays, serving's own directory between them."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import torch
from aiohttp import web

from benchmarks.weight_paths.crew import LIMIT_S, Sample
from torchtitan_rl_ft.config.weights import WeightsSection
from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.observability.events import EventList
from torchtitan_rl_ft.rpc.server import make_app, start
from torchtitan_rl_ft.run_folder import ProcessId, RunFolder
from torchtitan_rl_ft.serving.changes import Changes
from torchtitan_rl_ft.serving.directory import Answer, Directory, Report
from torchtitan_rl_ft.serving.holder_book import HolderBook
from torchtitan_rl_ft.serving.holder_routes import HolderRoutes
from torchtitan_rl_ft.trainer.group_link import GroupLink
from torchtitan_rl_ft.trainer.offers import Offered, Offers
from torchtitan_rl_ft.trainer.source import Source
from torchtitan_rl_ft.weights.holder import launch
from torchtitan_rl_ft.weights.holder.client import HolderClient
from torchtitan_rl_ft.weights.holder.leftovers import remove_run
from torchtitan_rl_ft.weights.holder.settings import HolderSettings, Key

TOKEN = "benchmark"
RUN_ID = f"benchmark-{os.getpid()}"
POLL_S = 0.002
BETWEEN_S = 0.3
"""From one version to the next, in which holders make ready for it: steps of a job take longer."""


class SourcesOnly(HolderBook):
    """What relays hold is not given on: every receiver gets all of it from the source."""

    def report(self, told: Report) -> Answer:
        if told.kind == "source":
            return super().report(told)
        answer = super().report(replace(told, held=()))
        return Answer(answer.keep, [held.key for held in told.held])


@dataclass(frozen=True)
class Site:
    """Where it happens. `tensors`: what the trainer rank holds."""

    folder: Path
    weights: WeightsSection
    tensors: dict[str, torch.Tensor]
    relays_give: bool = True


@dataclass(frozen=True)
class Offering:
    """Seconds that the trainer stood still, and that its source hashed after that."""

    stall_s: float
    hash_s: float


class Directories:
    """The directory of holders, served by a thread with an event loop of its own."""

    def __init__(self, site: Site, run: RunFolder) -> None:
        book = HolderBook if site.relays_give else SourcesOnly
        self.loop = asyncio.new_event_loop()
        self._up, self._stop = threading.Event(), asyncio.Event()
        self._run, self._book = run, book
        self._thread = threading.Thread(target=self.loop.run_until_complete, args=(self._serve(),))
        self._thread.start()
        if not self._up.wait(LIMIT_S):
            raise SystemExit("the directory of holders did not come up")

    async def _serve(self) -> None:
        self.book = self._book(Directory(), EventList(), Changes())
        routes: list[web.RouteDef] = HolderRoutes(self.book).table()
        self.url, runner = await start(make_app(TOKEN, routes))
        self._run.register("serving", self.url)
        self.http = aiohttp.ClientSession()
        self._up.set()
        await self._stop.wait()
        await self.http.close()
        await runner.cleanup()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(LIMIT_S)
        self.loop.close()


class Holders:
    """A trainer rank with its source, and `receivers` relays."""

    def __init__(self, site: Site, receivers: int) -> None:
        self._site = site
        self._run = RunFolder(site.folder)
        self._directories = Directories(site, self._run)
        self._source = Source(self._run, site.weights, 0, 0, TOKEN)
        self._offers = Offers(self._source, GroupLink(), site.folder, 1 << 28)
        self._relays = [self._start_relay(index) for index in range(receivers)]
        self._step = 0

    def _start_relay(self, index: int) -> tuple[HolderSettings, process.Child]:
        settings = HolderSettings(
            f"relay-{index}",
            "relay",
            RUN_ID,
            self._site.weights,
            ProcessId.current(),
            serving_url=self._directories.url,
        )
        log = self._site.folder / f"relay-{index}.log"
        return settings, launch.start(settings, token=TOKEN, log=log, env=dict(os.environ))

    def _url(self, settings: HolderSettings) -> str:
        end = time.monotonic() + LIMIT_S
        while (found := launch.address(settings)) is None:
            if time.monotonic() > end:
                raise SystemExit(f"{settings.name} did not come up")
            time.sleep(POLL_S)
        return found.url

    def offer(self) -> Offering:
        """A new version, held by the source and known to the directory."""
        self._step += 1
        time.sleep(BETWEEN_S)
        began = time.monotonic()
        offered = self._offers.offer(self._site.tensors, self._key, patient=False)
        copied = time.monotonic()
        if offered != Offered() or (problem := self._offers.settle()):
            raise SystemExit(f"not offered: {offered} {problem}")
        return Offering(copied - began, time.monotonic() - copied)

    @property
    def _key(self) -> Key:
        return Key(self._step, f"{self._step:032x}")

    def send(self) -> tuple[Sample, Offering]:
        """One version to all relays, each byte checked by each."""
        urls = [self._url(settings) for settings, _ in self._relays]
        offering = self.offer()
        done = asyncio.run_coroutine_threadsafe(self._fetch_all(urls), self._directories.loop)
        return done.result(LIMIT_S), offering

    async def _fetch_all(self, urls: list[str]) -> Sample:
        image = self._offers.image(self._site.tensors)
        self._directories.book.want(self._key, image.layout_digest, image.nbytes)
        began, done = time.monotonic(), []

        async def fetch(url: str) -> None:
            client = HolderClient(self._directories.http, url, TOKEN)
            await client.fetch(self._key, image.layout_digest, image.nbytes, LIMIT_S)
            done.append(time.monotonic())

        await asyncio.gather(*(fetch(url) for url in urls))
        return Sample(min(done) - began, max(done) - began)

    def hop(self) -> Sample:
        """One version from the first relay, which has it from the source, to the second."""
        urls = [self._url(settings) for settings, _ in self._relays[:2]]
        self.offer()
        for url in urls:
            done = asyncio.run_coroutine_threadsafe(self._fetch_all([url]), self._directories.loop)
            sample = done.result(LIMIT_S)
        return sample

    def close(self) -> None:
        for _, child in self._relays:
            child.end()
        self._offers.close()
        self._directories.close()
        remove_run(self._site.weights.memory_folder, RUN_ID)


@contextmanager
def holders(site: Site, receivers: int) -> Iterator[Holders]:
    made = Holders(site, receivers)
    try:
        yield made
    finally:
        made.close()


def measure_hops(site: Site, repeats: int) -> list[Sample]:
    """As `measure`, from relay to relay: no manifest is made."""
    with holders(site, 2) as made:
        return [made.hop() for _ in range(repeats + 2)][2:]


def measure(site: Site, receivers: int, repeats: int) -> tuple[list[Sample], list[Offering]]:
    """The first two, which find new memory, are left out."""
    with holders(site, receivers) as made:
        found = [made.send() for _ in range(repeats + 2)][2:]
    return [sample for sample, _ in found], [offering for _, offering in found]
