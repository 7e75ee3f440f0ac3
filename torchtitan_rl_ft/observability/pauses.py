"""How long a pause between two stages usually is, known in bounded memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

USUAL_SHARE = 0.95
"""Of the pauses in undisturbed steps so many are usual; a longer one is a stall."""

_GROWTH = 1.01
_LEAST_S = 1e-6


class Pauses:
    """Lengths of pauses, counted in classes of 1 %. Not changed once made."""

    def __init__(self, counts: Counter[int] | None = None) -> None:
        self._counts = counts or Counter()

    def with_more(self, lengths_s: Iterable[float]) -> Pauses:
        return Pauses(self._counts + Counter(map(_class_of, lengths_s)))

    def usual_s(self) -> float | None:
        """No usual pause is longer. None: there was none at all."""
        rank, seen = math.ceil(USUAL_SHARE * self._counts.total()), 0
        for of_class in sorted(self._counts):
            seen += self._counts[of_class]
            if seen >= rank:
                return _GROWTH**of_class
        return None


def _class_of(length_s: float) -> int:
    """The n of the first bound 1.01^n that is not below the length."""
    return math.ceil(math.log(max(length_s, _LEAST_S), _GROWTH) - 1e-9)
