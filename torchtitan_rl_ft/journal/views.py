"""Each shard's part of a sealed batch, as a pure function of the batch and the shard count."""

from __future__ import annotations

import heapq

import numpy as np


def view(lengths: np.ndarray, shard: int, shards: int) -> np.ndarray:
    """Sample indices of one shard, ascending; `lengths` [N] are tokens per sample.

    The shards of any count are disjoint and cover all samples. Longest-processing-time rule
    (Graham 1969): samples go, longest first, to the shard with the fewest tokens, so that no
    shard has more than 4/3 of the optimum. Ties go to fewer samples, then to the lower shard,
    and among equal lengths to the lower index, so that every process computes the same split.
    Raises ValueError unless 0 <= shard < shards.
    """
    if not 0 <= shard < shards:
        raise ValueError(f"shard {shard} of {shards}")
    return np.flatnonzero(assignment(lengths, shards) == shard)


def assignment(lengths: np.ndarray, shards: int) -> np.ndarray:
    """Shard of each sample, [N]."""
    lengths = np.asarray(lengths, dtype=np.int64)
    owner = np.empty(len(lengths), dtype=np.int64)
    loads = [(0, 0, shard) for shard in range(shards)]
    for i in np.argsort(-lengths, kind="stable").tolist():
        tokens, samples, shard = loads[0]
        owner[i] = shard
        heapq.heapreplace(loads, (tokens + int(lengths[i]), samples + 1, shard))
    return owner
