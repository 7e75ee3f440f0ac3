"""Hashes of the tensors of a version, made while its last pieces are still on their way."""

from __future__ import annotations

import asyncio
import hashlib
from concurrent.futures import Executor

from torchtitan_rl_ft.weights.holder.versions import Version
from torchtitan_rl_ft.weights.image import WEIGHTS_FILE
from torchtitan_rl_ft.weights.manifest import Manifest, TensorEntry
from torchtitan_rl_ft.weights.pieces import Piece


class TensorHashes:
    """A tensor is hashed once all of it has come; where it is one piece, it was hashed already."""

    def __init__(self, version: Version, checks: Executor) -> None:
        self._version, self._checks = version, checks
        self._left = {n: t.end - t.start for n, t in version.image.tensors.items()}
        self._hashes: dict[str, str | asyncio.Future[str]] = {}
        for name, left in self._left.items():
            if not left:
                self._hashes[name] = hashlib.sha256().hexdigest()
        for piece in version.pieces:
            self.checked(piece)

    def checked(self, piece: Piece) -> None:
        """The bytes of `piece` are there for good."""
        image = self._version.image
        for name in image.names_in(piece.start, piece.end):
            span = image.tensors[name]
            self._left[name] -= min(span.end, piece.end) - max(span.start, piece.start)
            if self._left[name]:
                continue
            if (span.start, span.end) == piece.range:
                self._hashes[name] = piece.sha256
            else:
                self._hashes[name] = asyncio.get_running_loop().run_in_executor(
                    self._checks, self._version.file.sha256, span.start, span.end
                )

    async def manifest(self) -> Manifest:
        """Once all pieces have come."""
        entries = {}
        for name, span in self._version.image.tensors.items():
            found = self._hashes[name]
            sha256 = found if isinstance(found, str) else await found
            entries[name] = TensorEntry(span.dtype, list(span.shape), sha256, WEIGHTS_FILE)
        key = self._version.key
        return Manifest.build(step=key.step, token=key.token, tensors=entries)
