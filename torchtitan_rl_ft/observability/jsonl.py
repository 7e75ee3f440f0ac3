"""Reading line-by-line JSON files while they are being written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


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
    ) -> None:
        """`may_begin_anew`: it may be removed by hand, and is read from the start then. `from_end`:
        only what is appended from now on. `offset`: only what is beyond so many bytes."""
        self._path, self._may_begin_anew = path, may_begin_anew
        self._offset = path.stat().st_size if from_end and path.exists() else offset
        self.unreadable = 0  # complete lines that were not JSON objects

    @property
    def offset(self) -> int:
        """Bytes that were read."""
        return self._offset

    def read(self) -> list[dict[str, Any]]:
        try:
            with open(self._path, "rb") as f:
                if self._may_begin_anew and os.fstat(f.fileno()).st_size < self._offset:
                    self._offset = 0
                f.seek(self._offset)
                data = f.read()
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        self._offset += end
        found = []
        for line in data[:end].splitlines():
            try:
                value = json.loads(line)
            except ValueError:
                value = None
            if isinstance(value, dict):
                found.append(value)
            else:
                self.unreadable += 1
        return found


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The complete lines of `path`; none when it does not exist."""
    return JsonlTail(path).read()
