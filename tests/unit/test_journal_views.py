from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from journal_cases import accept, issue, make_batch, record

from torchtitan_rl_ft.journal.records import digest
from torchtitan_rl_ft.journal.store import Journal
from torchtitan_rl_ft.journal.views import assignment, view
from torchtitan_rl_ft.observability.events import EventList

lengths_of = st.lists(st.integers(0, 5000), max_size=80).map(lambda x: np.asarray(x, np.int64))


@pytest.mark.row("E3")
@given(lengths_of, st.integers(1, 9))
def test_any_number_of_shards_gives_the_same_union(lengths: np.ndarray, shards: int) -> None:
    views = [view(lengths, shard, shards) for shard in range(shards)]
    np.testing.assert_array_equal(np.sort(np.concatenate(views)), np.arange(len(lengths)))
    assert all((np.diff(v) > 0).all() for v in views)


@pytest.mark.row("E3")
def test_other_layouts_replay_the_same_stored_batch(tmp_path: Path) -> None:
    """1, 2, then 4 shards after a rewind: nothing is written, nothing generated, all is covered."""
    with Journal.open(tmp_path, events=EventList()) as journal:
        ids = issue(journal, 8)
        accept(journal, ids)
        journal.seal(make_batch(ids), ids)
        stored, splits = journal.batch_bytes(1), []
        for shards in (1, 2, 4):
            ref = journal.head()
            assert ref is not None and (ref.batch_id, ref.digest) == (1, digest(stored))
            batch = journal.batch(ref.batch_id)
            views = [view(batch.lengths(), shard, shards) for shard in range(shards)]
            groups = np.concatenate([batch.arrays["group_ids"][v] for v in views])
            assert sorted(groups.tolist()) == sorted(batch.arrays["group_ids"].tolist())
            splits.append(tuple(v.tobytes() for v in views))
            journal.commit(record(journal, shards), reporter="a", metrics=None)
            journal.rewind(0, reason="another layout", member="a")
            assert journal.batch_bytes(1) == stored and journal.next_batch_id() == 2
        assert len(set(splits)) == 3
        assert journal.counts()["issued"] == 8 and journal.audit().ok


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
