"""Accepted prompt groups into a sealed batch: advantages, masks, loss weights, ages. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from torchtitan_rl_ft.journal.records import SealedBatch
from torchtitan_rl_ft.rollout.advantages import group_advantages, has_signal

# Arrays of an accepted group in the journal; S samples, T tokens over the group's samples.
GROUP_ARRAYS: dict[str, Any] = {
    "tokens": np.int32,  # [T] prompt then response of each sample
    "sample_offsets": np.int64,  # [S + 1]
    "prompt_lens": np.int32,  # [S]
    "logprobs": np.float32,  # [T] 0 on prompts; may be NaN where the engine said so
    "versions": np.int32,  # [T] -1 on prompts
    "rewards": np.float32,  # [S] NaN where there is none
    "truncated": np.uint8,  # [S] 1: cut at the length limit
}


@dataclass(frozen=True)
class Sample:
    """One response as the engine gave it."""

    output_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]  # per token
    truncated: bool
    reward: float | None


def group_arrays(prompt_ids: Sequence[int], samples: Sequence[Sample]) -> dict[str, np.ndarray]:
    """GROUP_ARRAYS of one prompt group."""
    n = len(prompt_ids)
    tokens, logprobs, versions, lengths = [], [], [], []
    for s in samples:
        tokens += [*prompt_ids, *s.output_ids]
        logprobs += [*[0.0] * n, *s.logprobs]
        versions += [*[-1] * n, *s.versions]
        lengths.append(n + len(s.output_ids))
    arrays = {
        "tokens": tokens,
        "sample_offsets": np.concatenate([[0], np.cumsum(lengths)]),
        "prompt_lens": [n] * len(samples),
        "logprobs": logprobs,
        "versions": versions,
        "rewards": [np.nan if s.reward is None else s.reward for s in samples],
        "truncated": [s.truncated for s in samples],
    }
    return {k: np.asarray(v, dtype=GROUP_ARRAYS[k]) for k, v in arrays.items()}


@dataclass(frozen=True)
class AcceptedGroup:
    group_id: int
    arrays: dict[str, np.ndarray]  # GROUP_ARRAYS
    min_version: int  # oldest policy version that sampled one of its tokens
    max_version: int


def seal(
    groups: Sequence[AcceptedGroup],
    *,
    version: int,
    advantage_norm: Literal["std", "none"],
    loss_norm: Literal["token", "sample"],
    newest_version_only: bool = False,
) -> SealedBatch:
    """The batch of `groups`, to be trained by the policy that `version` names.

    The journal gives it its number. Samples without a reward and tokens without a finite
    log-prob are masked out: of the loss and of its denominator. With `newest_version_only` so is
    the part of a sample that an older version sampled than its newest tokens.
    """
    arrays = {
        name: np.concatenate([g.arrays[name] for g in groups])
        for name in ("tokens", "prompt_lens", "logprobs", "versions", "rewards")
    }
    lengths = np.concatenate([np.diff(g.arrays["sample_offsets"]) for g in groups])
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    sample_of = np.repeat(np.arange(len(lengths)), lengths)  # [T]
    position = np.arange(offsets[-1]) - offsets[sample_of]

    response = position >= arrays["prompt_lens"][sample_of]
    finite = np.isfinite(arrays["logprobs"])
    judged = np.isfinite(arrays["rewards"])
    mask = response & finite & judged[sample_of]
    if newest_version_only:
        newest = np.full(len(lengths), -1, np.int32)
        np.maximum.at(newest, sample_of, arrays["versions"])
        mask &= arrays["versions"] == newest[sample_of]
    arrays["logprobs"] = np.where(mask, arrays["logprobs"], 0.0).astype(np.float32)
    arrays |= {
        "sample_offsets": offsets,
        "loss_mask": mask.astype(np.uint8),
        "weights": loss_weights(mask, sample_of, loss_norm),
        "advantages": np.concatenate(
            [group_advantages(g.arrays["rewards"], advantage_norm) for g in groups]
        ),
        "group_ids": np.repeat(
            [g.group_id for g in groups], [len(g.arrays["rewards"]) for g in groups]
        ),
    }
    bad_logprobs = int((response & ~finite).sum())
    return SealedBatch(0, arrays, _meta(groups, arrays, response, version, bad_logprobs))


def loss_weights(
    mask: np.ndarray, sample_of: np.ndarray, norm: Literal["token", "sample"]
) -> np.ndarray:
    """Weights w, [T] float32, such that the objective of the batch is sum_t w_t l_t.

    "token": the mean over all trained tokens of the batch (DAPO, arXiv 2503.14476, eq. 8);
    "sample": the mean over samples of the mean over a sample's tokens (GRPO, arXiv 2402.03300,
    eq. 3). Samples without a trained token do not count. All zero when nothing is trained.
    """
    weights = mask.astype(np.float64)
    if norm == "sample":
        per_sample = np.bincount(sample_of, weights=weights)
        weights = weights / np.maximum(per_sample[sample_of], 1.0)
        total = np.count_nonzero(per_sample)
    else:
        total = weights.sum()
    return (weights / max(total, 1)).astype(np.float32)


def _meta(
    groups: Sequence[AcceptedGroup],
    arrays: dict[str, np.ndarray],
    response: np.ndarray,
    version: int,
    bad_logprobs: int,
) -> dict[str, Any]:
    """Batch statistics. Ages are in policy versions, of tokens where a group spans several."""
    rewards = arrays["rewards"][np.isfinite(arrays["rewards"])].astype(np.float64)
    ages = version - arrays["versions"][response].astype(np.float64)
    lengths = np.diff(arrays["sample_offsets"]) - arrays["prompt_lens"]
    truncated = np.concatenate([g.arrays["truncated"] for g in groups])
    return {
        "reward/mean": _mean(rewards),
        "reward/std": float(rewards.std()) if len(rewards) else None,
        "reward/missing": int(len(arrays["rewards"]) - len(rewards)),
        "policy_version": version,
        "policy_age/mean": _mean(ages),
        "policy_age/max": int(version - min(g.min_version for g in groups)),
        "response_tokens/mean": _mean(lengths),
        "response_tokens/max": int(lengths.max(initial=0)),
        "truncated/fraction": _mean(truncated),
        "zero_signal/fraction": _mean(
            np.array([not has_signal(g.arrays["rewards"]) for g in groups])
        ),
        "logprobs/non_finite": bad_logprobs,
        "groups": len(groups),
        "min_version": min(g.min_version for g in groups),
        "max_version": max(g.max_version for g in groups),
    }


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None
