"""What each replica group trained of a step, for the commit's record."""

from __future__ import annotations

import numpy as np

from torchtitan_rl_ft.journal.records import Share
from torchtitan_rl_ft.replica.group import Quorum, trainer_name


def shares(quorum: Quorum, owners: np.ndarray, lengths: np.ndarray) -> tuple[Share, ...]:
    """One share per participant, in the order of their ranks.

    `owners` [N] are the ranks that trained the samples (the coverage proof's), `lengths` [N] the
    samples' tokens.
    """
    n = quorum.participants
    samples = np.bincount(owners, minlength=n)
    tokens = np.bincount(owners, weights=lengths, minlength=n)
    return tuple(
        Share(trainer_name(member), int(samples[rank]), int(tokens[rank]))
        for rank, member in enumerate(quorum.members[:n])
    )
