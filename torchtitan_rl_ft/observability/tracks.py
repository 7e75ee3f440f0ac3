"""Piecewise constant functions of time: what ETTR is computed with."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple


class Segment(NamedTuple):
    """`value` from `start_s` on, until before `end_s`."""

    start_s: float
    end_s: float
    value: Any = True


Track = Sequence[Segment]
"""In the order of time, without overlap; nothing is known of the gaps."""


class Slice(NamedTuple):
    start_s: float
    end_s: float
    values: tuple[Any, ...]  # of each track; None in a gap

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def overlay(since_s: float, until_s: float, tracks: Sequence[Track]) -> Iterator[Slice]:
    """The slices of [since_s, until_s] in which no track changes."""
    inside = (t for track in tracks for s in track for t in s[:2] if since_s < t < until_s)
    cuts = sorted({since_s, until_s, *inside})
    at = [0] * len(tracks)
    for start_s, end_s in itertools.pairwise(cuts):
        values = []
        for i, track in enumerate(tracks):
            while at[i] < len(track) and track[at[i]].end_s <= start_s:
                at[i] += 1
            covers = at[i] < len(track) and track[at[i]].start_s <= start_s
            values.append(track[at[i]].value if covers else None)
        yield Slice(start_s, end_s, tuple(values))


def newest(segments: Iterable[Segment]) -> list[Segment]:
    """A track of segments that may overlap: at each time the value of the one that began last."""
    ordered = sorted((s for s in segments if s.end_s > s.start_s), key=lambda s: s.start_s)
    cuts = sorted({t for s in ordered for t in s[:2]})
    open_: list[tuple[float, int, Segment]] = []
    found: list[Segment] = []
    i = 0
    for start_s, end_s in itertools.pairwise(cuts):
        while i < len(ordered) and ordered[i].start_s <= start_s:
            heapq.heappush(open_, (-ordered[i].start_s, -i, ordered[i]))
            i += 1
        while open_ and open_[0][2].end_s <= start_s:
            heapq.heappop(open_)
        if not open_:
            continue
        value = open_[0][2].value
        if found and found[-1].end_s == start_s and found[-1].value is value:
            found[-1] = Segment(found[-1].start_s, end_s, value)
        else:
            found.append(Segment(start_s, end_s, value))
    return found


def union(segments: Iterable[Segment]) -> list[Segment]:
    """Where any of the segments is."""
    found: list[Segment] = []
    for s in sorted((s for s in segments if s[1] > s[0]), key=itemgetter(0)):
        if found and s[0] <= found[-1][1]:
            if s[1] > found[-1][1]:
                found[-1] = Segment(found[-1][0], s[1])
        else:
            found.append(Segment(s[0], s[1]))
    return found
