"""Reasons to drop a prompt group, by kind: what `metrics.jsonl` counts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

TOO_OLD = "too old"
TOO_LONG = "prompt too long"
FILTER = "filter"
GENERATION = "generation"
REWARD = "reward"
CRASHED = "crashed"

_BEGINNINGS = {
    f"{TOO_OLD}:": "too_old",
    f"{TOO_LONG}:": "too_long",
    f"{FILTER}:": "filtered",
    f"{GENERATION} failed": "generation_failed",
    f"{REWARD} failed": "reward_failed",
    f"{CRASHED} ": "crashed",
}

OTHER = "refused"
"""Dropped with its batch, which no trainer can use, or by hand."""

KINDS = (*_BEGINNINGS.values(), OTHER)

PREFIX = "dropped_groups/"
_SPLIT = re.compile("|".join(map(re.escape, _BEGINNINGS)))


def kind(reason: str) -> str:
    """One of KINDS."""
    found = _SPLIT.match(reason)
    return OTHER if found is None else _BEGINNINGS[found.group()]


def by_kind(reasons: Iterable[tuple[str, int]]) -> Counter[str]:
    """Counts by kind of counts by reason."""
    found: Counter[str] = Counter()
    for reason, count in reasons:
        found[kind(reason)] += count
    return found
