"""Numbers far from those of the steps before: a spiky loss, large gradients. They are told, with
the rank and the parameter they come from; a step is not refused for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

HISTORY_STEPS = 100


@dataclass(frozen=True)
class Anomaly:
    """`value` is more than the allowed factor over `largest`, the largest of the steps before."""

    what: str
    value: float
    largest: float
    rank: int  # data-parallel rank over all groups, group by group
    degree: int  # data-parallel ranks of one group

    @property
    def place(self) -> str:
        """The rank in words: its group's place in the quorum, and its rank inside the group."""
        return f"group {self.rank // self.degree}, rank {self.rank % self.degree}"

    def __str__(self) -> str:
        times = self.value / self.largest if self.largest else float("inf")
        return (
            f"{self.what} {self.value:.4g} is {times:.1f} times the largest of the steps before "
            f"({self.largest:.4g}); the largest share is of {self.place}"
        )


class History:
    """The sizes of the last steps' values."""

    def __init__(self, factor: float, warmup_steps: int) -> None:
        self._factor, self._warmup_steps = factor, warmup_steps
        self._seen: deque[float] = deque(maxlen=HISTORY_STEPS)
        self._far_in_a_row = 0

    def far(self, value: float) -> float | None:
        """The largest of the steps before when `value` is too far above it. A value that is far is
        not one to measure the next ones by, unless as many as the warm-up follow one another."""
        size = abs(value)
        largest = max(self._seen, default=0.0)
        if len(self._seen) >= self._warmup_steps and size > self._factor * largest:
            self._far_in_a_row += 1
            if self._far_in_a_row < self._warmup_steps:
                return largest
            self._seen.clear()
        self._far_in_a_row = 0
        self._seen.append(size)
        return None


class AnomalyWatch:
    """Looks at each committed step. All ranks see the same numbers and find the same."""

    def __init__(
        self, *, loss: bool, gradients: bool, factor: float, warmup_steps: int, degree: int
    ) -> None:
        """`degree`: data-parallel ranks of a group."""
        self._loss = History(factor, warmup_steps) if loss else None
        self._gradients = History(factor, warmup_steps) if gradients else None
        self._degree = degree

    def look(
        self,
        loss: float,
        grad_norm: float,
        losses: Sequence[float],
        norms: Sequence[float],
    ) -> list[Anomaly]:
        """`losses`, `norms`: each data-parallel rank's share of the loss and the norm of its
        gradients before they were summed."""
        found = []
        for what, history, value, shares in (
            ("loss", self._loss, loss, losses),
            ("gradient norm", self._gradients, grad_norm, norms),
        ):
            if history is not None and (largest := history.far(value)) is not None:
                rank = max(range(len(shares)), key=lambda i: abs(shares[i]))
                found.append(Anomaly(what, value, largest, rank, self._degree))
        return found
