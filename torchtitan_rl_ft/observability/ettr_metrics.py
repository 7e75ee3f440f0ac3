"""ETTR in the lines of `metrics.jsonl`."""

from __future__ import annotations

import time
from collections.abc import Callable

from torchtitan_rl_ft.observability.live_ettr import LiveEttr

KEYS = (
    *("ettr/strict", "ettr/paper", "ettr/strict_window", "ettr/paper_window"),
    *("ettr/strict_fault_free", "ettr/paper_fault_free", "ettr/undisturbed_step_s"),
)


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
        measured = self._live.measured
        if measured.ettr is None or not measured.samples:
            return dict.fromkeys(KEYS)
        last, ettr = measured.samples[-1], measured.ettr
        values = (
            *(last.strict, last.paper, last.strict_window, last.paper_window),
            *(ettr.strict.fault_free, ettr.paper.fault_free, ettr.step_s),
        )
        return {k: None if v is None else round(v, 6) for k, v in zip(KEYS, values, strict=True)}
