"""Byte ranges of an image, and the pieces that are pushed and checked one at a time.

Pure. A range is `(start, end)`, start < end; a list of ranges is sorted and without overlaps when a
function here returns it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchtitan_rl_ft.weights.image import Image

Range = tuple[int, int]

SMALL_FRACTION = 4
"""Tensors below a quarter of a piece share one with their neighbours."""


DIGEST_CHARS = 32


@dataclass(frozen=True, order=True)
class Piece:
    """The bytes [start, end) of an image; `digest`: see holder/piece_digest.py."""

    start: int
    end: int
    digest: str

    @property
    def range(self) -> Range:
        return self.start, self.end

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    def to_json(self) -> list[int | str]:
        return [self.start, self.end, self.digest]


def piece_from_json(data: Sequence[int | str]) -> Piece:
    """Raises ValueError, TypeError."""
    start, end, digest = data
    piece = Piece(int(start), int(end), str(digest))
    if not 0 <= piece.start < piece.end or len(piece.digest) != DIGEST_CHARS:
        raise ValueError(f"not a piece: {data!r}")
    return piece


def merge(ranges: Iterable[Range]) -> list[Range]:
    """What `ranges` cover together, in as few ranges as possible."""
    merged: list[Range] = []
    for start, end in sorted(r for r in ranges if r[0] < r[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def cover(pieces: Iterable[Piece]) -> list[Range]:
    return merge(p.range for p in pieces)


def subtract(ranges: Iterable[Range], taken: Iterable[Range]) -> list[Range]:
    """What of `ranges` is not in `taken`."""
    left: list[Range] = []
    holes = merge(taken)
    ends = [end for _, end in holes]
    for start, end in merge(ranges):
        for hole in holes[bisect_right(ends, start) :]:
            if hole[0] >= end:
                break
            if start < hole[0]:
                left.append((start, hole[0]))
            start = max(start, hole[1])
        if start < end:
            left.append((start, end))
    return left


def intersect(ranges: Iterable[Range], others: Iterable[Range]) -> list[Range]:
    """What is in both."""
    ranges = merge(ranges)
    return subtract(ranges, subtract(ranges, others))


def contains(ranges: Iterable[Range], wanted: Iterable[Range]) -> bool:
    """Whether all of `wanted` is in `ranges`."""
    return not subtract(wanted, ranges)


def total(ranges: Iterable[Range]) -> int:
    """Bytes in ranges that do not overlap."""
    return sum(end - start for start, end in ranges)


def cut(image: Image, ranges: Iterable[Range], piece_bytes: int) -> list[Range]:
    """Cut `ranges` of `image` into pieces of at most `piece_bytes`.

    The header is a piece of its own. A tensor (what of it is in the range) starts a piece, unless
    it is small: small neighbours share one. So the same range is cut in the same way by all.
    """
    small = piece_bytes // SMALL_FRACTION
    cuts: list[Range] = []
    for whole in merge(ranges):
        growing = False  # whether the last piece takes small neighbours
        for start, end in _segments(image, whole):
            is_small = start >= len(image.header) and end - start < small
            if is_small and growing and end - cuts[-1][0] <= piece_bytes:
                cuts[-1] = cuts[-1][0], end
            else:
                cuts += [(at, min(at + piece_bytes, end)) for at in range(start, end, piece_bytes)]
            growing = is_small
    return cuts


def _segments(image: Image, whole: Range) -> list[Range]:
    """`whole`, cut where a tensor begins."""
    start, end = whole
    bounds = image.boundaries
    inner = bounds[bisect_right(bounds, start) : bisect_left(bounds, end)]
    edges = [start, *inner, end]
    return list(zip(edges[:-1], edges[1:], strict=True))


def clip(pieces: Iterable[Piece], ranges: Iterable[Range]) -> list[Range]:
    """`ranges`, cut where the pieces of a holder are: what both sides of a push take for its
    pieces. Only whole pieces have a known digest; of others it is made for the occasion."""
    wanted = merge(ranges)
    ends = [end for _, end in wanted]
    parts: list[Range] = []
    for piece in sorted(pieces):
        for start, end in wanted[bisect_right(ends, piece.start) :]:
            if start >= piece.end:
                break
            parts.append((max(start, piece.start), min(end, piece.end)))
    return parts
