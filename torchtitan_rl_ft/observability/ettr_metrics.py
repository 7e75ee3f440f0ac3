"""ETTR in the lines of `metrics.jsonl`."""

from __future__ import annotations

import time
from collections.abc import Callable

from torchtitan_rl_ft.observability.live_ettr import LiveEttr

KEYS = ("ettr/strict", "ettr/paper", "ettr/strict_window", "ettr/paper_window")


class EttrMetrics:
    """Called for each line; it never waits: the values are those of the last look, null before the
    first one. A new look is begun every `every_s`."""

    def __init__(
        self, live: LiveEttr, every_s: float, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._live, self._every_s, self._clock_s = live, every_s, clock_s
        self._due_s = float("-inf")

    def __call__(self) -> dict[str, float | None]:
        now_s = self._clock_s()
        if now_s >= self._due_s:
            self._due_s = now_s + self._every_s
            self._live.look()
        if not (samples := self._live.measured.samples):
            return dict.fromkeys(KEYS)
        last = samples[-1]
        values = (last.strict, last.paper, last.strict_window, last.paper_window)
        return dict(zip(KEYS, (round(v, 6) for v in values), strict=True))
