"""Values of an event's `data`, which another version may have written."""

from __future__ import annotations

import sys
from typing import TypeVar

from torchtitan_rl_ft.observability.events import Event

T = TypeVar("T")


def number(event: Event, key: str) -> float | None:
    value = event.data.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if abs(value) <= sys.float_info.max else None  # NaN neither


def whole(event: Event, key: str) -> int | None:
    value = event.data.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def wholes(event: Event, key: str) -> list[int]:
    """Of a list; [] where there is none."""
    values = event.data.get(key)
    return [v for v in values if isinstance(v, int)] if isinstance(values, list) else []


def words(event: Event, key: str) -> list[str]:
    """The first words of the rows of a table, like the names in the shares of a commit."""
    rows = event.data.get(key)
    return [str(r[0]) for r in rows if isinstance(r, list) and r] if isinstance(rows, list) else []


MOST_ISSUED = 1_000_000
"""Prompt groups drawn at once: who tells of more tells of something else."""


def issued(event: Event) -> range:
    """The prompt groups of an ISSUE."""
    first, last = whole(event, "first"), whole(event, "last")
    if first is None or last is None or last - first >= MOST_ISSUED:
        return range(0)
    return range(first, last + 1)


def dropped(event: Event) -> list[int]:
    """The prompt groups of a DROP."""
    one = whole(event, "group")
    return wholes(event, "groups") if one is None else [one]


def moved_up(by_step: dict[int, T], step: int) -> dict[int, T]:
    """What is known of sealed batches once that of `step` is dropped: those after it move up."""
    return {s - (s > step): known for s, known in by_step.items() if s != step}


def subject(event: Event) -> str:
    """Whom it is about: by default who tells it."""
    return str(event.data.get("subject") or event.name)
