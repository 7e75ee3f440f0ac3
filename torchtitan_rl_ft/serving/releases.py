"""States of the trainer become versions of the policy, and what engines are required to hold."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torchtitan_rl_ft.config.groups import engine_groups, takes_versions
from torchtitan_rl_ft.observability.events import Kind
from torchtitan_rl_ft.run_folder import RunFolder
from torchtitan_rl_ft.serving.pool import EnginePool
from torchtitan_rl_ft.serving.relays import Relays
from torchtitan_rl_ft.serving.shared import Shared, Target
from torchtitan_rl_ft.serving.versions import VersionStore
from torchtitan_rl_ft.weights.holder.settings import Key
from torchtitan_rl_ft.weights.image import Image
from torchtitan_rl_ft.weights.manifest import Manifest, WeightsInvalid, WeightsNotFinite
from torchtitan_rl_ft.weights.proof import Proof, make_proofs
from torchtitan_rl_ft.weights.reading import read_in_thread
from torchtitan_rl_ft.weights.transports.base import Release, TransportFailed, WeightsLost


class PublishRefused(Exception):
    """The weights are not what was announced, or not of this model. Nothing has changed."""


class PublishLate(Exception):
    """The weights could not be read and noted in time. That goes on; ask again."""


@dataclass(frozen=True)
class Announcement:
    """Weights of a state of the trainer: a folder, or an image that holders have, of that layout
    and size. `permit` raises when its sender may not publish any more: reading takes its time."""

    step: int
    token: str
    path: Path | None
    manifest_digest: str
    permit: Callable[[], None]
    layout_digest: str = ""
    nbytes: int = 0

    @property
    def key(self) -> Key:
        return Key(self.step, self.token)

    @property
    def where(self) -> str:
        return "holders" if self.path is None else str(self.path)


class _Book:
    """The versions of one run folder, and who may add to them now."""

    def __init__(self, folder: RunFolder) -> None:
        self.versions = VersionStore(folder.weights)
        self.lock = asyncio.Lock()


class Releases:
    """Lives in one event loop; file systems are waited for in threads."""

    def __init__(self, shared: Shared, pool: EnginePool, relays: Relays | None = None) -> None:
        """Without `relays` nothing is taken from holders. Raises VersionsCorrupt."""
        self._shared, self._pool, self._events = shared, pool, shared.events
        self._relays = relays
        self._groups = [g for g in engine_groups(shared.rollout) if takes_versions(g)]
        self._book = _Book(shared.folder)
        self._moving = asyncio.Lock()
        self._tasks: set[asyncio.Task[Target]] = set()
        self._shapes: dict[str, tuple[str, list[int]]] | None = None
        self._layout = ""  # of their image
        self._reading: Counter[Key] = Counter()
        self.restoring: Release | None = None
        """The newest version of an earlier serving role, as long as no relay holds it again."""

        self.lost: int | None = None
        """That version, once it is known that no holder has it any more."""

    async def open(self) -> None:
        """Require the newest version of an earlier serving role."""
        newest = self._book.versions.newest
        if newest is None:
            return
        if newest.transport == "nixl":
            self.restoring = newest  # relays come up later
            return
        try:
            self._pool.require(await self._targets(newest, Path(newest.path)))
        except (WeightsInvalid, OSError) as e:
            cause = f"version {newest.version} of an earlier serving cannot be used: {e}"
            self._events.emit(Kind.WARN, cause=cause, version=newest.version)

    async def restore(self) -> None:
        """Require the version that an earlier serving role had in memory, once a relay holds it
        again. When none can get it, it is wanted from the trainer again."""
        if (release := self.restoring) is None:
            return
        try:
            targets = await self._brought_back(release)
        except (WeightsInvalid, TransportFailed, OSError) as e:
            if self.restoring is release:
                self.lost = release.version
                cause = f"version {release.version} of an earlier serving cannot be used: {e}"
                self._events.emit(Kind.WARN, cause=cause, version=release.version)
                self._shared.changes.notify()
            return
        if self.restoring is release:
            self.restoring = None
            self._pool.require(targets)

    async def _brought_back(self, release: Release) -> dict[str, Target]:
        """Raises WeightsInvalid, TransportFailed, OSError."""
        if self._relays is None:
            raise WeightsLost("it was in the memory of relays, and there are none now")
        key = Key(release.step, release.token)
        self._relays.book.want(key, release.layout_digest, release.nbytes)
        fetched = await self._relays.first(key, self._shared.rollout.engine_start_timeout_s)
        with self._read(key):
            return await self._targets(release, Path(fetched.path))

    @contextlib.contextmanager
    def _read(self, key: Key) -> Iterator[None]:
        """Relays keep it meanwhile."""
        self._reading[key] += 1
        try:
            yield
        finally:
            self._reading[key] -= 1

    def needed(self) -> set[Key]:
        """Versions in the memory of relays that somebody reads, or that engines are to hold."""
        versions = {e.loading for e in self._pool.engines} | {self._shared.version}
        releases = (self._book.versions.of(v) for v in versions if v is not None)
        found = {Key(r.step, r.token) for r in releases if r is not None and not r.path}
        return found | {key for key, readers in self._reading.items() if readers}

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
                f"step {asked.step} is not announced after {deadline_s:g} s: reading {asked.where} "
                "takes longer"
            )
        return task.result()

    async def _release_alone(self, asked: Announcement) -> Target:
        book, path = self._book, asked.path
        if (present := self._present(asked, book)) is not None:
            return present
        with self._read(asked.key):
            if path is None:
                path = await self._fetched(asked)
            async with book.lock:
                return await self._release(asked, path, book)

    def _present(self, asked: Announcement, book: _Book) -> Target | None:
        """The target, when it is this state already, and whole."""
        known, present = book.versions.find(asked.step, asked.token), self._pool.target
        if known is None or present is None or known != present.release:
            return None
        return present if known.version != self._shared.damaged else None

    async def _fetched(self, asked: Announcement) -> Path:
        """The folder of the first relay that holds it. Raises PublishRefused, PublishLate, and
        what `permit` raises."""
        relays = self._relays
        if relays is None:
            raise PublishRefused(
                f"step {asked.step} not published: this serving has no relays, its "
                "rollout.weight_transport is disk: publish a folder (path)"
            )
        if self._layout and asked.layout_digest != self._layout:
            raise PublishRefused(
                f"step {asked.step} not published: its layout ({asked.layout_digest[:12]}) is not "
                f"that of earlier versions ({self._layout[:12]}): another model, or other dtypes"
            )
        asked.permit()
        relays.book.want(asked.key, asked.layout_digest, asked.nbytes)
        try:
            fetched = await relays.first(asked.key, relays.site.weights.fetch_timeout_s)
        except (TransportFailed, WeightsLost) as e:
            raise PublishLate(f"step {asked.step} not published yet: {e}") from e
        except WeightsInvalid as e:
            raise PublishRefused(f"step {asked.step} not published: {e}") from e
        return Path(fetched.path)

    def _released(self, task: asyncio.Task[Target]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Its caller may have gone.
            self._events.emit(Kind.WARN, cause=f"not published: {error}")

    async def _release(self, asked: Announcement, path: Path, book: _Book) -> Target:
        """The target for a state, new or the present one. Its weights are in `path`."""
        step, token = asked.step, asked.token
        if (present := self._present(asked, book)) is not None:
            return present
        self._check_newest(asked, book)
        known = book.versions.find(step, token)
        try:
            manifest, proofs = await read_in_thread(self._prove, path)
        except (WeightsInvalid, OSError, ValueError) as e:
            if asked.path is None and not isinstance(e, (WeightsNotFinite, ValueError)):
                assert self._relays is not None
                self._relays.distrust(asked.key, path)  # other holders may have it whole
                raise PublishLate(f"step {step} not published yet: {e}") from e
            raise PublishRefused(f"step {step} not published: {e}") from e
        if asked.manifest_digest and manifest.digest != asked.manifest_digest:
            raise PublishRefused(f"{path} holds another manifest than {asked.manifest_digest}")
        if (manifest.step, manifest.token) != (step, token):
            raise PublishRefused(
                f"{path} holds step {manifest.step} ({manifest.token}), not {step} ({token})"
            )
        self._check_shapes(manifest)
        if asked.path is None and asked.layout_digest != self._layout:
            raise PublishRefused(f"{path} holds another layout than {asked.layout_digest}")
        self._check_still(asked, book)
        # Durable writes leave the loop: a busy disk must not stop requests.
        release = await asyncio.to_thread(
            book.versions.add,
            step,
            token,
            asked.path,
            manifest.digest,
            asked.layout_digest,
            asked.nbytes,
        )
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
        self._events.emit(
            Kind.PUBLISH,
            step=step,
            version=release.version,
            path=str(path),
            proof=target.proof.kind,
            transport=release.transport,
        )
        self.restoring = self.lost = None
        self._pool.require(targets)
        await asyncio.to_thread(self._prune, book.versions)
        return target

    def _check_newest(self, asked: Announcement, book: _Book) -> None:
        """What was announced later, and was there sooner, stays the newest. Raises
        PublishRefused."""
        newest = self._relays.book.newest if self._relays is not None else None
        if asked.path is not None or newest is None or newest.key == asked.key:
            return
        if book.versions.find(*newest.key) is not None:
            raise PublishRefused(
                f"step {asked.step} not published: {newest.key} was announced later, and is there"
            )

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
            self._shapes, self._layout = shapes, Image(shapes).layout_digest
        for name in self._shapes.keys() | shapes.keys():
            if self._shapes.get(name) != shapes.get(name):
                raise PublishRefused(
                    f"step {manifest.step} not published: tensor {name} is {shapes.get(name)}, "
                    f"in earlier versions {self._shapes.get(name)}"
                )

    async def _targets(self, release: Release, path: Path) -> dict[str, Target]:
        """Of an earlier serving's release, which is in `path`. Raises WeightsInvalid, OSError."""
        limit_s = self._shared.rollout.engine_start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                manifest, proofs = await read_in_thread(self._prove, path)
        except TimeoutError:
            raise WeightsInvalid(f"{path} was not read within {limit_s:g} s") from None
        if manifest.digest != release.manifest_digest:
            raise WeightsInvalid(f"{path} holds another policy")
        self._check_shapes(manifest)
        return {group: Target(release, proof) for group, proof in proofs.items()}

    def _prune(self, versions: VersionStore) -> None:
        """Remove weights that no engine holds or loads."""
        needed = {v for e in self._pool.engines for v in (e.version, e.loading) if v is not None}
        versions.prune(needed)
