"""What a prompt group went through, as ACCEPT tells it for the trace of the run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Leg = Sequence[Any]
"""[engine, sent_ms, first_ms | null, end_ms, tokens, queue_ms | null], from the request on."""


@dataclass(frozen=True)
class GroupTimes:
    """On the host's monotonic clock."""

    started_s: float
    asked_s: float  # the request that was answered
    generated_s: float
    judged_s: float
    failed: int
    """Tries before that one."""

    legs: Sequence[Sequence[Leg]]  # of each sample

    def to_json(self, rewards: Sequence[float]) -> dict[str, Any]:
        asked_s = self.asked_s
        ends_ms = [leg[3] for legs in self.legs for leg in legs]
        if ends_ms:  # the request may have joined an earlier one that was alike
            asked_s = min(asked_s, self.generated_s - max(ends_ms) / 1e3)
        at_s = (max(self.started_s, asked_s), self.generated_s, self.judged_s)
        return {
            "started_s": round(self.started_s, 6),
            "at_ms": [round((t - self.started_s) * 1e3, 1) for t in at_s],
            "failed": self.failed,
            "rewards": [round(r, 4) if math.isfinite(r) else None for r in rewards],
            "legs": self.legs,
        }
