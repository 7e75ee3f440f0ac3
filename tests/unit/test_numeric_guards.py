"""Anomalies, replica hashes, and the verdicts of computing a result again: pure decisions."""

import math

import numpy as np
import pytest
import torch

from torchtitan_rl_ft.observability.events import EventList, Kind
from torchtitan_rl_ft.replica.group import Quorum
from torchtitan_rl_ft.trainer import coverage
from torchtitan_rl_ft.trainer.anomalies import AnomalyWatch
from torchtitan_rl_ft.trainer.attempt import OWN_COLUMNS, Result, measure
from torchtitan_rl_ft.trainer.numeric_watch import NumericWatch
from torchtitan_rl_ft.trainer.rerun import (
    Disputed,
    Finding,
    Rerun,
    Share,
    Verdict,
    WrongResult,
    judge,
    read,
)
from torchtitan_rl_ft.trainer.state_hashes import differences, hashes, tensor_hash

# Anomalies ----------------------------------------------------------------------------------


def watch(loss=True, gradients=True, **keys) -> AnomalyWatch:
    limits = {"factor": 10.0, "warmup_steps": 5, "degree": 2, **keys}
    return AnomalyWatch(loss=loss, gradients=gradients, **limits)


def look(w: AnomalyWatch, loss: float, norm: float):
    return w.look(loss, norm, [loss / 4, 0, loss, 0], [norm / 4, 0, 0, norm])


@pytest.mark.row("I3")
def test_a_value_far_above_the_steps_before_is_told_with_its_rank():
    w = watch()
    assert not [a for _ in range(20) for a in look(w, -0.1, 1.0)]
    spiky, large = look(w, -10.0, 1000.0)
    assert (spiky.what, spiky.place) == ("loss", "group 1, rank 0")
    assert (large.what, large.place) == ("gradient norm", "group 1, rank 1")
    assert "1000.0 times" in str(large)
    assert not look(w, 0.1, 1.0), "one spike is not what the next steps are measured by"


@pytest.mark.row("I3")
def test_the_warm_up_is_not_told_and_switched_off_is_silent():
    assert not [a for i in range(5) for a in look(watch(warmup_steps=6), 10.0**i, 10.0**i)]
    w = watch(loss=False, gradients=False)
    assert not [a for i in range(30) for a in look(w, 1000.0**i, 1000.0**i)]


def test_a_level_that_stays_is_the_new_normal():
    w = watch()
    for _ in range(10):
        look(w, 0.1, 1.0)
    told = [bool(look(w, 0.1, 100.0)) for _ in range(12)]
    assert told[0] and not any(told[5:])


# Hashes -------------------------------------------------------------------------------------


@pytest.mark.row("I7")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_any_flipped_bit_changes_the_hash(dtype):
    tensor = torch.arange(1, 1000).to(dtype).reshape(27, 37)
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    before = tensor_hash(tensor)
    for bit in range(8 * tensor.element_size() - 1):
        flipped = tensor.clone()
        flipped.view(kind)[3, 5] ^= 1 << bit
        assert tensor_hash(flipped) != before, bit
    assert tensor_hash(tensor.t()) == tensor_hash(tensor.t().contiguous())
    assert tensor_hash(torch.zeros(0)) == 0
    assert 0 <= before < 2**40


def table(*groups: dict[str, torch.Tensor]) -> np.ndarray:
    return np.stack([hashes(g) for g in groups])


@pytest.mark.row("I7")
def test_a_group_that_differs_from_the_majority_is_named_with_the_tensor():
    right = {"wq": torch.ones(4), "wo": torch.zeros(4)}
    wrong = {"wq": torch.ones(4), "wo": torch.full((4,), 1e-9)}
    assert not differences(table(right, right), ["wq", "wo"], 1)
    (found,) = differences(table(wrong, right, right), ["wq", "wo"], 1)
    assert (found.name, found.groups, found.majority) == ("wo", (0,), True)
    (found,) = differences(table(right, wrong), ["wq", "wo"], 1)
    assert (found.groups, found.majority) == ((1,), False)
    ranks = table(right, right, right, wrong)  # two groups of two ranks
    (found,) = differences(ranks, ["wq", "wo"], 2)
    assert (found.name, found.rank, found.groups) == ("wo", 1, (1,))


# Computing again ----------------------------------------------------------------------------

RIGHT, WRONG, OTHER = Share(0.5, 4.0, 1.0), Share(0.75, 9.0, 1.5), Share(0.6, 5.0, 1.2)
NAN = Share(math.nan, math.nan, math.nan, finite=False)


@pytest.mark.row("I5")
@pytest.mark.parametrize(
    ("first", "again", "verdicts"),
    [
        # share 0 computed by groups 0 and 1, then by all
        ((RIGHT, WRONG), (RIGHT, RIGHT, RIGHT), [(Verdict.TRANSIENT, (1,))]),
        ((WRONG, RIGHT), (RIGHT, RIGHT), [(Verdict.TRANSIENT, (0,))]),
        ((WRONG, RIGHT), (WRONG, RIGHT, RIGHT), [(Verdict.PERSISTENT, (0,))]),
        ((RIGHT, WRONG), (RIGHT, OTHER, RIGHT), [(Verdict.PERSISTENT, (1,))]),
        ((NAN, RIGHT), (NAN, RIGHT, RIGHT), [(Verdict.PERSISTENT, (0,))]),
        ((NAN, RIGHT), (RIGHT, RIGHT), [(Verdict.TRANSIENT, (0,))]),
        ((WRONG, RIGHT), (WRONG, RIGHT), [(Verdict.UNDECIDED, (0, 1))]),
        ((RIGHT, RIGHT), (RIGHT, RIGHT), []),
    ],
)
def test_verdicts(first, again, verdicts):
    found = judge({0: dict(enumerate(first))}, {0: dict(enumerate(again))})
    assert [(f.verdict, f.groups) for f in found] == verdicts


def test_another_summation_order_is_the_same_result():
    near = Share(0.5 * (1 + 1e-6), 4.0 * (1 - 1e-6), 1.0 + 1e-6)
    assert RIGHT.same(near) and near.same(RIGHT) and not RIGHT.same(WRONG)
    assert RIGHT.difference(near) < 1e-6 < RIGHT.difference(WRONG)
    assert RIGHT.difference(NAN) == math.inf


class Groups:
    """Groups that compute shares on a board, wrong where `wrong(group, share)` says so."""

    def __init__(self, count: int, mode="validate_results", interval=1):
        self.members = [f"g{i}:x" for i in range(count)]
        self.reruns = [Rerun(mode, interval, 1) for _ in self.members]

    def attempt(self, step: int, wrong=lambda group, share: False):
        board = np.zeros((len(self.members), self.reruns[0].columns(len(self.members))))
        for rank, rerun in enumerate(self.reruns):
            shares = [rank, *rerun.shares(step, self.members, rank)]
            made = {s: WRONG if wrong(rank, s) else RIGHT for s in shares}
            board[rank] = rerun.row(len(self.members), made)
        told = []
        for rerun in self.reruns:
            try:
                told.append(rerun.look(step, self.members, board))
            except Disputed as e:
                told.append(str(e))
        assert all(t == told[0] for t in told), "all groups come to the same end"
        return told[0]


@pytest.mark.row("I5")
def test_each_share_is_computed_twice_and_disputed_ones_by_all():
    groups = Groups(3)
    assert groups.attempt(1) == []
    assert "groups [1, 2] disagree" in groups.attempt(2, lambda g, s: (g, s) == (1, 1))
    (found,) = groups.attempt(2)
    assert found == Finding(Verdict.TRANSIENT, 1, (1,))
    assert "disagree" in groups.attempt(3, lambda g, s: g == 2)
    found = groups.attempt(3, lambda g, s: g == 2)
    assert {(f.verdict, f.groups) for f in found} == {(Verdict.PERSISTENT, (2,))}


@pytest.mark.row("I5")
def test_reports_only_count_and_one_group_has_nobody_to_ask():
    groups = Groups(2, mode="report_stats")
    assert groups.attempt(1, lambda g, s: g == 1) == []
    board = np.zeros((2, 10))
    board[0] = groups.reruns[0].row(2, {0: RIGHT, 1: RIGHT})
    board[1] = groups.reruns[1].row(2, {1: WRONG, 0: RIGHT})
    assert groups.reruns[0].largest_difference(board) == pytest.approx(1 / 3)
    assert Groups(1).reruns[0].shares(1, ["g0"], 0) == []
    assert Groups(2, interval=5).reruns[0].shares(4, ["a", "b"], 0) == []


def test_other_members_are_no_arbitration():
    groups = Groups(3)
    groups.attempt(2, lambda g, s: g == 1)
    assert groups.reruns[0].shares(2, ["g0:x", "g2:x"], 0) == [1]


def test_ranks_of_a_group_add_up():
    rows = [Rerun("validate_results", 1, 2).row(1, {0: s}) for s in (RIGHT, RIGHT)]
    assert read(np.stack(rows), 2)[0][0] == Share(1.0, 8.0, 2.0)


def test_what_a_rank_measures():
    grads = [torch.tensor([3.0, 0.0]), torch.zeros(0), torch.tensor([[4.0]])]
    assert measure(0.5, grads, with_total=True) == Share(0.5, 25.0, 7.0)
    assert not measure(0.5, [torch.tensor([math.inf])], with_total=False).finite
    assert measure(math.nan, [], with_total=False).finite is False


# The watch ----------------------------------------------------------------------------------

QUORUM = Quorum(2, 0, 1, ["a:1", "b:2"])


def numbers(rerun=None):
    events = EventList()
    return NumericWatch(events, watch(), lambda: ("wq", 0.5), rerun), events


def result(findings=(), differing=(), board=None) -> Result:
    board = np.ones((2, OWN_COLUMNS)) if board is None else board
    outcome = coverage.Outcome(2, 1, 0, 0.5, np.ones(6), np.zeros(0), board=board)
    return Result(False, "", False, outcome, 1.0, tuple(findings), tuple(differing))


@pytest.mark.row("I5")
def test_the_group_that_is_wrong_goes_and_the_others_stay():
    bad = [Finding(Verdict.PERSISTENT, 0, (1,))]
    w, events = numbers()
    assert w.refused(3, QUORUM, result(bad)) is False
    assert events.events[0]["verdict"] == "persistent_error"
    assert events.events[0]["subject"] == "b"
    other, silent = numbers()
    with pytest.raises(WrongResult, match="persistent_error of b"):
        other.refused(3, Quorum(2, 1, 1, QUORUM.members), result(bad))
    assert not silent.events, "the first group of the quorum tells"


@pytest.mark.row("I7")
def test_the_rank_that_differs_is_healed():
    names = ["wq"]
    found = differences(np.array([[1.0], [2.0]]), names, 1)
    w, events = numbers()
    assert w.refused(3, QUORUM, result(differing=found)) is False
    assert events.events[0]["kind"] == Kind.FAULT and "wq" in events.events[0]["cause"]
    w, _ = numbers()
    assert w.refused(3, Quorum(2, 1, 1, QUORUM.members), result(differing=found)) is True
