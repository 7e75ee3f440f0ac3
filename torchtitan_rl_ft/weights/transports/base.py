"""The interface of a weight transport."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from torchtitan_rl_ft.weights.manifest import WeightsInvalid


@dataclass(frozen=True)
class Release:
    """A policy version: the number that `serving` gave to a published state of the trainer.

    `path` is the folder that the publisher wrote, empty when holders have it in memory; then
    `layout_digest` and `nbytes` are those of its image. `manifest_digest` is the digest of its
    manifest.
    """

    version: int
    step: int
    token: str
    path: str
    manifest_digest: str
    layout_digest: str = ""
    nbytes: int = 0

    @property
    def transport(self) -> str:
        """By which it travels."""
        return "disk" if self.path else "nixl"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Release:
        """Raises KeyError, TypeError."""
        return cls(**{k: data[k] for k in cls.__dataclass_fields__ if k in data})


class TransportFailed(Exception):
    """The release could not be brought here in time; another try may succeed."""


class ReleaseSuperseded(TransportFailed):
    """A newer one is there: this one is not worth a transfer any more."""


class WeightsLost(WeightsInvalid):
    """Nobody holds the release any more; it has to be published again."""


class WeightTransport(Protocol):
    """Brings a release to this node, as a folder that an engine of the node can load."""

    name: str

    async def fetch(self, release: Release, deadline_s: float) -> Path:
        """The folder, complete: its manifest is the release's, and no file has changed since that
        was written. Calling it again is cheap.

        Raises TransportFailed, WeightsInvalid naming the tensor that differs.
        """
        ...

    async def verify(self, release: Release, deadline_s: float) -> None:
        """Compare all bytes of the fetched folder with the manifest. Raises as `fetch`."""
        ...

    async def drop(self, release: Release) -> None:
        """Forget what `fetch` keeps here for a release that no engine needs any more."""
        ...
