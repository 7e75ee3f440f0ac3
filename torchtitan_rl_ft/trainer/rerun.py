"""A step's result computed again on another group, to find hardware that computes wrong numbers.

Every group computes the share of its neighbour beside its own, and all see all results on the
board. When two groups disagree on a share, the step is refused and computed once more, the disputed
shares by every group: who differs from the majority then is wrong. Same wrong value twice:
persistent; right the second time: transient. After Megatron-LM's rerun state machine, which
compares with one other place, one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import numpy as np

TOLERANCE = 1e-4
"""Relative; other summation orders give about 1e-6 in float32."""

COLUMNS = 5  # of one share: computed, finite, loss, sum of squares, sum of the gradient


@dataclass(frozen=True)
class Share:
    """What computing one group's share of a batch gave, summed over the group's ranks."""

    loss: float
    square: float  # squared norm of the local gradients
    total: float  # their sum
    finite: bool = True

    def row(self) -> list[float]:
        numbers = [self.loss, self.square, self.total] if self.finite else [0.0] * 3
        return [1.0, float(self.finite), *numbers]

    def same(self, other: Share) -> bool:
        if not self.finite or not other.finite:
            return self.finite == other.finite
        size = max(self.square, other.square)
        return (
            abs(self.loss - other.loss) <= TOLERANCE * max(abs(self.loss), abs(other.loss), 1e-6)
            and abs(self.square - other.square) <= TOLERANCE * size
            # By Cauchy-Schwarz a sum is at most the norm times the root of the count.
            and abs(self.total - other.total) <= TOLERANCE * max(1.0, abs(self.total), size**0.5)
        )

    def difference(self, other: Share) -> float:
        """Relative difference of the gradient norms; infinite when one is not finite."""
        if not self.finite or not other.finite:
            return 0.0 if self.finite == other.finite else float("inf")
        largest = max(self.square, other.square) ** 0.5
        return abs(self.square**0.5 - other.square**0.5) / largest if largest else 0.0


Results = Mapping[int, Mapping[int, Share]]
"""share -> computing group -> result; both are places in the quorum."""


class Verdict(StrEnum):
    TRANSIENT = "transient_error"
    PERSISTENT = "persistent_error"
    UNDECIDED = "undecided"
    """Two groups disagree, twice, and no third one computed the share."""


@dataclass(frozen=True)
class Finding:
    """`group` (its place in the quorum; None: undecided between `groups`) computed `share`
    wrongly."""

    verdict: Verdict
    share: int
    groups: tuple[int, ...]

    def __str__(self) -> str:
        who = " or ".join(f"group {g}" for g in self.groups)
        return f"{self.verdict}: {who} computed a wrong result for share {self.share}"


def read(board: np.ndarray, degree: int) -> Results:
    """`board` [groups * degree, groups * COLUMNS] of one attempt."""
    groups = len(board) // degree
    cells = board.reshape(groups, degree, groups, COLUMNS).sum(axis=1)
    results: dict[int, dict[int, Share]] = {}
    for group in range(groups):
        for share in range(groups):
            computed, finite, loss, square, total = cells[group, share]
            if computed:
                made = Share(loss, square, total, finite == computed)
                results.setdefault(share, {})[group] = made
    return results


def disputed(results: Results) -> list[int]:
    """Shares on which the groups that computed them disagree."""
    return [
        share
        for share, by_group in results.items()
        if any(not a.same(b) for a in by_group.values() for b in by_group.values())
    ]


def judge(first: Results, again: Results) -> list[Finding]:
    """Who was wrong about the shares disputed in `first`, given the second computation of these
    shares by all groups."""
    findings = []
    for share in disputed(first):
        votes = again.get(share, {})
        right = _majority(votes)
        if right is None:
            sides = tuple(sorted(first[share].keys() | votes.keys()))
            findings.append(Finding(Verdict.UNDECIDED, share, sides))
            continue
        before = {g for g, s in first[share].items() if not s.same(right)}
        now = {g for g, s in votes.items() if not s.same(right)}
        findings += [Finding(Verdict.PERSISTENT, share, (g,)) for g in sorted(now)]
        findings += [Finding(Verdict.TRANSIENT, share, (g,)) for g in sorted(before - now)]
    return findings


def _majority(votes: Mapping[int, Share]) -> Share | None:
    for candidate in votes.values():
        if sum(candidate.same(s) for s in votes.values()) * 2 > len(votes):
            return candidate
    return None


class WrongResult(Exception):
    """A group's results are wrong again and again: it must not train on."""


@dataclass
class Rerun:
    """What this group computes beside its own share, and what came of it."""

    mode: Literal["validate_results", "report_stats"]
    interval: int
    degree: int
    _members: tuple[str, ...] = ()
    _step: int = -1
    _first: Results = field(default_factory=dict)
    """The disputed computation of `_step` by `_members`."""

    def columns(self, groups: int) -> int:
        return groups * COLUMNS

    def shares(self, step: int, members: list[str], rank: int) -> list[int]:
        """Groups whose shares this one (at place `rank`) computes besides its own."""
        groups = len(members)
        if self._arbitrates(step, members):
            return [g for g in disputed(self._first) if g != rank]
        if groups < 2 or step % self.interval:
            return []
        return [(rank - 1) % groups]

    def row(self, groups: int, computed: Mapping[int, Share]) -> np.ndarray:
        """This rank's part of the board."""
        cells = np.zeros((groups, COLUMNS))
        for share, result in computed.items():
            cells[share] = result.row()
        return cells.reshape(-1)

    def look(self, step: int, members: list[str], board: np.ndarray) -> list[Finding]:
        """What this attempt shows. Raises Disputed when the step has to be computed again."""
        results = read(board, self.degree)
        if self._arbitrates(step, members):
            first, self._first = self._first, {}
            return judge(first, results)
        if self.mode == "validate_results" and (shares := disputed(results)):
            self._first, self._step, self._members = results, step, tuple(members)
            sides = sorted({g for share in shares for g in results[share]})
            raise Disputed(f"groups {sides} disagree on the result of shares {shares}")
        return []

    def largest_difference(self, board: np.ndarray) -> float:
        """Over all shares, relative (report_stats)."""
        return max(
            (
                a.difference(b)
                for by_group in read(board, self.degree).values()
                for a in by_group.values()
                for b in by_group.values()
            ),
            default=0.0,
        )

    def _arbitrates(self, step: int, members: list[str]) -> bool:
        return bool(self._first) and step == self._step and tuple(members) == self._members


class Disputed(Exception):
    """Groups disagree on a result: the step is discarded and computed again."""
