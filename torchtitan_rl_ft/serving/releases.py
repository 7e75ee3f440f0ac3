"""States of the trainer become versions of the policy, and what engines are required to hold."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torchtitan_rl_ft.config.groups import engine_groups, takes_versions
from torchtitan_rl_ft.observability.events import Kind
from torchtitan_rl_ft.run_folder import RunFolder
from torchtitan_rl_ft.serving.pool import EnginePool
from torchtitan_rl_ft.serving.shared import Shared, Target
from torchtitan_rl_ft.serving.versions import VersionStore
from torchtitan_rl_ft.weights.manifest import Manifest, WeightsInvalid
from torchtitan_rl_ft.weights.proof import Proof, make_proofs
from torchtitan_rl_ft.weights.reading import read_in_thread
from torchtitan_rl_ft.weights.transports.base import Release


class PublishRefused(Exception):
    """The weights are not what was announced, or not of this model. Nothing has changed."""


class PublishLate(Exception):
    """The weights could not be read and noted in time. That goes on; ask again."""


@dataclass(frozen=True)
class Announcement:
    """Weights of a state of the trainer. `permit` raises when its sender may not publish any
    more: reading takes its time."""

    step: int
    token: str
    path: Path
    manifest_digest: str
    permit: Callable[[], None]


class _Book:
    """The versions of one run folder, and who may add to them now."""

    def __init__(self, folder: RunFolder) -> None:
        self.versions = VersionStore(folder.weights)
        self.lock = asyncio.Lock()


class Releases:
    """Lives in one event loop; file systems are waited for in threads."""

    def __init__(self, shared: Shared, pool: EnginePool) -> None:
        """Raises VersionsCorrupt."""
        self._shared, self._pool, self._events = shared, pool, shared.events
        self._groups = [g for g in engine_groups(shared.rollout) if takes_versions(g)]
        self._book = _Book(shared.folder)
        self._moving = asyncio.Lock()
        self._tasks: set[asyncio.Task[Target]] = set()
        self._shapes: dict[str, tuple[str, list[int]]] | None = None

    async def open(self) -> None:
        """Require the newest version of an earlier serving role."""
        newest = self._book.versions.newest
        if newest is None:
            return
        try:
            self._pool.require(await self._targets(newest))
        except (WeightsInvalid, OSError) as e:
            cause = f"version {newest.version} of an earlier serving cannot be used: {e}"
            self._events.emit(Kind.WARN, cause=cause, version=newest.version)

    async def number_above(self, held: int) -> None:
        """No version is given out twice, also when the file of versions was lost."""
        if held >= self._book.versions.next:
            cause = f"an adopted engine holds version {held}, unknown here: numbers go on above it"
            self._events.emit(Kind.WARN, cause=cause, version=held)
            await asyncio.to_thread(self._book.versions.raise_to, held + 1)

    async def move(self, folder: RunFolder) -> None:
        """Go on in another run folder: the next version is above those of both. What is being
        read for the earlier one is not waited for, and gets no version."""
        async with self._moving:
            if folder.path == self._shared.folder.path:
                return
            book = await asyncio.to_thread(_Book, folder)
            while book.versions.next < self._book.versions.next:  # it may grow meanwhile
                await asyncio.to_thread(book.versions.raise_to, self._book.versions.next)
            self._book, self._shared.folder = book, folder

    def continue_above(self, earlier: RunFolder) -> None:
        """As `move`, after a serving role that worked in `earlier` and has died."""
        if earlier.path != self._shared.folder.path:
            self._book.versions.raise_to(VersionStore(earlier.weights).next)

    async def release(self, asked: Announcement, deadline_s: float) -> Target:
        """The target for a state, required of all engines. Raises PublishRefused, PublishLate,
        and what `permit` raises."""
        # A task of its own: a file system that hangs holds it up, not its caller, and what it
        # has begun is whole when the same state is announced again.
        task = asyncio.create_task(self._release_alone(asked))
        self._tasks.add(task)
        task.add_done_callback(self._released)
        await asyncio.wait({task}, timeout=deadline_s)
        if not task.done():
            raise PublishLate(
                f"step {asked.step} is not announced after {deadline_s:g} s: reading {asked.path} "
                "takes longer"
            )
        return task.result()

    async def _release_alone(self, asked: Announcement) -> Target:
        book = self._book
        async with book.lock:
            return await self._release(asked, book)

    def _released(self, task: asyncio.Task[Target]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Its caller may have gone.
            self._events.emit(Kind.WARN, cause=f"not published: {error}")

    async def _release(self, asked: Announcement, book: _Book) -> Target:
        """The target for a state, new or the present one."""
        step, token, path = asked.step, asked.token, asked.path
        known = book.versions.find(step, token)
        present = self._pool.target
        damaged = known is not None and known.version == self._shared.damaged
        if known is not None and present is not None and known == present.release and not damaged:
            return present
        try:
            manifest, proofs = await read_in_thread(self._prove, path)
        except (WeightsInvalid, OSError, ValueError) as e:
            raise PublishRefused(f"step {step} not published: {e}") from e
        if asked.manifest_digest and manifest.digest != asked.manifest_digest:
            raise PublishRefused(f"{path} holds another manifest than {asked.manifest_digest}")
        if (manifest.step, manifest.token) != (step, token):
            raise PublishRefused(
                f"{path} holds step {manifest.step} ({manifest.token}), not {step} ({token})"
            )
        self._check_shapes(manifest)
        self._check_still(asked, book)
        # Durable writes leave the loop: a busy disk must not stop requests.
        release = await asyncio.to_thread(book.versions.add, step, token, path, manifest.digest)
        self._check_still(asked, book)
        if known is not None:
            self._events.emit(
                Kind.WARN,
                cause=f"step {step} was version {known.version}; it is current again",
                step=step,
                version=release.version,
            )
        targets = {group: Target(release, proof) for group, proof in proofs.items()}
        target = next(iter(targets.values()))
        kind = target.proof.kind
        self._events.emit(
            Kind.PUBLISH, step=step, version=release.version, path=str(path), proof=kind
        )
        self._pool.require(targets)
        await asyncio.to_thread(self._prune, book.versions)
        return target

    def _check_still(self, asked: Announcement, book: _Book) -> None:
        """Raises what `permit` raises; PublishRefused when serving has moved: a number that the
        earlier folder gave is not unique any more."""
        asked.permit()
        if book is not self._book:
            raise PublishRefused(f"step {asked.step} not published: serving works for another job")

    def _prove(self, path: Path) -> tuple[Manifest, dict[str, Proof]]:
        """The proof of a published folder for each group that takes it; engines of one layout
        share one. Reads all weights. Raises WeightsInvalid, OSError."""
        layouts = {g.name: self._shared.launcher.layout(g) for g in self._groups}
        manifest, proofs = make_proofs(path, layouts.values())
        return manifest, {group: proofs[layout] for group, layout in layouts.items()}

    def _check_shapes(self, manifest: Manifest) -> None:
        """Every release has the tensors of the first one. Raises PublishRefused."""
        shapes = {name: (t.dtype, t.shape) for name, t in manifest.tensors.items()}
        if self._shapes is None:
            self._shapes = shapes
        for name in self._shapes.keys() | shapes.keys():
            if self._shapes.get(name) != shapes.get(name):
                raise PublishRefused(
                    f"step {manifest.step} not published: tensor {name} is {shapes.get(name)}, "
                    f"in earlier versions {self._shapes.get(name)}"
                )

    async def _targets(self, release: Release) -> dict[str, Target]:
        """Of an earlier serving's release. Raises WeightsInvalid, OSError."""
        limit_s = self._shared.rollout.engine_start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                manifest, proofs = await read_in_thread(self._prove, Path(release.path))
        except TimeoutError:
            raise WeightsInvalid(f"{release.path} was not read within {limit_s:g} s") from None
        if manifest.digest != release.manifest_digest:
            raise WeightsInvalid(f"{release.path} holds another policy")
        self._check_shapes(manifest)
        return {group: Target(release, proof) for group, proof in proofs.items()}

    def _prune(self, versions: VersionStore) -> None:
        """Remove weights that no engine holds or loads."""
        needed = {v for e in self._pool.engines for v in (e.version, e.loading) if v is not None}
        versions.prune(needed)
