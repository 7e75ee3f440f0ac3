"""A share of a sealed batch: whole prompt groups, weights normalised anew. Pure."""

from __future__ import annotations

from typing import Literal

import numpy as np

from torchtitan_rl_ft.journal.dump_files import SAMPLE_INDICES
from torchtitan_rl_ft.journal.records import SealedBatch
from torchtitan_rl_ft.rollout.sealing import loss_weights

_PER_SAMPLE = ("prompt_lens", "advantages", "rewards", "group_ids")
_PER_TOKEN = ("tokens", "logprobs", "loss_mask", "versions")


def subsample(
    batch: SealedBatch,
    share: float,
    *,
    seed: int,
    step: int,
    loss_norm: Literal["token", "sample"],
) -> SealedBatch:
    """`share` of the prompt groups, at least one, drawn by (seed, step), in their order.

    Advantages are those of the whole groups; the loss weights sum up as in a whole batch.
    `share` = 1 gives the very batch.
    """
    if share == 1:
        return batch
    a = batch.arrays
    groups = np.unique(a["group_ids"])
    count = max(1, round(share * len(groups)))
    kept = np.random.default_rng([seed, step]).choice(groups, count, replace=False)
    samples = np.flatnonzero(np.isin(a["group_ids"], kept))
    lengths = batch.lengths()
    tokens = np.isin(np.repeat(np.arange(batch.n_samples), lengths), samples)
    arrays = {name: a[name][samples] for name in _PER_SAMPLE}
    arrays |= {name: a[name][tokens] for name in _PER_TOKEN}
    arrays["sample_offsets"] = np.concatenate([[0], np.cumsum(lengths[samples])]).astype(np.int64)
    sample_of = np.repeat(np.arange(len(samples)), lengths[samples])
    arrays["weights"] = loss_weights(arrays["loss_mask"] > 0, sample_of, loss_norm)
    judged = arrays["rewards"][np.isfinite(arrays["rewards"])].astype(np.float64)
    meta = batch.meta | {
        "groups": count,
        "reward/mean": float(judged.mean()) if len(judged) else None,
        "reward/std": float(judged.std()) if len(judged) else None,
        "reward/missing": len(samples) - len(judged),
        SAMPLE_INDICES: samples.tolist(),
    }
    return SealedBatch(batch.batch_id, arrays, meta)
