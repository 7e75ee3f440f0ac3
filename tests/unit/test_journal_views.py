from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl_ft.journal.views import assignment, view

lengths_of = st.lists(st.integers(0, 5000), max_size=80).map(lambda x: np.asarray(x, np.int64))


@pytest.mark.row("E3")
@given(lengths_of, st.integers(1, 9))
def test_any_number_of_shards_gives_the_same_union(lengths: np.ndarray, shards: int) -> None:
    views = [view(lengths, shard, shards) for shard in range(shards)]
    np.testing.assert_array_equal(np.sort(np.concatenate(views)), np.arange(len(lengths)))
    assert all((np.diff(v) > 0).all() for v in views)


@given(lengths_of, st.integers(1, 9))
def test_views_are_balanced(lengths: np.ndarray, shards: int) -> None:
    loads = np.bincount(assignment(lengths, shards), weights=lengths, minlength=shards)
    # Follows from always filling the emptiest shard.
    assert loads.max() - loads.min() <= lengths.max(initial=0)


def test_balance_is_near_the_mean_for_many_samples() -> None:
    lengths = np.random.default_rng(0).integers(20, 2000, size=512)
    for shards in (2, 3, 4, 8):
        loads = np.bincount(assignment(lengths, shards), weights=lengths)
        assert loads.max() <= 1.01 * loads.mean()


def test_equal_lengths_are_spread_evenly() -> None:
    sizes = np.bincount(assignment(np.full(128, 16), 3))
    assert sorted(sizes) == [42, 43, 43]


def test_a_view_is_a_fixed_function() -> None:
    lengths = np.asarray([5, 9, 5, 1, 9, 3])
    assert [view(lengths, s, 2).tolist() for s in range(2)] == [[0, 1, 5], [2, 3, 4]]
    assert view(lengths.astype(np.int32), 0, 1).tolist() == [0, 1, 2, 3, 4, 5]


def test_impossible_arguments() -> None:
    with pytest.raises(ValueError, match="shard 2 of 2"):
        view(np.asarray([1]), 2, 2)
