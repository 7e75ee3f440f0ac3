"""The relays beside the engines of this node: kept up, and kept at the newest version."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from torchtitan_rl_ft.config.weights import WeightsSection
from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.observability.events import EventSink, Kind
from torchtitan_rl_ft.run_folder import ProcessId, RunFolder
from torchtitan_rl_ft.serving.changes import Changes
from torchtitan_rl_ft.serving.directory import Wanted
from torchtitan_rl_ft.serving.holder_book import LOOK_S, HolderBook
from torchtitan_rl_ft.serving.kept_child import KeptChild
from torchtitan_rl_ft.weights.holder import launch
from torchtitan_rl_ft.weights.holder.client import SUPERSEDED, Fetched, HolderClient, HolderError
from torchtitan_rl_ft.weights.holder.leftovers import remove_leftovers, remove_run
from torchtitan_rl_ft.weights.holder.settings import HolderSettings, Key, user_memory
from torchtitan_rl_ft.weights.manifest import WeightsInvalid
from torchtitan_rl_ft.weights.transports.base import (
    Release,
    ReleaseSuperseded,
    TransportFailed,
    WeightsLost,
)

START_LIMIT_S = 30.0
SILENT_LIMIT_S = 15.0
"""A relay that tells nothing for so long is replaced: it may be stopped or stuck."""

LOST_S = 8.0
"""A version that nobody could give for so long is lost: longer than a holder needs to be started
again and to tell what it has."""

TELLS_WHY_S = 2.0
"""Of the time for a version: a relay that does not get it has to say why before that is over."""

RETRY_S = 0.2
LONGEST_RETRY_S = 5.0

REFUSED = frozenset({400, 422})
"""What a relay answers when the version is not what was announced: no other try helps."""


@dataclass(frozen=True)
class RelaySetup:
    """`run_id` names the relays' memory; it stays when serving is started anew, and what they held
    is still there, while the process that `owner` names lives. `token` is the run's."""

    weights: WeightsSection
    run_id: str
    token: str
    owner: Callable[[], ProcessId]
    start: launch.Start = launch.start


@dataclass(frozen=True)
class Site:
    """What the relays of a serving role have in common."""

    setup: RelaySetup
    folder: Callable[[], RunFolder]
    events: EventSink
    http: aiohttp.ClientSession
    changes: Changes
    book: HolderBook
    clock: Callable[[], float] = time.monotonic

    @property
    def weights(self) -> WeightsSection:
        return self.setup.weights


class Relay:
    """One relay, whatever process it is at the moment."""

    def __init__(self, index: int, site: Site) -> None:
        self.index, self.name = index, f"relay-{index}"
        self._site = site
        self._kept = KeptChild(
            self.name,
            f"{self.name} (weights.holders)",
            site.folder,
            site.events,
            self,
            site.clock,
        )
        self._url: str | None = None
        self._serving_url = ""
        self._distrusted = False
        self._fetching = asyncio.Lock()
        self._held: dict[Key, Fetched] = {}
        self.invalid: dict[Key, str] = {}
        """Versions that are not what was announced, as it has said."""

        self.problem = ""
        """Why the last fetch failed; empty after one that did not."""

        self.failing: Key | None = None
        """The version of which that was one."""

    async def run(self, serving_url: str) -> None:
        """Keep it up, and at the newest version, until cancelled. Raises ChildFailed."""
        self._serving_url = serving_url
        following = asyncio.create_task(self._follow(), name=self.name)
        kept = asyncio.create_task(self._kept.run())
        try:
            await asyncio.wait({following, kept}, return_when=asyncio.FIRST_COMPLETED)
            for task in (following, kept):
                if task.done():
                    task.result()
        finally:
            for task in (following, kept):
                task.cancel()
            await asyncio.gather(following, kept, return_exceptions=True)

    # Process --------------------------------------------------------------------------------

    @property
    def settings(self) -> HolderSettings:
        return HolderSettings(
            self.name,
            "relay",
            self._site.setup.run_id,
            self._site.weights,
            self._site.setup.owner(),
            serving_url=self._serving_url,
        )

    def start(self, log: Path) -> process.Child:
        """Raises OSError."""
        if self._distrusted:
            self._distrusted = False
            shutil.rmtree(self.settings.folder, ignore_errors=True)
        setup = self._site.setup
        return setup.start(
            self.settings, token=setup.token, log=log, env=launch.environment(os.environ)
        )

    async def attend(self, child: process.Child) -> str:
        """Ready at its first report; why it has to be replaced."""
        site = self._site
        end = site.clock() + START_LIMIT_S
        while (found := site.book.found(self.name, child.pid)) is None:
            if site.clock() >= end:
                return f"told nothing within {START_LIMIT_S:g} s"
            await site.changes.next(LOOK_S)
        self._url = found[0]
        site.events.emit(Kind.READY, subject=self.name, url=self._url)
        site.changes.notify()
        while found is not None and found[1] <= SILENT_LIMIT_S:
            self._url = found[0]
            await asyncio.sleep(LOOK_S)
            found = site.book.found(self.name, child.pid)
        return f"told nothing for {SILENT_LIMIT_S:g} s"

    def let_go(self) -> None:
        self._url, self._held = None, {}
        self._site.book.gone(self.name)

    def distrust(self) -> None:
        """What it holds is not what it should be: a new process gets it anew."""
        if (child := self._kept.child) is not None:
            self._distrusted = True
            process.kill(child.id)

    # Versions -------------------------------------------------------------------------------

    def holds(self, key: Key) -> Fetched | None:
        """What it said of a version that it has been asked for in this life of its process, and
        that it has by its last report: it gives up what is not needed any more."""
        return self._held.get(key) if key in self._site.book.held(self.name) else None

    async def fetch(
        self, wanted: Wanted, deadline_s: float, manifest_digest: str | None = None
    ) -> Fetched:
        """Have it hold a version, whole and checked, in whichever of its lives. Again: cheap.

        Raises TransportFailed, ReleaseSuperseded, WeightsLost, WeightsInvalid.
        """
        end = self._site.clock() + deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                if self.holds(wanted.key) is not None:  # whatever it is getting now
                    return await self._fetch(wanted, end, manifest_digest)
                async with self._fetching:
                    return await self._fetch(wanted, end, manifest_digest)
        except TimeoutError:
            raise TransportFailed(
                f"{self.name} did not get {wanted.key} within {deadline_s:g} s: "
                f"{self.problem or 'busy with another version'}"
            ) from None

    async def bring(self, release: Release, deadline_s: float) -> Path:
        """As `fetch`, of what has a number."""
        wanted = Wanted(Key(release.step, release.token), release.layout_digest, release.nbytes)
        return Path((await self.fetch(wanted, deadline_s, release.manifest_digest)).path)

    async def _fetch(self, wanted: Wanted, end: float, manifest_digest: str | None) -> Fetched:
        site, lost_at = self._site, math.inf
        while True:
            left_s = end - site.clock()
            if self._url is None:
                self._fails(wanted, f"{self.name} is not up")
                await site.changes.next(LOOK_S)
            else:
                client = HolderClient(site.http, self._url, site.setup.token)
                asking = asyncio.create_task(
                    client.fetch(
                        wanted.key,
                        wanted.layout_digest,
                        wanted.nbytes,
                        max(left_s - TELLS_WHY_S, left_s / 2),
                        manifest_digest,
                    )
                )
                try:
                    while not asking.done():
                        lost_at = self._lost_at(wanted, lost_at)
                        await asyncio.wait({asking}, timeout=LOOK_S)
                    return self._fetched(wanted, asking.result())
                except HolderError as e:
                    self._refused(wanted, e)
                    if end - site.clock() < TELLS_WHY_S:  # too little for another try
                        raise TransportFailed(self.problem) from e
                    await asyncio.sleep(RETRY_S)
                finally:
                    asking.cancel()
            lost_at = self._lost_at(wanted, lost_at)

    def _lost_at(self, wanted: Wanted, lost_at: float) -> float:
        """When the version is given up; infinite while somebody has it. Raises WeightsLost."""
        if not self._site.book.is_lost(wanted.key, self.name):
            return math.inf
        if (now := self._site.clock()) >= lost_at:
            raise WeightsLost(f"no holder has {wanted.key} any more")
        return min(lost_at, now + LOST_S)

    def _refused(self, wanted: Wanted, error: HolderError) -> None:
        """Raises ReleaseSuperseded, WeightsInvalid."""
        if error.status == SUPERSEDED:
            raise ReleaseSuperseded(f"{wanted.key} is superseded") from error
        self._fails(wanted, f"{self.name}: {error}")
        if error.status in REFUSED:
            self.invalid[wanted.key] = self.problem
            raise WeightsInvalid(self.problem) from error

    def _fails(self, wanted: Wanted, problem: str) -> None:
        if (self.problem, self.failing) != (problem, wanted.key):
            self.problem, self.failing = problem, wanted.key
            self._site.changes.notify()

    def _fetched(self, wanted: Wanted, fetched: Fetched) -> Fetched:
        self.problem, self.failing = "", None
        self.invalid.pop(wanted.key, None)
        if wanted.key not in self._held:
            self._site.events.emit(
                Kind.FETCH,
                step=wanted.key.step,
                subject=self.name,
                seconds=fetched.seconds,
                nbytes=wanted.nbytes,
                bytes_from=fetched.bytes_from,
            )
        there = self._site.book.held(self.name)
        self._held = {k: f for k, f in self._held.items() if k in there} | {wanted.key: fetched}
        self._site.changes.notify()
        return fetched

    async def _follow(self) -> None:
        """Get each version that becomes the newest wanted one, also in a new process. Failures are
        told once for each version, and tried again."""
        site, told, pause_s = self._site, None, RETRY_S
        while True:
            await site.changes.wait_until(lambda: self._lacks() is not None, math.inf)
            if (wanted := self._lacks()) is None:
                continue
            try:
                await self.fetch(wanted, site.weights.fetch_timeout_s)
                pause_s = RETRY_S
            except ReleaseSuperseded:
                pause_s = RETRY_S
            except (TransportFailed, WeightsInvalid) as e:
                if told != wanted.key:
                    told, cause = wanted.key, f"{self.name} has not got {wanted.key}: {e}"
                    site.events.emit(
                        Kind.WARN, cause=cause, step=wanted.key.step, subject=self.name
                    )
                pause_s = min(2 * pause_s, LONGEST_RETRY_S)
            await asyncio.sleep(pause_s)

    def _lacks(self) -> Wanted | None:
        newest = self._site.book.newest
        return newest if newest is not None and self.holds(newest.key) is None else None

    def to_json(self) -> dict[str, Any]:
        child = self._kept.child
        return {
            "name": self.name,
            "url": self._url,
            "pid": child.id.pid if child is not None else None,
            "start_time": child.id.start_time if child is not None else None,
            "log": str(child.log) if child is not None else None,
            "restarts": max(0, self._kept.starts - 1),
            "holds": sorted(key.step for key in self._held if self.holds(key) is not None),
            "problem": self.problem,
        }


class Relays:
    """`weights.holders` of them; engine n belongs to relay n mod holders."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._relays = [Relay(i, site) for i in range(site.weights.holders)]

    @property
    def book(self) -> HolderBook:
        return self.site.book

    def of_engine(self, slot: int) -> Relay:
        return self._relays[slot % len(self._relays)]

    async def run(self, serving_url: str) -> None:
        """Until cancelled; then their memory is free. Raises ChildFailed."""
        running = [asyncio.create_task(r.run(serving_url)) for r in self._relays]
        try:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in running:
                if task.done():
                    task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def remove_memory(self) -> None:
        """Of relays that have ended for good, and of sources whose job was killed."""
        memory_folder = self.site.weights.memory_folder
        remove_run(memory_folder, self.site.setup.run_id)
        remove_leftovers(user_memory(memory_folder))

    def holding(self, key: Key) -> dict[str, Fetched]:
        """Relays that hold a version, by name."""
        found = {r.name: r.holds(key) for r in self._relays}
        return {name: fetched for name, fetched in found.items() if fetched is not None}

    def distrust(self, key: Key, path: Path) -> None:
        """What is in `path`, where a relay holds it, is damaged: that one gets it anew."""
        for relay in self._relays:
            if (held := relay.holds(key)) is not None and Path(held.path) == path:
                relay.distrust()

    async def first(self, key: Key, deadline_s: float) -> Fetched:
        """As soon as a relay holds it; it is the newest wanted one. Raises TransportFailed,
        WeightsLost, WeightsInvalid when it is not what was announced."""
        clock = self.site.clock
        end, lost_at = clock() + deadline_s, math.inf
        for relay in self._relays:
            relay.invalid.pop(key, None)
        while not (holding := self.holding(key)):
            now = clock()
            if now >= end:
                problems = "; ".join(r.problem for r in self._relays if r.problem)
                raise TransportFailed(
                    f"no relay got {key} within {deadline_s:g} s: {problems or 'they are at it'}"
                )
            if all(key in r.invalid for r in self._relays):
                raise WeightsInvalid(self._relays[0].invalid[key])
            if not all(self.book.is_lost(key, r.name) for r in self._relays):
                lost_at = math.inf
            elif now >= lost_at:
                raise WeightsLost(f"no holder has {key}")
            else:
                lost_at = min(lost_at, now + LOST_S)
            await self.site.changes.next(LOOK_S)
        return next(iter(holding.values()))

    async def all(self, key: Key, deadline_s: float) -> list[str]:
        """Until all hold it but those that fail to get it, or a newer version is wanted, or the
        deadline is over. Returns who does."""

        def over() -> bool:
            newest = self.site.book.newest
            superseded = newest is not None and newest.key != key
            done = (r.holds(key) is not None or r.failing == key for r in self._relays)
            return superseded or all(done)

        await self.site.changes.wait_until(over, deadline_s)
        return sorted(self.holding(key))

    def to_json(self) -> list[dict[str, Any]]:
        return [relay.to_json() for relay in self._relays]
