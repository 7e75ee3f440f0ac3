"""Hashes of the tensors of a version, made while its last pieces are still on their way."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

from torchtitan_rl_ft.weights.holder.versions import Version
from torchtitan_rl_ft.weights.image import WEIGHTS_FILE
from torchtitan_rl_ft.weights.manifest import Manifest, TensorEntry
from torchtitan_rl_ft.weights.pieces import Piece


class TensorHashes:
    """A tensor is hashed once all of it has come."""

    def __init__(self, version: Version, checks: Executor) -> None:
        self._version, self._checks = version, checks
        self._left = {n: t.end - t.start for n, t in version.image.tensors.items()}
        self._hashes: dict[str, asyncio.Future[str]] = {}
        for name, left in self._left.items():
            if not left:
                self._hash(name)
        for piece in version.pieces:
            self.checked(piece)

    def checked(self, piece: Piece) -> None:
        """The bytes of `piece` are there for good."""
        image = self._version.image
        for name in image.names_in(piece.start, piece.end):
            span = image.tensors[name]
            self._left[name] -= min(span.end, piece.end) - max(span.start, piece.start)
            if not self._left[name]:
                self._hash(name)

    def _hash(self, name: str) -> None:
        span = self._version.image.tensors[name]
        self._hashes[name] = asyncio.get_running_loop().run_in_executor(
            self._checks, self._version.file.sha256, span.start, span.end
        )

    def stop(self) -> None:
        """Hash no more than is being hashed now."""
        for hashing in self._hashes.values():
            hashing.cancel()

    async def manifest(self) -> Manifest:
        """Once all pieces have come."""
        entries = {
            name: TensorEntry(span.dtype, list(span.shape), await self._hashes[name], WEIGHTS_FILE)
            for name, span in self._version.image.tensors.items()
        }
        key = self._version.key
        return Manifest.build(step=key.step, token=key.token, tensors=entries)
