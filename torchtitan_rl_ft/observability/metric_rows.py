"""The lines of `metrics.jsonl`, and which of them are of the history that counts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.observability import json_text
from torchtitan_rl_ft.observability.jsonl import JsonlTail

MOST = 1e300
"""A number beyond it is none."""


def read_row(line: bytes) -> dict[str, Any] | None:
    """Numbers, texts and flags by key, with a step; None for what is no such line. Raises
    ValueError."""
    row = json_text.parse(line)
    step = row.get("step") if isinstance(row, dict) else None
    if not isinstance(step, int) or not _is_scalar(step):
        return None
    return {k: v if _is_scalar(v) else None for k, v in row.items()}


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """One after the other; none when the file does not exist."""
    return itertools.chain.from_iterable(JsonlTail(path, parse=read_row).blocks())


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


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, int | float) and abs(value) < MOST)
