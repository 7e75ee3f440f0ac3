"""Weights on a file system that publisher and engines share: nothing is moved."""

from __future__ import annotations

import asyncio
from pathlib import Path

from torchtitan_rl_ft.weights.manifest import WeightsInvalid, read_manifest
from torchtitan_rl_ft.weights.transports.base import Release, TransportFailed


class DiskTransport:
    name = "disk"

    async def fetch(self, release: Release, deadline_s: float) -> Path:
        """Checks that the folder still holds the published manifest. Content is proved by the
        engine's own checksums after the load."""
        path = Path(release.path)
        try:
            async with asyncio.timeout(deadline_s):
                manifest = await asyncio.to_thread(read_manifest, path)
        except TimeoutError:
            raise TransportFailed(f"{path}: no answer from the file system") from None
        except OSError as e:
            raise TransportFailed(f"{path}: {e}") from e
        if manifest.digest != release.manifest_digest:
            raise WeightsInvalid(f"{path} holds another policy than version {release.version}")
        return path

    async def drop(self, release: Release) -> None:
        """The publisher's folder is pruned by its owner."""
