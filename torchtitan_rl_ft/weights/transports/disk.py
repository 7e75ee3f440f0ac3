"""Weights on a file system that publisher and engines share: nothing is moved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from torchtitan_rl_ft.weights.manifest import (
    MANIFEST_FILE,
    Manifest,
    WeightsInvalid,
    read_and_verify,
    read_manifest,
)
from torchtitan_rl_ft.weights.reading import read_in_thread
from torchtitan_rl_ft.weights.transports.base import Release, TransportFailed


class DiskTransport:
    name = "disk"

    async def fetch(self, release: Release, deadline_s: float) -> Path:
        """Every byte was compared when the release was announced. A file that was written to
        after its manifest is compared again."""
        path = Path(release.path)
        await check_unchanged(release, path, deadline_s)
        return path

    async def verify(self, release: Release, deadline_s: float) -> None:
        await check_verified(release, Path(release.path), deadline_s)

    async def drop(self, release: Release) -> None:
        """The publisher's folder is pruned by its owner."""


async def check_unchanged(release: Release, path: Path, deadline_s: float) -> None:
    """`path` holds the release, and no file has changed since its manifest was written. Raises
    TransportFailed, WeightsInvalid."""
    await _in_time(_unchanged, release, path, deadline_s)


async def check_verified(release: Release, path: Path, deadline_s: float) -> None:
    """Every byte of `path` is what the release's manifest says. Raises as `check_unchanged`."""
    await _in_time(_verified, release, path, deadline_s)


async def _in_time(
    work: Callable[[Release, Path], None], release: Release, path: Path, deadline_s: float
) -> None:
    """A file system that does not answer may hold a thread, but not its caller."""
    try:
        async with asyncio.timeout(deadline_s):
            await read_in_thread(work, release, path)
    except TimeoutError:
        raise TransportFailed(f"{path}: no answer from the file system") from None
    except OSError as e:
        raise TransportFailed(f"{path}: {e}") from e


def _unchanged(release: Release, path: Path) -> None:
    manifest = read_manifest(path)
    _check_digest(release, path, manifest)
    written_ns = (path / MANIFEST_FILE).stat().st_mtime_ns
    files = {t.file for t in manifest.tensors.values()}
    try:
        changed = [f for f in files if (path / f).stat().st_mtime_ns > written_ns]
    except FileNotFoundError as e:
        raise WeightsInvalid(f"{path}: {e.filename} is gone") from None
    if changed:
        read_and_verify(path)


def _verified(release: Release, path: Path) -> None:
    _check_digest(release, path, read_and_verify(path))


def _check_digest(release: Release, path: Path, manifest: Manifest) -> None:
    if manifest.digest != release.manifest_digest:
        raise WeightsInvalid(f"{path} holds another policy than version {release.version}")
