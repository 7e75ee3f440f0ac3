"""The versions that a holder has, whole or in part."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import threading
from bisect import insort
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.weights.holder.mapping import Mappings
from torchtitan_rl_ft.weights.holder.piece_digest import piece_digest
from torchtitan_rl_ft.weights.holder.push import Memory
from torchtitan_rl_ft.weights.holder.settings import Key
from torchtitan_rl_ft.weights.image import WEIGHTS_FILE, Image
from torchtitan_rl_ft.weights.pieces import Piece, Range, cover, merge
from torchtitan_rl_ft.weights.tensor_files import MAX_HEADER_BYTES


class HeldFile:
    """The file of an image, mapped for as long as it is held. Bytes can be read in any thread.
    Raises OSError."""

    def __init__(self, path: Path, nbytes: int, mappings: Mappings) -> None:
        self.path, self.nbytes = path, nbytes
        self._mappings = mappings
        self._mapping = mappings.take(path, nbytes)
        self.address = self._mapping.address
        self.view = memoryview((ctypes.c_ubyte * nbytes).from_address(self.address)).cast("B")
        self._readers = 0
        self._state = threading.Lock()

    def sha256(self, start: int, end: int) -> str:
        """Of bytes [start, end), without a copy; other threads go on meanwhile."""
        with self._read(start, end) as raw:
            return hashlib.sha256(raw).hexdigest()

    def digest(self, start: int, end: int) -> str:
        """As `sha256`: what a piece of these bytes has."""
        with self._read(start, end) as raw:
            return piece_digest(raw)

    @contextlib.contextmanager
    def _read(self, start: int, end: int) -> Iterator[memoryview]:
        """Raises ValueError after `close`."""
        with self._state:
            raw = self.view[start:end]
            self._readers += 1
        try:
            with raw:
                yield raw
        finally:
            with self._state:
                self._readers -= 1

    def close(self) -> bool:
        """False: it is being read, and stays open."""
        with self._state:
            if self._readers:
                return False
            self.view.release()
            self._mappings.keep(self._mapping)
            return True


class Version:
    """A version in a folder of its own. `pieces` are those whose bytes were compared with their
    digest, or, in a source, whose digest was made of them."""

    def __init__(self, key: Key, folder: Path, image: Image, mappings: Mappings) -> None:
        self.key, self.folder, self.image = key, folder, image
        self.file = HeldFile(folder / WEIGHTS_FILE, image.nbytes, mappings)
        self.pieces: list[Piece] = []
        self.manifest_digest: str | None = None
        self.bytes_from: dict[str, int] = {}
        self.seconds = 0.0

    @property
    def ranges(self) -> list[Range]:
        """What of the image is here."""
        return cover(self.pieces)

    @property
    def has_all(self) -> bool:
        return self.ranges == merge([(0, self.image.nbytes)])

    @property
    def memory(self) -> Memory:
        return Memory(self.file.address, tuple(self.ranges))

    def add(self, piece: Piece) -> None:
        insort(self.pieces, piece)

    def report(self, with_pieces: bool) -> dict[str, Any]:
        """What the directory is told of it."""
        told: dict[str, Any] = {
            "step": self.key.step,
            "token": self.key.token,
            "layout_digest": self.image.layout_digest,
            "nbytes": self.image.nbytes,
            "whole": self.has_all,
        }
        if with_pieces:
            told["pieces"] = [p.to_json() for p in self.pieces]
        return told


def read_image(path: Path) -> Image:
    """Of a file that begins with a header. Raises OSError, ImageInvalid."""
    with open(path, "rb") as f:
        length = f.read(8)
        text = f.read(min(int.from_bytes(length, "little"), MAX_HEADER_BYTES))
        return Image.from_header(length + text)


def write_header(path: Path, image: Image) -> None:
    """Raises OSError."""
    with open(path, "r+b") as f:
        f.write(image.header)
