"""All versions of one holder: what it has, gets, and gives up again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.weights.assets import copy_assets
from torchtitan_rl_ft.weights.holder.files import (
    HolderFiles,
    note_pieces,
    noted_pieces,
)
from torchtitan_rl_ft.weights.holder.mapping import Mappings
from torchtitan_rl_ft.weights.holder.push import Pusher
from torchtitan_rl_ft.weights.holder.settings import Key, Kind
from torchtitan_rl_ft.weights.holder.versions import Version, read_image, write_header
from torchtitan_rl_ft.weights.image import WEIGHTS_FILE, Image, ImageInvalid
from torchtitan_rl_ft.weights.manifest import WeightsInvalid, read_manifest
from torchtitan_rl_ft.weights.pieces import Piece, Range, cut

logger = logging.getLogger(__name__)

VERSIONS_HELD = 2
"""By a source, when its rank wants to write the next one and the directory cannot be asked."""


class NotReserved(Exception):
    """What was offered has no memory here."""


class Shelf:
    """Used from the event loop alone; what takes long is done by `checks`."""

    def __init__(
        self, kind: Kind, files: HolderFiles, pusher: Pusher, checks: Executor, piece_bytes: int
    ) -> None:
        self._kind, self._files, self._pusher = kind, files, pusher
        self._checks, self._piece_bytes = checks, piece_bytes
        self._mappings = Mappings()
        self._versions: dict[Key, Version] = {}
        self._reserved: dict[Key, Version] = {}  # ranks are writing
        self._leaving: list[Version] = []  # still in use
        self._in_use: Counter[Key] = Counter()

    def __getitem__(self, key: Key) -> Version:
        """A version that others can have, all or in part. Raises KeyError."""
        version = self._versions[key]
        if not self._is_handed_on(version):
            raise KeyError(key)
        return version

    @property
    def held(self) -> list[Version]:
        """What others can have."""
        return [v for v in self._versions.values() if self._is_handed_on(v)]

    def _is_handed_on(self, version: Version) -> bool:
        return self._kind == "source" or version.manifest_digest is not None

    def report(self, known: Iterable[Key]) -> list[dict[str, Any]]:
        """What the directory is told; of `known` ones it has the pieces."""
        told = set(known)
        with_pieces = self._kind == "source"
        return [v.report(with_pieces and v.key not in told) for v in self.held]

    # A source's ----------------------------------------------------------------------------

    async def reserve(self, key: Key, image: Image) -> Path:
        """A file to write parts of `image` into; the rank sees to it that there is memory for its
        own. Raises NoMemory, OSError."""
        for known in (self._versions, self._reserved):
            if (version := _same(known, key, image)) is not None:
                return version.file.path
        for old in list(self._reserved):  # their rank will not come back to them
            self._leaving.append(self._reserved.pop(old))
        older = [k for k in self._versions if k != key][: 1 - VERSIONS_HELD]
        for old in [*older, *({key} & set(self._versions))]:
            self._leaving.append(self._versions.pop(old))
        self._drop_leaving()
        self._reserved[key] = await self._new(key, image, [(0, len(image.header))])
        return self._reserved[key].file.path

    def reserved_image(self, key: Key) -> Image:
        """Raises NotReserved."""
        version = self._reserved.get(key) or self._versions.get(key)
        if version is None:
            raise NotReserved(f"no memory is reserved for {key}")
        return version.image

    async def offer(self, key: Key, file: Path, ranges: list[Range], assets: Path | None) -> None:
        """`ranges` are written: hash and hold them. Again the same: nothing. Raises NotReserved,
        OSError."""
        if key in self._versions:
            self._versions[key] = self._versions.pop(key)  # the newest again, after a rewind
            return
        version = self._reserved.get(key)
        given_up = f"{file} was not reserved for {key}, or was given up since"
        if version is None or version.file.path != file:
            raise NotReserved(given_up)
        cuts = cut(version.image, [(0, len(version.image.header)), *ranges], self._piece_bytes)
        with self.using(key):
            hashes = await asyncio.gather(*(self._digest(version, c) for c in cuts))
            if self._versions.get(key) is version:  # the same offer came twice
                return
            if self._reserved.get(key) is not version:
                raise NotReserved(given_up)
            if assets is not None:
                copy_assets(assets, version.folder)
            version.pieces = [Piece(*c, h) for c, h in zip(cuts, hashes, strict=True)]
            note_pieces(version.folder, version.pieces)
            self._versions[key] = self._reserved.pop(key)

    # A relay's -----------------------------------------------------------------------------

    async def begin(self, key: Key, image: Image) -> Version:
        """Memory for a version that is fetched, with what an earlier try left of it. Raises
        NoMemory, OSError."""
        if (version := _same(self._versions, key, image)) is not None:
            return version
        for old in [v for v in self._versions.values() if v.manifest_digest is None]:
            if old.key == key or old.key not in self._in_use:  # nobody will go on with it
                self._leaving.append(self._versions.pop(old.key))
        self._drop_leaving()
        making = asyncio.ensure_future(self._new(key, image, [(0, image.nbytes)]))
        making.add_done_callback(self._take_up)  # also when nobody waits for it any more
        return await asyncio.shield(making)

    def _take_up(self, making: asyncio.Future[Version]) -> None:
        if not making.cancelled() and making.exception() is None:
            self._versions[making.result().key] = making.result()

    @contextlib.contextmanager
    def using(self, key: Key) -> Iterator[None]:
        """The version keeps its memory meanwhile."""
        self._in_use[key] += 1
        try:
            yield
        finally:
            self._in_use[key] -= 1
            self._in_use += Counter()  # drops zeros
            self._drop_leaving()

    # Both ----------------------------------------------------------------------------------

    async def pieces(self, version: Version, parts: Iterable[Range]) -> list[Piece]:
        """`parts` with their digest, which is known where a part is one of the version's pieces."""
        known = {p.range: p for p in version.pieces}
        found = []
        for part in parts:
            piece = known.get(part)
            found.append(piece or Piece(*part, await self._digest(version, part)))
        return found

    def prune(self, keep: set[Key]) -> None:
        """Give up what is older here than something to `keep`. What is newer is not published yet,
        and a directory that wants nothing may have been started just now."""
        order = list(self._versions)
        newest = max((i for i, key in enumerate(order) if key in keep), default=0)
        for key in order[:newest]:
            if key not in keep and key not in self._in_use:
                self._leaving.append(self._versions.pop(key))
        self._drop_leaving()

    async def restore(self) -> None:
        """Take up what an earlier life of this holder left, as far as its bytes are right."""
        for key, folder in self._files.found().items():
            try:
                version = Version(key, folder, _whole_image(folder), self._mappings)
            except (ImageInvalid, ValueError, OSError) as e:
                logger.warning("%s is of no use: %s", folder, e)
                shutil.rmtree(folder)
                continue
            noted = [p for p in noted_pieces(folder) if p.end <= version.image.nbytes]
            hashes = await asyncio.gather(*(self._digest(version, p.range) for p in noted))
            right = {p for p, found in zip(noted, hashes, strict=True) if found == p.digest}
            version.pieces = sorted(right)
            version.manifest_digest = _manifest_digest(version)
            if version.pieces:
                self._versions[key] = version
            else:
                self._leaving.append(version)
        self._drop_leaving()

    async def _new(self, key: Key, image: Image, ranges: list[Range]) -> Version:
        """Raises NoMemory, OSError."""

        def make() -> Version:
            folder = self._files.take(key, image.nbytes, ranges)
            write_header(folder / WEIGHTS_FILE, image)
            return Version(key, folder, image, self._mappings)

        return await asyncio.get_running_loop().run_in_executor(self._checks, make)

    async def _digest(self, version: Version, part: Range) -> str:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._checks, version.file.digest, *part)

    def _drop_leaving(self) -> None:
        """What something is still at work on is dropped the next time."""
        for version in list(self._leaving):
            if version.key in self._in_use:
                continue
            self._pusher.forget(version.file.address)
            if not version.file.close():
                continue
            self._leaving.remove(version)
            self._files.release(version.folder)


def _same(known: dict[Key, Version], key: Key, image: Image) -> Version | None:
    version = known.get(key)
    return version if version and version.image.layout_digest == image.layout_digest else None


def _whole_image(folder: Path) -> Image:
    """To look at what a file lacks would end the process (SIGBUS). Raises OSError, ImageInvalid."""
    image, found = read_image(folder / WEIGHTS_FILE), (folder / WEIGHTS_FILE).stat().st_size
    if found != image.nbytes:
        raise ImageInvalid(f"its file has {found} bytes, the image {image.nbytes}")
    return image


def _manifest_digest(version: Version) -> str | None:
    """Of a version that is whole and has its manifest."""
    if not version.has_all:
        return None
    try:
        manifest = read_manifest(version.folder)
    except WeightsInvalid:
        return None
    return manifest.digest if (manifest.step, manifest.token) == version.key else None
