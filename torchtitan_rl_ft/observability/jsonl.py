"""Reading line-by-line JSON files while they are being written."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from torchtitan_rl_ft.observability import json_text

BLOCK_BYTES = 2**20


class JsonlTail:
    """Hands out the complete lines appended to a file since the last call. The file may not
    exist yet, and its last line may still be in the making."""

    def __init__(
        self,
        path: Path,
        *,
        may_begin_anew: bool = False,
        from_end: bool = False,
        offset: int = 0,
        parse: Callable[[bytes], Any] = json_text.parse,
    ) -> None:
        """`may_begin_anew`: it may be removed by hand, and is read from the start then. `from_end`:
        only what is appended from now on. `offset`: only what is beyond so many bytes.
        `parse`: raises ValueError for a line that it cannot read."""
        self._parse = parse
        self._path, self._may_begin_anew = path, may_begin_anew
        self._offset = path.stat().st_size if from_end and path.exists() else offset
        self._file: tuple[int, int] | None = None
        self.unreadable = 0  # complete lines that were not JSON objects

    @property
    def offset(self) -> int:
        """Bytes that were read."""
        return self._offset

    def size(self) -> int:
        """Bytes of the file now; 0 when there is none."""
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0

    def read(self) -> list[dict[str, Any]]:
        return list(itertools.chain.from_iterable(self.blocks()))

    def blocks(self, until: int | None = None) -> Iterator[list[dict[str, Any]]]:
        """As `read`, with no more than a block of the file in memory. Whoever stops between two of
        them goes on there the next time. `until`: no line that reaches beyond so many bytes."""
        try:
            f = open(self._path, "rb")  # noqa: SIM115
        except FileNotFoundError:
            return
        with f:
            if self._may_begin_anew and self._is_another(os.fstat(f.fileno())):
                self._offset = 0
            f.seek(self._offset)
            for block in whole_lines(f, until):
                self._offset += len(block)
                yield self._values(block)

    def _is_another(self, found: os.stat_result) -> bool:
        """Than the one that was read before: removed and written anew, or cut off."""
        before, self._file = self._file, (found.st_dev, found.st_ino)
        return found.st_size < self._offset or before not in (None, self._file)

    def _values(self, block: bytes) -> list[dict[str, Any]]:
        found = []
        for line in block.splitlines():
            try:
                value = self._parse(line)
            except ValueError:
                value = None
            if isinstance(value, dict):
                found.append(value)
            else:
                self.unreadable += 1
        return found


def whole_lines(f: BinaryIO, until: int | None = None) -> Iterator[bytes]:
    """Blocks of complete lines up to the last one."""
    rest, left = b"", None if until is None else max(0, until - f.tell())
    while data := f.read(BLOCK_BYTES if left is None else min(BLOCK_BYTES, left)):
        left = None if left is None else left - len(data)
        end = data.rfind(b"\n") + 1
        if end:
            yield rest + data[:end]
            rest = data[end:]
        else:
            rest += data


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The complete lines of `path`; none when it does not exist."""
    return JsonlTail(path).read()
