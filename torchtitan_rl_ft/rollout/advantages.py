"""Group-normalised advantages (GRPO, arXiv 2402.03300, section 4.1.2: outcome supervision)."""

from __future__ import annotations

from typing import Literal

import numpy as np

STD_EPSILON = 1e-6


def group_advantages(rewards: np.ndarray, norm: Literal["std", "none"]) -> np.ndarray:
    """Advantages of the samples of one prompt, [S] float32 from rewards [S].

    "std":  A_i = (r_i - mean(r)) / (std(r) + 1e-6), std over the group as a population;
    "none": A_i = r_i - mean(r), without the division that favours prompts of little spread
    (Dr. GRPO, arXiv 2503.20783, section 3.1).

    A missing reward (NaN or infinite) is left out of mean and std and gets 0. Where there is no
    signal (fewer than two rewards, or all equal) every advantage is exactly 0. Always finite.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    known = np.isfinite(rewards)
    values = rewards[known]
    advantages = np.zeros(rewards.shape, np.float64)
    # Equality is asked of the rewards: the mean of equal numbers may differ from them by a bit,
    # which a division by the equally tiny std would blow up.
    if len(values) >= 2 and values.min() != values.max():
        centred = values - values.mean()
        if norm == "std":
            centred = centred / (values.std() + STD_EPSILON)
        advantages[known] = centred
    return advantages.astype(np.float32)


def has_signal(rewards: np.ndarray) -> bool:
    """True when the group's advantages are not all zero."""
    return bool(np.any(group_advantages(rewards, "none")))
