"""The coverage proof: which sums prove a step, and which refuse it."""

import numpy as np
import pytest
import torch

from torchtitan_rl_ft.trainer import coverage
from torchtitan_rl_ft.trainer.coverage import Claim, CoverageError

CLAIM = Claim(step=7, token="ab" * 16, digest="cd" * 32, n_samples=10)


def vector(samples, claim=CLAIM, rank=0, nonce=5, speaks=True, nonfinite=False, loss=0.5):
    return coverage.fill(
        claim,
        np.array(samples, dtype=np.int64),
        rank=rank,
        nonce=nonce,
        speaks=speaks,
        nonfinite=nonfinite,
        loss=loss,
        stats=torch.arange(6, dtype=torch.float64),
    )


def test_every_sample_once_proves_the_step():
    total = vector(range(4)) + vector(range(4, 10), rank=1, nonce=6)
    outcome = coverage.check(total, CLAIM, 2)
    assert outcome.groups == 2
    assert outcome.nonce == 11
    assert outcome.loss == 1.0
    assert outcome.owners.tolist() == [0] * 4 + [1] * 6
    assert list(outcome.stats) == [0, 2, 4, 6, 8, 10]


def test_an_empty_view_takes_part():
    coverage.check(vector(range(10)) + vector([]), CLAIM, 2)


def test_ranks_of_a_group_count_as_one_group():
    total = vector(range(5)) + vector(range(5, 10), speaks=False)
    assert coverage.check(total, CLAIM, 1).groups == 1


@pytest.mark.parametrize(
    ("total", "participants", "says"),
    [
        (vector(range(9)), 1, "not trained exactly once"),
        (vector([*range(10), 3]), 1, "sample 3, 2 times"),
        (vector(range(5)) + vector(range(6), rank=1), 2, "not trained exactly once"),
        (vector(range(10)), 2, "1 of 2 groups"),
        (
            vector(range(5)) + vector(range(5, 10), Claim(8, CLAIM.token, CLAIM.digest, 10)),
            2,
            "disagree on the step",
        ),
        (
            vector(range(5)) + vector(range(5, 10), Claim(7, "ef" * 16, CLAIM.digest, 10)),
            2,
            "disagree on the history",
        ),
        (
            vector(range(5)) + vector(range(5, 10), Claim(7, CLAIM.token, "ee" * 32, 10)),
            2,
            "disagree on the batch",
        ),
        (vector(range(10)) + coverage.abstain(10, speaks=True), 2, "abstained"),
    ],
)
def test_everything_else_refuses(total, participants, says):
    with pytest.raises(CoverageError, match=says):
        coverage.check(total, CLAIM, participants)


def test_nonfinite_numbers_are_flagged_and_do_not_spread():
    total = vector(range(10), nonfinite=True, loss=float("nan"))
    outcome = coverage.check(total, CLAIM, 1)
    assert outcome.nonfinite == 1
    assert outcome.loss == 0.0


def test_hash_sums_are_exact_for_many_groups():
    claim = Claim(2**20, "ff" * 16, "ff" * 32, 1)
    groups = 4096
    total = vector([0], claim) + (groups - 1) * vector([], claim)
    coverage.check(total, claim, groups)
