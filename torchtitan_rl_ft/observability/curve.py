"""A number over the steps of a run, in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass

MOST_POINTS = 256


@dataclass
class _Point:
    step: int  # the last one
    sum: float
    count: int


class Curve:
    """Takes a value per step. With more than `most` of them neighbours are put together: each point
    is the mean of its steps."""

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._points: list[_Point] = []
        self._most, self._stride = most, 1

    def add(self, step: int, value: float) -> None:
        """A step that is there already, and all after it, were superseded."""
        while self._points and self._points[-1].step >= step:
            self._points.pop()
        last = self._points[-1] if self._points else None
        if last is not None and last.count < self._stride:
            last.step, last.sum, last.count = step, last.sum + value, last.count + 1
            return
        self._points.append(_Point(step, value, 1))
        if len(self._points) > self._most:
            self._halve()

    def _halve(self) -> None:
        self._stride *= 2
        pairs = [self._points[i : i + 2] for i in range(0, len(self._points), 2)]
        self._points = [
            _Point(pair[-1].step, sum(p.sum for p in pair), sum(p.count for p in pair))
            for pair in pairs
        ]

    @property
    def steps(self) -> list[int]:
        return [p.step for p in self._points]

    @property
    def values(self) -> list[float]:
        return [p.sum / p.count for p in self._points]

    def to_json(self) -> list[tuple[int, float]]:
        return list(zip(self.steps, self.values, strict=True))
