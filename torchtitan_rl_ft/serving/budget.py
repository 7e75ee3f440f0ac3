"""How often and how soon an engine is started again. Pure."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0


@dataclass(frozen=True)
class StartBudget:
    """At most `max_starts` starts within `window_s`, with a delay that doubles from start to
    start inside the window."""

    max_starts: int
    window_s: float
    starts_mono_s: tuple[float, ...] = ()

    def started(self, now_mono_s: float) -> StartBudget:
        recent = self._recent(now_mono_s)
        return StartBudget(self.max_starts, self.window_s, (*recent, now_mono_s))

    def delay_s(self, now_mono_s: float) -> float | None:
        """Seconds until the next start; None when the budget is spent."""
        recent = self._recent(now_mono_s)
        if len(recent) >= self.max_starts:
            return None
        if not recent:
            return 0.0
        # The first restart is immediate: most deaths have nothing to do with the start.
        if len(recent) == 1:
            return 0.0
        return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** (len(recent) - 2))

    def _recent(self, now_mono_s: float) -> tuple[float, ...]:
        return tuple(s for s in self.starts_mono_s if now_mono_s - s < self.window_s)
