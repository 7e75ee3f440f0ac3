"""Advantages and sealed batches: formulas, and every way a sample can be unfit."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl_ft.journal.records import SealedBatch
from torchtitan_rl_ft.rollout.advantages import STD_EPSILON, group_advantages, has_signal
from torchtitan_rl_ft.rollout.sealing import (
    AcceptedGroup,
    Sample,
    group_arrays,
    loss_weights,
    seal,
)

NAN = math.nan


# Advantages -----------------------------------------------------------------------------------


def test_advantages_by_the_formula():
    rewards = np.array([1.0, 0.0, 0.5, 0.5])
    std = np.std(rewards) + STD_EPSILON
    np.testing.assert_allclose(group_advantages(rewards, "std"), (rewards - 0.5) / std, rtol=1e-6)
    np.testing.assert_allclose(group_advantages(rewards, "none"), rewards - 0.5, rtol=1e-6)


@pytest.mark.parametrize("norm", ["std", "none"])
@pytest.mark.parametrize(
    "rewards",
    [[0.7], [0.1] * 8, [NAN] * 4, [NAN, 1.0, NAN], [], [0.3, 0.3, NAN], [math.inf, 1.0]],
)
def test_no_signal_is_exactly_zero(rewards, norm):
    advantages = group_advantages(np.array(rewards), norm)
    assert advantages.shape == (len(rewards),) and not advantages.any()
    assert not has_signal(np.array(rewards))


def test_missing_reward_is_left_out_of_the_statistics():
    with_gap = group_advantages(np.array([1.0, NAN, 0.0]), "std")
    assert with_gap[1] == 0
    np.testing.assert_array_equal(with_gap[[0, 2]], group_advantages(np.array([1.0, 0.0]), "std"))


@given(
    st.lists(st.one_of(st.floats(width=32), st.sampled_from([0.0, 1.0])), min_size=1, max_size=16),
    st.sampled_from(["std", "none"]),
)
def test_advantages_are_always_finite(rewards, norm):
    advantages = group_advantages(np.array(rewards), norm)
    assert np.isfinite(advantages).all()
    if norm == "std":
        assert abs(advantages.sum()) <= 1e-3


# Sealing --------------------------------------------------------------------------------------


def group(group_id: int, samples: list[Sample], prompt=(5, 6, 7)) -> AcceptedGroup:
    seen = [v for s in samples for v in s.versions]
    return AcceptedGroup(group_id, group_arrays(prompt, samples), min(seen), max(seen))


def sample(n: int, reward: float | None, version: int = 3, logprob: float = -0.5) -> Sample:
    return Sample(list(range(10, 10 + n)), [logprob] * n, [version] * n, False, reward)


def sealed(groups, *, loss_norm="token", version=3) -> SealedBatch:
    return seal(groups, version=version, advantage_norm="std", loss_norm=loss_norm)


def test_layout_and_round_trip():
    batch = sealed([group(7, [sample(2, 1.0), sample(3, 0.0)]), group(9, [sample(1, 1.0)], (5,))])
    a = batch.arrays
    assert a["tokens"].tolist() == [5, 6, 7, 10, 11, 5, 6, 7, 10, 11, 12, 5, 10]
    assert a["sample_offsets"].tolist() == [0, 5, 11, 13]
    assert a["prompt_lens"].tolist() == [3, 3, 1]
    assert a["loss_mask"].tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 0, 1]
    assert a["versions"].tolist() == [-1, -1, -1, 3, 3, -1, -1, -1, 3, 3, 3, -1, 3]
    assert a["group_ids"].tolist() == [7, 7, 9]
    np.testing.assert_allclose(a["advantages"], [1.0, -1.0, 0.0], atol=1e-5)
    again = SealedBatch.from_bytes(batch.to_bytes())
    for name, array in again.arrays.items():
        np.testing.assert_array_equal(array, a[name])


def objective(batch: SealedBatch, losses: np.ndarray) -> float:
    return float((batch.arrays["weights"] * losses).sum())


def test_weights_give_the_mean_over_tokens():
    batch = sealed([group(1, [sample(2, 1.0), sample(6, 0.0)])])
    losses = np.arange(batch.n_tokens, dtype=np.float64)
    mask = batch.arrays["loss_mask"].astype(bool)
    assert objective(batch, losses) == pytest.approx(losses[mask].mean(), rel=1e-6)


def test_weights_give_the_mean_over_samples():
    batch = sealed([group(1, [sample(2, 1.0), sample(6, 0.0)])], loss_norm="sample")
    losses = np.arange(batch.n_tokens, dtype=np.float64)
    parts = np.split(np.where(batch.arrays["loss_mask"], losses, np.nan), [5])
    expected = np.mean([np.nanmean(p) for p in parts])
    assert objective(batch, losses) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("loss_norm", ["token", "sample"])
def test_weights_sum_to_one_or_zero(loss_norm):
    batch = sealed([group(1, [sample(2, 1.0), sample(3, 0.0)])], loss_norm=loss_norm)
    assert batch.arrays["weights"].sum() == pytest.approx(1.0, rel=1e-6)
    nothing = sealed([group(1, [sample(2, None), sample(3, None)])], loss_norm=loss_norm)
    assert not nothing.arrays["weights"].any() and not nothing.arrays["loss_mask"].any()
    assert nothing.meta["reward/mean"] is None and nothing.meta["reward/missing"] == 2


@pytest.mark.row("I6")
@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("loss_norm", ["token", "sample"])
def test_non_finite_logprobs_leave_loss_and_denominator(bad, loss_norm):
    broken = sample(3, 1.0)
    broken = Sample(broken.output_ids, [bad, -0.5, -0.5], broken.versions, False, 1.0)
    batch = sealed([group(1, [broken, sample(2, 0.0)])], loss_norm=loss_norm)
    a = batch.arrays
    assert a["loss_mask"][:6].tolist() == [0, 0, 0, 0, 1, 1]
    assert a["weights"][3] == 0 and a["weights"].sum() == pytest.approx(1.0, rel=1e-6)
    assert np.isfinite(a["logprobs"]).all()
    assert batch.meta["logprobs/non_finite"] == 1


@pytest.mark.row("I6")
def test_sample_without_reward_is_not_trained():
    batch = sealed([group(1, [sample(2, 1.0), sample(2, None), sample(2, 0.0)])])
    a = batch.arrays
    assert a["loss_mask"].reshape(3, 5)[1].sum() == 0 and a["advantages"][1] == 0
    assert np.isnan(a["rewards"][1])
    assert batch.meta["reward/mean"] == 0.5 and batch.meta["reward/missing"] == 1


def test_meta_counts_versions_from_sampling_to_training():
    spanning = Sample([1, 2], [-0.1, -0.1], [4, 5], False, 1.0)
    batch = sealed([group(1, [spanning, sample(2, 0.0, version=5)])], version=6)
    meta = batch.meta
    assert meta["policy_version"] == 6
    assert meta["policy_age/mean"] == pytest.approx((2 + 1 + 1 + 1) / 4)
    assert (meta["policy_age/max"], meta["min_version"], meta["max_version"]) == (2, 4, 5)
    assert (meta["response_tokens/mean"], meta["response_tokens/max"]) == (2.0, 2)
    assert meta["zero_signal/fraction"] == 0 and meta["groups"] == 1


@pytest.mark.row("C10")
def test_the_prefix_of_an_older_version_can_be_masked():
    spans = Sample([8] * 4, [-0.5] * 4, [3, 3, 4, 4], False, 1.0)
    groups = [group(0, [spans, sample(2, 0.0, version=3)])]
    off, on = (
        seal(
            groups,
            version=4,
            advantage_norm="std",
            loss_norm="token",
            newest_version_only=newest_version_only,
        )
        for newest_version_only in (False, True)
    )
    assert off.to_bytes() == sealed(groups, version=4).to_bytes()
    assert off.arrays["loss_mask"].tolist() == [0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1]
    assert on.arrays["loss_mask"].tolist() == [0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1]
    np.testing.assert_allclose(on.arrays["weights"], on.arrays["loss_mask"] / 4)
    assert on.arrays["logprobs"][3:7].tolist() == [0, 0, -0.5, -0.5]
    assert on.meta["policy_age/max"] == off.meta["policy_age/max"] == 1
    one_version = [group(0, [sample(3, 1.0), sample(2, 0.0), sample(0, 0.5)])]
    for_one = seal(
        one_version,
        version=3,
        advantage_norm="std",
        loss_norm="token",
        newest_version_only=True,
    )
    assert for_one.to_bytes() == sealed(one_version).to_bytes()


def test_empty_response_is_sealed():
    empty = AcceptedGroup(
        1, group_arrays((5,), [Sample([], [], [], False, 0.0), sample(1, 1.0)]), 3, 3
    )
    batch = sealed([empty])
    assert batch.lengths().tolist() == [1, 2]
    assert batch.arrays["loss_mask"].sum() == 1


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=6))
def test_weights_property(masks):
    mask = np.array([m for sample_mask in masks for m in sample_mask])
    owner = np.repeat(np.arange(len(masks)), [len(m) for m in masks])
    for norm in ("token", "sample"):
        weights = loss_weights(mask, owner, norm)
        assert (weights[~mask] == 0).all() and (weights[mask] > 0).all()
        assert weights.sum() == pytest.approx(1.0 if mask.any() else 0.0, rel=1e-5)
