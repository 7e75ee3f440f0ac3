"""Which lines of `metrics.jsonl` are of the history that counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def committed_rows(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """In the order of their steps: of a step that was trained again the last row, of those that a
    rewind has undone none."""
    found: list[Mapping[str, Any]] = []
    for row in rows:
        if isinstance(step := row.get("step"), int):
            while found and found[-1]["step"] >= step:
                found.pop()
            found.append(row)
    return found
