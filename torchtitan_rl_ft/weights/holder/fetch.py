"""Getting a whole version, from whomever the directory names, as often as it takes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan_rl_ft.weights.assets import ASSET_FILES
from torchtitan_rl_ft.weights.holder.agent import NixlError
from torchtitan_rl_ft.weights.holder.client import HolderClient, HolderError, Offer
from torchtitan_rl_ft.weights.holder.directory import (
    DirectoryClient,
    DirectoryError,
    Lease,
    Superseded,
)
from torchtitan_rl_ft.weights.holder.files import note_pieces
from torchtitan_rl_ft.weights.holder.receive import ReceiveFailed, Receiver
from torchtitan_rl_ft.weights.holder.settings import Key
from torchtitan_rl_ft.weights.holder.tensor_hashes import TensorHashes
from torchtitan_rl_ft.weights.holder.versions import Version
from torchtitan_rl_ft.weights.image import WEIGHTS_FILE, Image, ImageInvalid
from torchtitan_rl_ft.weights.manifest import (
    MANIFEST_FILE,
    Manifest,
    WeightsInvalid,
    write_manifest,
)
from torchtitan_rl_ft.weights.pieces import (
    Piece,
    Range,
    contains,
    cover,
    intersect,
    subtract,
    total,
)

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 5.0
LEASE_POLL_S = 5.0
RETRY_DELAY_S = 0.1
MAX_FAILURES = 32
"""Pushes that may fail before a fetch is given up, whatever time is left."""

MAX_ASSET_BYTES = 256 << 20

ANY_BYTE: Range = (0, 1)
"""Of whoever has this, small files can be had as well."""


class FetchFailed(Exception):
    """The version did not come whole in time, or is not what it should be."""


class OtherPolicy(FetchFailed):
    """What came, or is held under that name, is another policy: no other try helps."""


@dataclass(frozen=True)
class Wish:
    """A version that is wanted; `manifest_digest` when it is known already what it holds."""

    key: Key
    layout_digest: str
    nbytes: int
    manifest_digest: str | None


class Fetch:
    """One fetch of one version. `make_version` finds memory for an image, or what an earlier try
    left of it; it is called once, when the first holder has said what the image looks like."""

    _returning: ClassVar[set[asyncio.Task[None]]] = set()
    """Leases on their way back, also of fetches that are over."""

    def __init__(
        self,
        wish: Wish,
        name: str,
        directory: DirectoryClient,
        receiver: Receiver,
        client_of: Callable[[str], HolderClient],
        make_version: Callable[[Key, Image], Awaitable[Version]],
        checks: Executor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wish, self._name = wish, name
        self._directory, self._receiver, self._client_of = directory, receiver, client_of
        self._make_version, self._checks, self._clock = make_version, checks, clock
        self._making = asyncio.Lock()
        self._version: Version | None = None
        self._hashes: TensorHashes | None = None
        self._assets: dict[str, bytes] | None = None
        self._work: dict[asyncio.Task[list[Lease]], list[Range]] = {}  # what it is to bring
        self._timeout_s = 0.0
        self._failures: list[str] = []
        self._trouble = ""  # of the directory
        self._bytes_from: Counter[str] = Counter()

    async def run(self, timeout_s: float) -> Version:
        """The version, whole: its manifest is written. Raises FetchFailed, Superseded, NoMemory,
        OSError; pieces that came stay for the next try."""
        self._timeout_s = timeout_s
        end_s = self._clock() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while self._missing or self._assets is None:
                    await self._ask_more(end_s)
                return await self._complete()
        except TimeoutError:
            raise FetchFailed(
                f"{self._wish.key} did not come whole within {timeout_s:g} s: "
                f"{total(self._missing)} of {self._wish.nbytes} bytes are missing"
                f"{self._causes()}"
            ) from None
        finally:
            await to_the_end(asyncio.create_task(self._stop()))

    @property
    def _missing(self) -> list[Range]:
        held = self._version.ranges if self._version is not None else []
        return subtract([(0, self._wish.nbytes)], held)

    async def _ask_more(self, end_s: float) -> None:
        """See that somebody is asked for all that is missing, and wait until something ends."""
        under_way = [r for ranges in self._work.values() for r in ranges]
        if open_ranges := subtract(self._missing or [ANY_BYTE], under_way):
            poll_s = min(LEASE_POLL_S, max(0.1, end_s - self._clock()))
            self._begin(self._lease(open_ranges, poll_s), open_ranges)
        done, _ = await asyncio.wait(self._work, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            del self._work[task]
            for lease in task.result():
                self._begin(self._use(lease), lease.ranges)
        if len(self._failures) > MAX_FAILURES:
            raise FetchFailed(f"{self._wish.key}: too many pushes failed{self._causes()}")

    def _begin(self, work: Coroutine[Any, Any, list[Lease]], ranges: list[Range]) -> None:
        self._work[asyncio.create_task(work)] = ranges

    async def _lease(self, ranges: list[Range], poll_s: float) -> list[Lease]:
        """Whom to ask for `ranges`. Raises Superseded."""
        asking = asyncio.ensure_future(
            self._directory.lease(self._name, self._wish.key, ranges, poll_s)
        )
        try:
            return await asyncio.shield(asking)
        except DirectoryError as e:
            self._trouble = str(e)
            await asyncio.sleep(RETRY_DELAY_S)
            return []
        except asyncio.CancelledError:
            self._return(self._decline(asking))
            raise

    def _return(self, returning: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """To the end, whatever becomes of the fetch: a lease that is not returned bars its giver to
        all others."""
        self._returning.add(task := asyncio.create_task(returning))
        task.add_done_callback(self._returning.discard)
        return task

    async def _decline(self, asking: asyncio.Future[list[Lease]]) -> None:
        """What is granted to a fetch that is over would bar others for long."""
        with contextlib.suppress(DirectoryError, Superseded):
            for lease in await asking:
                await self._give_back(lease, None)

    async def _use(self, lease: Lease) -> list[Lease]:
        """Have one holder push what it may be asked for. A failure of it or of the way to it is
        told to the directory and costs nothing but time. Raises NoMemory, OSError."""
        cause: str | None = None
        try:
            await self._push(lease)
        except (HolderError, ReceiveFailed, NixlError, ImageInvalid) as e:
            side = self._name if isinstance(e, NixlError) else lease.name
            cause = f"{side}: {e}"
            logger.warning("%s from %s", self._wish.key, cause)
            self._failures.append(cause)
        finally:
            returning = self._return(self._give_back(lease, cause))
            if cause is not None:  # else the same holder would be asked again at once
                await asyncio.shield(returning)
        return []

    async def _give_back(self, lease: Lease, cause: str | None) -> None:
        try:
            await self._directory.returned(lease, cause, ASK_TIMEOUT_S)
        except DirectoryError as e:
            logger.warning("lease %s was not given back: %s", lease.id, e)

    async def _push(self, lease: Lease) -> None:
        """Raises HolderError, ReceiveFailed, NixlError, ImageInvalid, NoMemory, OSError."""
        client = self._client_of(lease.url)
        ranges = intersect(lease.ranges, self._missing)
        header, parts = await client.pieces(self._wish.key, ASK_TIMEOUT_S, ranges)
        version = await self._version_of(header)
        if (left := intersect(lease.ranges, self._missing)) != ranges:  # of an earlier try
            ranges, parts = left, (await client.pieces(self._wish.key, ASK_TIMEOUT_S, left))[1]
        covered = cover(parts)
        if not contains(ranges, covered) or total(covered) != sum(p.nbytes for p in parts):
            raise ReceiveFailed("it has other pieces than it was asked for")
        if self._assets is None:
            self._assets = _checked(await client.assets(self._wish.key, ASK_TIMEOUT_S))
        if self._hashes is None and MANIFEST_FILE not in self._assets:
            self._hashes = TensorHashes(version, self._checks)

        def checked(piece: Piece) -> None:
            version.add(piece)
            note_pieces(version.folder, [piece])
            self._bytes_from[lease.name] += piece.nbytes
            if self._hashes is not None:
                self._hashes.checked(piece)

        async def ask(offer: Offer) -> None:
            await client.push(
                self._wish.key,
                self._wish.layout_digest,
                [p.range for p in parts],
                offer,
                self._receiver.stall_timeout_s,
                self._timeout_s,
            )

        if parts:
            await self._receiver.receive(version, parts, ask, checked)

    async def _version_of(self, header: bytes) -> Version:
        """Nothing is mapped, and no memory taken, for an image that is not the one wished for.
        Raises ReceiveFailed, ImageInvalid, NoMemory, OSError."""
        if hashlib.sha256(header).hexdigest() != self._wish.layout_digest:
            raise ReceiveFailed("it has another model: its layout_digest differs")
        async with self._making:
            if self._version is None:
                image = Image.from_header(header)
                if image.nbytes != self._wish.nbytes:
                    raise ReceiveFailed(
                        f"its image has {image.nbytes} bytes, not {self._wish.nbytes}"
                    )
                self._version = await self._make_version(self._wish.key, image)
        return self._version

    async def _complete(self) -> Version:
        """Write what makes the folder a policy like any other, its manifest last. Raises
        FetchFailed, OSError."""
        version, assets = self._version, self._assets
        assert version is not None and assets is not None
        if self._hashes is not None:
            manifest = await self._hashes.manifest()
        else:  # a relay has made it of the same bytes
            manifest = _manifest_of(version, assets.pop(MANIFEST_FILE))
        wanted = self._wish.manifest_digest
        if wanted is not None and manifest.digest != wanted:
            raise OtherPolicy(
                f"{self._wish.key} came whole and is another policy: its manifest's digest is "
                f"{manifest.digest}, not {wanted}"
            )
        for name, data in assets.items():
            (version.folder / name).write_bytes(data)
        version.manifest_digest = write_manifest(version.folder, manifest)
        version.bytes_from = dict(self._bytes_from)
        return version

    async def _stop(self) -> None:
        for task in self._work:
            task.cancel()
        ended = await asyncio.gather(*self._work, return_exceptions=True)
        if self._hashes is not None:
            self._hashes.stop()
        unused = [lease for leases in ended if isinstance(leases, list) for lease in leases]
        await asyncio.gather(*(self._give_back(lease, None) for lease in unused))

    def _causes(self) -> str:
        last = list(dict.fromkeys([*self._failures[-3:], self._trouble]))
        last = [cause for cause in last if cause]
        return f" ({'; '.join(last)})" if last else ""


async def to_the_end(task: asyncio.Task[None]) -> None:
    """Wait for what takes no longer than its own limits, also when cancelled meanwhile: what it
    works on is in use until then. Raises what `task` raises, and CancelledError at the end."""
    is_cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            is_cancelled = True
    task.result()
    if is_cancelled:
        raise asyncio.CancelledError


def _checked(assets: dict[str, bytes]) -> dict[str, bytes]:
    """Raises ReceiveFailed."""
    if strange := sorted(set(assets) - {*ASSET_FILES, MANIFEST_FILE}):
        raise ReceiveFailed(f"{strange[0]!r} is no file of a policy")
    if sum(map(len, assets.values())) > MAX_ASSET_BYTES:
        raise ReceiveFailed("the small files of the policy are not small")
    return assets


def _manifest_of(version: Version, data: bytes) -> Manifest:
    """Raises OtherPolicy."""
    try:
        manifest = Manifest.from_bytes(data)
    except WeightsInvalid as e:
        raise OtherPolicy(f"{version.key}: {e}") from e
    told = {n: (t.dtype, t.shape, t.file) for n, t in manifest.tensors.items()}
    image = {n: (t.dtype, t.shape, WEIGHTS_FILE) for n, t in version.image.tensors.items()}
    if (manifest.step, manifest.token) != version.key or told != image:
        raise OtherPolicy(f"the manifest that came with {version.key} is of something else")
    return manifest
