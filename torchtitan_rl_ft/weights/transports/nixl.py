"""Weights that relays hold in the memory of the engines' node (docs/architecture.md, Holders)."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torchtitan_rl_ft.weights.manifest import WeightsInvalid
from torchtitan_rl_ft.weights.transports.base import Release, TransportFailed
from torchtitan_rl_ft.weights.transports.disk import DiskTransport, check_unchanged, check_verified


class ReleaseRelay(Protocol):
    """The relay of one engine."""

    name: str

    async def bring(self, release: Release, deadline_s: float) -> Path:
        """The folder in which it holds the release, whole and checked as it came. Again: cheap.
        Raises TransportFailed, WeightsLost, WeightsInvalid."""
        ...

    def distrust(self) -> None:
        """What it holds is damaged: have it get all of it anew."""
        ...


class NixlTransport:
    """Of the engines of one relay. Releases that were published as folders stay where they are."""

    name = "nixl"

    def __init__(self, relay: ReleaseRelay) -> None:
        self._relay, self._disk = relay, DiskTransport()

    async def fetch(self, release: Release, deadline_s: float) -> Path:
        if release.transport != self.name:
            return await self._disk.fetch(release, deadline_s)
        path = await self._relay.bring(release, deadline_s)
        try:
            await check_unchanged(release, path, deadline_s)
        except WeightsInvalid as e:
            raise self._damaged(e) from e
        return path

    async def verify(self, release: Release, deadline_s: float) -> None:
        if release.transport != self.name:
            await self._disk.verify(release, deadline_s)
            return
        path = await self._relay.bring(release, deadline_s)
        try:
            await check_verified(release, path, deadline_s)
        except WeightsInvalid as e:
            raise self._damaged(e) from e

    async def drop(self, release: Release) -> None:
        """Relays are told what is needed, and use the memory of the rest again."""

    def _damaged(self, error: WeightsInvalid) -> TransportFailed:
        """Another holder may have it whole: the next try gets it from there."""
        self._relay.distrust()
        return TransportFailed(f"{self._relay.name} holds it no more: {error}")
