"""`observability.profile_steps`: steps during which the profilers run."""

from __future__ import annotations

import re

_SPAN = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?")


def parse_steps(text: str) -> range:
    """`"10-12"` and `"10"`, both ends included; empty for an empty text. Steps count from 1. Raises
    ValueError."""
    if not text.strip():
        return range(0)
    if (found := _SPAN.fullmatch(text)) is None:
        raise ValueError(f'{text!r} is no range of steps: write "10-12", or "10"')
    first, last = int(found[1]), int(found[2] or found[1])
    if first < 1:
        raise ValueError("steps count from 1")
    if last < first:
        raise ValueError("the range ends before it begins")
    return range(first, last + 1)
