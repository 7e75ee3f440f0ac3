"""How the pipeline from prompts to batches runs: counts and waits between two batches."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

BLOCKED = frozenset({"waiting_for_policy", "waiting_for_trainers"})
"""Phases of the loop in which nothing can be rolled out."""


class Pipeline:
    """Told of what happens; `take` gives the numbers of a batch as it is sealed."""

    def __init__(self, mono_s: Callable[[], float] = time.monotonic) -> None:
        self._mono_s = mono_s
        self._failures = 0
        self._blocked_s = 0.0
        self._blocked_since_s: float | None = None
        self._announced: dict[int, tuple[float, float]] = {}  # version -> (push_s, when)
        self._weights: dict[str, float | None] = {"weights/push_s": None, "weights/pull_s": None}

    def failed(self, tries: int) -> None:
        """So many tries to roll a group out have failed, or crashed."""
        self._failures += tries

    def entered(self, phase: str) -> None:
        now_s = self._mono_s()
        if self._blocked_since_s is not None:
            self._blocked_s += now_s - self._blocked_since_s
        self._blocked_since_s = now_s if phase in BLOCKED else None

    def announced(self, version: int, push_s: float) -> None:
        """A policy was published `push_s` after its commit."""
        self._announced[version] = (push_s, self._mono_s())

    def served(self, version: int, seen_s: float) -> None:
        """The first engine that serves it was seen."""
        if (told := self._announced.get(version)) is None:
            return
        push_s, announced_s = told
        committed_s = announced_s - push_s
        # Serving may answer the one who asks before it answers the one who announced.
        pushed_s = max(committed_s, min(announced_s, seen_s))
        self._weights = {
            "weights/push_s": pushed_s - committed_s,
            "weights/pull_s": max(0.0, seen_s - pushed_s),
        }
        self._announced = {v: t for v, t in self._announced.items() if v > version}

    def take(self, accepted_groups: int, sealed_batches: int) -> dict[str, Any]:
        """Numbers for `metrics.jsonl`; counts begin anew."""
        now_s = self._mono_s()
        if self._blocked_since_s is not None:
            self._blocked_s += now_s - self._blocked_since_s
            self._blocked_since_s = now_s
        found = {
            "buffer/accepted_groups": accepted_groups,
            "buffer/sealed_batches": sealed_batches,
            "groups/failures": self._failures,
            "rollout/blocked_s": round(self._blocked_s, 6),
            **self._weights,
        }
        self._failures, self._blocked_s = 0, 0.0
        return found
