"""Who does what in a window, as pure functions of what the groups have done so far.

At the start of every attempt the groups sum an *opening*: which samples of the window each has
trained on since the last commit, and whether each stands on the same state. From its sum all
compute the same plan, so no sample is done twice and none is left out, however many groups were
lost before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from torchtitan_rl_ft.journal.views import assignment
from torchtitan_rl_ft.trainer import coverage
from torchtitan_rl_ft.trainer.coverage import Claim

HEAD = coverage.Slot.BATCH_HASH + 1
"""The claim's slots, as in the proof of a step; flags [P] and masks [P, N] follow."""


@dataclass(frozen=True)
class Opening:
    """What all groups know after the sum; P groups by quorum rank, N samples."""

    done: np.ndarray  # bool [P, N]
    unfit: np.ndarray  # bool [P]: its numbers were not finite in this window


def opening_vector(
    claim: Claim, *, rank: int, participants: int, done: np.ndarray, unfit: bool, speaks: bool
) -> torch.Tensor:
    """This rank's part of the sum, float64 [HEAD + P * (1 + N)].

    `done` bool [N]; `speaks`: exactly one rank of the group speaks for it.
    """
    vector = np.zeros(HEAD + participants * (1 + claim.n_samples))
    if speaks:
        coverage.state(vector, claim)
        vector[HEAD + rank] = float(unfit)
        masks = vector[HEAD + participants :].reshape(participants, claim.n_samples)
        masks[rank] = done
    return torch.from_numpy(vector)


def abstention(n_samples: int, participants: int, *, speaks: bool) -> torch.Tensor:
    """The opening of a group that may not train: the others refuse before they do any work."""
    vector = torch.zeros(HEAD + participants * (1 + n_samples), dtype=torch.float64)
    vector[coverage.Slot.ABSTAINED] = float(speaks)
    return vector


def read_opening(total: torch.Tensor, claim: Claim, participants: int) -> Opening:
    """Raises CoverageError unless `participants` groups stand on this state with this batch."""
    v = total.cpu().numpy()
    coverage.require_one_state(v, claim, participants)
    masks = v[HEAD + participants :].reshape(participants, claim.n_samples)
    return Opening(masks > 0, v[HEAD : HEAD + participants] > 0)


@dataclass(frozen=True)
class Plan:
    """One attempt at a window, the same in all groups."""

    keeps: np.ndarray  # bool [P]: False: this group gives up what it has done
    owner: np.ndarray  # int [N]: rank of the group that does the sample now; -1: it is done

    def workers(self) -> list[int]:
        """Ranks of the groups that have something to do."""
        return np.unique(self.owner[self.owner >= 0]).tolist()


def plan(opening: Opening, lengths: np.ndarray) -> Plan:
    """`lengths` [N]: tokens per sample.

    A group's work is one delta, so it counts as a whole or not at all: of groups that did a common
    sample (they were apart for a while) the one with the lowest rank keeps its work. What is left
    is split by tokens among the groups whose numbers are finite, or among all if none's are.
    """
    participants, n = opening.done.shape
    taken = np.zeros(n, dtype=bool)
    keeps = np.zeros(participants, dtype=bool)
    for rank in range(participants):
        keeps[rank] = not (opening.done[rank] & taken).any()
        if keeps[rank]:
            taken |= opening.done[rank]
    workers = np.flatnonzero(~opening.unfit)
    if not len(workers):
        workers = np.arange(participants)
    owner = np.full(n, -1, dtype=np.int64)
    left = np.flatnonzero(~taken)
    owner[left] = workers[assignment(lengths[left], len(workers))]
    return Plan(keeps, owner)


def inner_batches(
    samples: np.ndarray, lengths: np.ndarray, *, participants: int, sync_steps: int
) -> list[np.ndarray]:
    """Samples of each inner step over a group's `samples`, even by tokens.

    A whole share takes `sync_steps` inner steps. What is left after a loss takes as many as keep
    an inner step no larger than that, rounded up.
    """
    if not len(samples):
        return []
    # ceil(samples x sync_steps / whole share)
    needed = -(-len(samples) * sync_steps * participants // len(lengths))
    steps = min(len(samples), sync_steps, needed)
    of = assignment(lengths[samples], steps)
    return [samples[of == i] for i in range(steps)]
