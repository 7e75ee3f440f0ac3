"""What the serving role does: publish, generate, tell. The HTTP routes call it."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import aiohttp

from torchtitan_rl_ft.config.groups import engine_groups, takes_versions
from torchtitan_rl_ft.config.sections import EngineGroup, RolloutSection
from torchtitan_rl_ft.observability.events import EventSink, Kind
from torchtitan_rl_ft.run_folder import RunFolder
from torchtitan_rl_ft.serving.admission import Admission
from torchtitan_rl_ft.serving.adoption import Inheritance, inherit
from torchtitan_rl_ft.serving.changes import Changes
from torchtitan_rl_ft.serving.continuation import can_continue, stop_tokens
from torchtitan_rl_ft.serving.deregistration import Deregistration
from torchtitan_rl_ft.serving.directory import Directory
from torchtitan_rl_ft.serving.duties import Duty
from torchtitan_rl_ft.serving.engine_process import end_recorded
from torchtitan_rl_ft.serving.engine_records import EngineRecords
from torchtitan_rl_ft.serving.gateway import Gateway, GatewayProgram, smg_program
from torchtitan_rl_ft.serving.groups import GroupUnknown, chosen, slot_plans
from torchtitan_rl_ft.serving.health_times import HealthTimes, limits_of
from torchtitan_rl_ft.serving.held_versions import highest_held
from torchtitan_rl_ft.serving.holder_book import HolderBook
from torchtitan_rl_ft.serving.launch import Launcher
from torchtitan_rl_ft.serving.lending import Lending
from torchtitan_rl_ft.serving.loans import FILE_NAME as LOANS_FILE
from torchtitan_rl_ft.serving.loans import Loans
from torchtitan_rl_ft.serving.pool import EnginePool, PoolFailed
from torchtitan_rl_ft.serving.prober import Prober
from torchtitan_rl_ft.serving.progress import Progress
from torchtitan_rl_ft.serving.relays import Relays, RelaySetup, Site
from torchtitan_rl_ft.serving.releases import Announcement, Releases
from torchtitan_rl_ft.serving.requests import GenerateRequest, RequestRejected
from torchtitan_rl_ft.serving.router import Router
from torchtitan_rl_ft.serving.samples import FROZEN_VERSION, Sample
from torchtitan_rl_ft.serving.shared import Shared, Target
from torchtitan_rl_ft.weights.installer import Installer
from torchtitan_rl_ft.weights.manifest import WeightsInvalid, checkpoint_manifest
from torchtitan_rl_ft.weights.proof import derive_proof
from torchtitan_rl_ft.weights.reading import read_in_thread
from torchtitan_rl_ft.weights.transports.base import Release, WeightTransport
from torchtitan_rl_ft.weights.transports.nixl import NixlTransport

MAX_SEED = 2**31 - 1


class NotColocated(Exception):
    """There is no memory to be given up."""


class ServingService:
    """Owns the engines and the policy versions of one run. Lives in one event loop."""

    def __init__(
        self,
        rollout: RolloutSection,
        folder: RunFolder,
        events: EventSink,
        launcher: Launcher,
        http: aiohttp.ClientSession,
        transport: WeightTransport,
        *,
        engines_file: Path | None = None,
        relays: RelaySetup | None = None,
        gateway_program: GatewayProgram = smg_program,
        randomness: random.Random | None = None,
    ) -> None:
        """`engines_file`: where engines are recorded; None: in the run folder. `relays`: weights
        come from holders too; else from `transport` alone."""
        self._rollout, self._events, self._launcher = rollout, events, launcher
        self._groups = engine_groups(rollout)
        self._random = randomness or random.SystemRandom()
        self._vocabularies = {g.name: _vocabulary(launcher.model_path(g)) for g in self._groups}
        self.admission = Admission()
        self._changes = Changes()
        self._gateway_runs: list[asyncio.Task[None]] = []
        self._relay_runs: list[asyncio.Task[None]] = []
        self._frozen: list[asyncio.Task[None]] = []
        self._closing: asyncio.Task[None] | None = None
        self._records = EngineRecords(engines_file or folder.path / "serving" / "engines.json")
        plans = slot_plans(rollout)
        self._shared = Shared(
            rollout=rollout,
            plans=plans,
            folder=folder,
            events=events,
            launcher=launcher,
            http=http,
            installers={},
            prober=Prober(
                limits_of(rollout),
                events,
            ),
            records=self._records,
            changes=self._changes,
            deregistration=Deregistration(events),
        )
        self.pool = EnginePool(self._shared)
        self._loans = Loans(self._records.path.with_name(LOANS_FILE))
        self.lending = Lending(self.pool.slots, self._shared, self._loans)
        self.relays = self._make_relays(relays) if relays is not None else None
        self._releases = Releases(self._shared, self.pool, self.relays)
        if self.relays is not None:
            self.relays.book.needed = self._releases.needed
        self._shared.installers = {p.slot: self._installer(p.slot, transport) for p in plans}
        self.gateway = self._make_gateway(gateway_program) if rollout.router == "smg" else None
        self._router = Router(
            self.pool,
            self._changes,
            events,
            rollout.request_timeout_s,
            rollout.stream_interval_tokens,
            {g.name: stop_tokens(launcher.model_path(g)) for g in self._groups},
            self.gateway,
        )

    def _make_relays(self, setup: RelaySetup) -> Relays:
        shared = self._shared
        book = HolderBook(Directory(setup.weights.fetch_timeout_s), shared.events, shared.changes)
        return Relays(
            Site(setup, lambda: shared.folder, shared.events, shared.http, shared.changes, book)
        )

    def _installer(self, slot: int, transport: WeightTransport) -> Installer:
        if self.relays is not None:
            transport = NixlTransport(self.relays.of_engine(slot))
        return Installer(transport, self._rollout.pause_mode, self._rollout.install_timeout_s)

    def _make_gateway(self, program: GatewayProgram) -> Gateway:
        """In front of the engines of the policy."""
        shared, pool = self._shared, self.pool
        gateway = Gateway(
            lambda: shared.folder,
            shared.events,
            shared.http,
            shared.changes,
            lambda: pool.serving(shared.version),
            program,
        )
        pool.on_deregister(gateway.forget)
        return gateway

    # Life -----------------------------------------------------------------------------------

    async def open(self, attempt: str = "") -> None:
        """Take over what an earlier serving role of this run left, and start what is missing.
        Engines take the newest published version as soon as they are up. `attempt` is the job
        that owns the session: places that another has are taken back. Raises RecordsCorrupt,
        LoansCorrupt."""
        await self._releases.open()
        self._frozen = [
            asyncio.create_task(self._require_frozen(g))
            for g in self._groups
            if not takes_versions(g)
        ]
        if self.gateway is not None:
            self._gateway_runs = [asyncio.create_task(self.gateway.run())]
        loans = self._loans.read()
        found = await self._inherit(loans)
        held = await highest_held(self._shared.http, found.adopted.values())
        await self._releases.number_above(held)
        self.pool.open(found.adopted, memory_lent=found.memory_lent, loans=loans)
        await self.lending.reclaim(attempt)

    def open_relays(self, url: str) -> None:
        """Start them, and get back what an earlier serving role had in memory. They report to
        `url`, where this role answers now."""
        runs = [self._releases.restore()]
        if self.relays is not None:
            runs.append(self.relays.run(url))
        self._relay_runs = [asyncio.create_task(run) for run in runs]

    async def save_records(self) -> None:
        """Write down again what engines hold: somebody has removed it. Raises OSError."""
        await asyncio.to_thread(self._records.save)
        await asyncio.to_thread(self._loans.save)

    async def _inherit(self, lent: Container[int]) -> Inheritance:
        """Living engines that fit are adopted. The others are ended."""
        slots = [s.index for s in self.pool.slots if s.duty is not Duty.EXTERNAL]
        fingerprints = {i: self._shared.launcher.fingerprint(i) for i in slots}
        found = inherit(self._records.read(), fingerprints, lent)
        deadline = time.monotonic() + self._rollout.cleanup_timeout
        ends = (end_recorded(record, deadline) for record, _ in found.rejected)
        for (record, reason), pids in zip(found.rejected, await asyncio.gather(*ends), strict=True):
            cause = f"engine {record.slot} of an earlier serving is not taken over: {reason}"
            self._events.emit(Kind.WARN, cause=cause, ended=pids)
        await asyncio.to_thread(self._records.keep, found.adopted.values())
        return found

    async def _require_frozen(self, group: EngineGroup) -> None:
        """Have the engines of a frozen group show their checkpoint. It may take as long to read
        as they take to start. Raises PoolFailed."""
        path, layout = self._launcher.model_path(group), self._launcher.layout(group)
        limit_s = self._rollout.engine_start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                manifest = await read_in_thread(checkpoint_manifest, path)
                proof = await read_in_thread(derive_proof, path, manifest, layout)
        except TimeoutError:
            reason = f"group {group.name}: {path} was not read within {limit_s:g} s"
            raise PoolFailed(f"{reason} (rollout.engine_start_timeout_s)", never_up=True) from None
        except (WeightsInvalid, OSError, ValueError) as e:
            raise PoolFailed(f"group {group.name}: {e}", never_up=True) from e
        own = Release(FROZEN_VERSION, 0, "", str(path), manifest.digest)
        self.pool.require({group.name: Target(own, proof)})

    async def release(self, timeout_s: float) -> list[int]:
        """Colocated engines give their memory up, until the next publish, or until somebody asks
        for a sample. Returns the slots that did. Raises NotColocated, ReleaseFailed."""
        if self._rollout.placement != "colocated":
            raise NotColocated(
                'engines share no devices with the trainer: rollout.placement is "separate"'
            )
        return await self.pool.lend_memory(timeout_s)

    def devices(self, slot: int) -> list[int]:
        """Numbers of a slot's accelerators on this node; none on a CPU."""
        return self._launcher.devices(slot)

    async def close(self) -> None:
        """End all engines. Several may ask for it: it is done once, and awaited by all."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        for task in self._frozen:
            task.cancel()
        await self.pool.close()
        for task in (*self._gateway_runs, *self._relay_runs):  # engines leave the list first
            task.cancel()
        await asyncio.gather(*self._gateway_runs, *self._relay_runs, return_exceptions=True)
        if self.relays is not None:
            await asyncio.to_thread(self.relays.remove_memory)

    async def run_until_failed(self) -> None:
        """Raises PoolFailed, ChildFailed."""
        failing = asyncio.create_task(self.pool.run_until_failed())
        running = {failing, *self._frozen, *self._gateway_runs, *self._relay_runs}
        try:
            while True:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if not task.cancelled():  # by `close`, which is no failure
                        task.result()
        finally:
            failing.cancel()

    # Versions -------------------------------------------------------------------------------

    async def move(self, folder: RunFolder) -> None:
        """Go on in another run folder: the next version is above those of both."""
        await self._releases.move(folder)

    def judge_by(self, health: HealthTimes) -> None:
        """Take the health times of another job."""
        changed = replace(self._rollout, **asdict(health))
        self._rollout = self._shared.rollout = changed
        self._shared.prober.judge_by(limits_of(changed))

    def continue_above(self, earlier: RunFolder) -> None:
        """As `move`, after a serving role that worked in `earlier` and has died."""
        self._releases.continue_above(earlier)

    @property
    def version(self) -> int:
        """The version that engines are required to hold; 0 before the first publish."""
        return self._release.version if self._release is not None else 0

    @property
    def _release(self) -> Release | None:
        """The required one, or the one that is to be it again."""
        target = self.pool.target
        return target.release if target is not None else self._releases.restoring

    @property
    def awaits_publish(self) -> str | None:
        """Why the trainer's last publish is wanted again, or None."""
        if (damaged := self.pool.damaged) is not None:
            return f"damaged version {damaged}"
        if (lost := self._releases.lost) is not None:
            return f"lost version {lost}"
        return None

    async def publish_image(
        self,
        asked: Announcement,
        wait: str,
        wait_relays: str,
        deadline_s: float,
    ) -> tuple[int, list[int], list[str]]:
        """As `publish`, of a state that holders have. Once a relay holds it, the answer may come;
        with `wait_relays` "all" once all do. Returns the names of those that do, too."""
        end = time.monotonic() + deadline_s
        version, _ = await self._publish(asked, "none", deadline_s)
        assert self.relays is not None
        if wait_relays == "all":
            await self.relays.all(asked.key, end - time.monotonic())
        slots = await self._installed(version, wait, end)
        return version, slots, sorted(self.relays.holding(asked.key))

    async def publish(
        self,
        step: int,
        token: str,
        path: Path,
        manifest_digest: str,
        wait: str,
        deadline_s: float,
        permit: Callable[[], None] = lambda: None,
    ) -> tuple[int, list[int]]:
        """Give the state (step, token) a version and have all engines take it.

        Returns the version and the slots that serve it once `wait` is met ("none": at once,
        "first": one engine, "all": every live engine) or `deadline_s` is over. The same state
        gets the same version. `permit` raises when the caller may not publish any more. Raises
        PublishRefused, PublishLate, and what `permit` raises.
        """
        asked = Announcement(step, token, path, manifest_digest, permit)
        return await self._publish(asked, wait, deadline_s)

    async def _publish(
        self, asked: Announcement, wait: str, deadline_s: float
    ) -> tuple[int, list[int]]:
        end = time.monotonic() + deadline_s
        version = (await self._releases.release(asked, deadline_s)).release.version
        return version, await self._installed(version, wait, end)

    async def _installed(self, version: int, wait: str, end: float) -> list[int]:
        """The slots that serve it once `wait` is met, or at `end`."""
        if wait == "first":
            await self._changes.wait_until(
                lambda: bool(self.pool.serving(version)), end - time.monotonic()
            )
        elif wait == "all":
            await self._changes.wait_until(
                lambda: self._superseded(version) or self.pool.all_current(version),
                end - time.monotonic(),
            )
        return sorted(e.slot for e in self.pool.serving(version))

    def _superseded(self, version: int) -> bool:
        target = self.pool.target
        return target is not None and target.release.version > version

    async def wait_version(self, after: int, timeout_s: float) -> dict[str, Any]:
        """The present version once it is above `after` and served, or at the timeout."""

        def served() -> bool:
            target = self.pool.target
            return (
                target is not None
                and target.release.version > after
                and self.pool.answering(target.release.version) > 0
            )

        await self._changes.wait_until(served, timeout_s)
        if (release := self._release) is None:
            return {"version": 0, "step": None, "token": None, "serving": 0}
        return {
            "version": release.version,
            "step": release.step,
            "token": release.token,
            "serving": self.pool.answering(release.version),
        }

    # Health ---------------------------------------------------------------------------------

    async def check(self, timeout_s: float) -> dict[str, Any]:
        """Verdicts on all engines that serve, now: what /v1/check answers."""
        checked, retired = await self.pool.check(timeout_s)
        return {"checked": checked, "retired": retired}

    # Generation -----------------------------------------------------------------------------

    @property
    def stream_interval_tokens(self) -> int:
        return self._rollout.stream_interval_tokens

    async def generate(
        self, request: GenerateRequest, progress: Progress | None = None
    ) -> list[Sample]:
        """`progress` shows what there is of the samples as it comes. Raises RequestRejected,
        RequestFailed."""
        try:
            groups = chosen(self._groups, request.group)
        except GroupUnknown as e:
            raise RequestRejected(str(e)) from e
        vocabulary = min(self._vocabularies[g.name] for g in groups)
        self._check_tokens(request.input_ids, vocabulary)
        if request.held:
            self._check_held(request, vocabulary, groups)
        # Its owner has done with the batch, which the trainer refused: another one is wanted.
        self.pool.take_memory_back()
        if not self._rollout.external_urls and not all(self._launcher.seeded(g) for g in groups):
            request = replace(request, seeds=None)
        elif request.seeds is None:
            # An engine that honours seeds, as those of others may, gives every request without one
            # the same seed.
            seeds = [self._random.randint(0, MAX_SEED) for _ in range(request.n)]
            request = replace(request, seeds=seeds)
        return await self._router.generate(request, progress)

    def _check_held(
        self, request: GenerateRequest, vocabulary: int, groups: Sequence[EngineGroup]
    ) -> None:
        """Whether the caller's part of each sample can go on."""
        if not can_continue(request.sampling):
            raise RequestRejected("samples drawn like this cannot go on from held tokens")
        if not all(takes_versions(g) for g in groups):
            raise RequestRejected("held tokens are of the policy")
        for held in request.held:
            if held.output_ids:
                self._check_tokens(held.output_ids, vocabulary)

    def _check_tokens(self, tokens: Sequence[int], vocabulary: int) -> None:
        """A token outside the vocabulary ends SGLang's scheduler on a CPU."""
        if not tokens:
            raise RequestRejected("input_ids is empty")
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= vocabulary:
            raise RequestRejected(
                f"input_ids has token {low if low < 0 else high}; the model's vocabulary is "
                f"0..{vocabulary - 1}"
            )

    # Status ---------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        target, release = self.pool.target, self._release
        return {
            "version": self.version,
            "step": release.step if release is not None else None,
            "proof": target.proof.kind if target is not None else None,
            "groups": self.pool.groups(),
            "gateway": self.gateway.to_json() if self.gateway is not None else None,
            "transport": "disk" if self.relays is None else "nixl",
            "relays": [] if self.relays is None else self.relays.to_json(),
            "engines": [slot.to_json() for slot in self.pool.slots],
            "in_flight": sum(e.in_flight for e in self.pool.engines),
            "drawn_tokens": self._router.drawn_tokens,
            "wasted_tokens": self._router.wasted_tokens,
            "continued_tokens": self._router.continued_tokens,
        }


def _vocabulary(model_path: Path) -> int:
    """Number of tokens of the model in `model_path`. Raises OSError, ValueError, KeyError."""
    return int(json.loads((model_path / "config.json").read_bytes())["vocab_size"])
