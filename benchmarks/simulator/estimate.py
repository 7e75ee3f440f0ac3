"""Repeats of a figure, their mean and its confidence interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Student's t for 95 % by degrees of freedom; beyond the table the normal distribution's.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_T95 += (2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086)


@dataclass(frozen=True)
class Estimate:
    """`half_width`: of the mean's 95 % confidence interval. `spread`: of a single repeat, its
    standard deviation."""

    mean: float
    half_width: float
    spread: float
    repeats: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        n, mean = len(values), statistics.fmean(values)
        if n < 2:
            return cls(mean, math.inf, math.nan, n)
        spread = statistics.stdev(values)
        t = _T95[n - 2] if n - 2 < len(_T95) else 1.96
        return cls(mean, t * spread / math.sqrt(n), spread, n)

    def text(self, scale: float = 1.0, digits: int = 1) -> str:
        return f"{scale * self.mean:.{digits}f} ± {scale * self.half_width:.{digits}f}"
