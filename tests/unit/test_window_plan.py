"""Who does what in a window: pure plans, and simulated groups that die at random."""

import random
from dataclasses import dataclass

import numpy as np
import pytest

from torchtitan_rl_ft.config.sections import FaultToleranceSection, RLSection
from torchtitan_rl_ft.config.windows import groups_per_batch
from torchtitan_rl_ft.trainer import window_plan
from torchtitan_rl_ft.trainer.coverage import Claim, CoverageError
from torchtitan_rl_ft.trainer.window_plan import Opening, inner_batches, plan

N = 24
CLAIM = Claim(7, "ab" * 16, "cd" * 32, N)
LENGTHS = np.random.default_rng(3).integers(3, 30, N)


def mask(*samples):
    m = np.zeros(N, dtype=bool)
    m[list(samples)] = True
    return m


def opened(*groups, claims=None):
    """The sum of the openings of `groups`: (done, unfit) by rank."""
    total = sum(
        window_plan.opening_vector(
            claims[rank] if claims else CLAIM,
            rank=rank,
            participants=len(groups),
            done=done,
            unfit=unfit,
            speaks=True,
        )
        for rank, (done, unfit) in enumerate(groups)
    )
    return window_plan.read_opening(total, CLAIM, len(groups))


def test_an_opening_tells_all_groups_what_each_has_done():
    found = opened((mask(1, 2), False), (mask(), True), (mask(5), False))
    assert np.flatnonzero(found.done[0]).tolist() == [1, 2]
    assert not found.done[1].any() and found.unfit.tolist() == [False, True, False]
    assert np.flatnonzero(found.done[2]).tolist() == [5]


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (Claim(8, CLAIM.token, CLAIM.digest, N), "disagree on the step"),
        (Claim(7, "ef" * 16, CLAIM.digest, N), "disagree on the history"),
        (Claim(7, CLAIM.token, "ee" * 32, N), "disagree on the batch"),
    ],
)
def test_groups_that_stand_elsewhere_are_found_before_any_work(other, says):
    with pytest.raises(CoverageError, match=says):
        opened((mask(), False), (mask(), False), claims=[CLAIM, other])


def test_a_group_that_abstains_is_seen_before_any_work():
    total = window_plan.opening_vector(
        CLAIM, rank=0, participants=2, done=mask(), unfit=False, speaks=True
    ) + window_plan.abstention(N, 2, speaks=True)
    with pytest.raises(CoverageError, match="abstained"):
        window_plan.read_opening(total, CLAIM, 2)


def test_a_fresh_window_is_split_evenly_and_whole():
    made = plan(Opening(np.zeros((3, N), bool), np.zeros(3, bool)), LENGTHS)
    assert made.keeps.all() and set(made.owner) == {0, 1, 2}
    tokens = [LENGTHS[made.owner == r].sum() for r in range(3)]
    assert max(tokens) <= 4 / 3 * min(tokens)


@pytest.mark.row("G9")
def test_survivors_do_only_what_the_lost_group_had_done():
    done = np.stack([mask(*range(8)), mask(*range(8, 16))])
    made = plan(Opening(done, np.zeros(2, bool)), LENGTHS)
    assert made.keeps.all()
    assert (made.owner[:16] == -1).all() and (made.owner[16:] >= 0).all()
    assert set(made.owner[16:]) == {0, 1}


@pytest.mark.row("G9")
def test_of_two_groups_with_a_common_sample_the_lower_rank_keeps_its_work():
    done = np.stack([mask(*range(12)), mask(*range(11, 20)), mask(20, 21)])
    made = plan(Opening(done, np.zeros(3, bool)), LENGTHS)
    assert made.keeps.tolist() == [True, False, True]
    assert (made.owner[12:20] >= 0).all() and (made.owner[20:22] == -1).all()


@pytest.mark.row("I2")
def test_a_group_with_bad_numbers_gets_nothing_unless_all_have():
    nothing = np.zeros((2, N), bool)
    assert set(plan(Opening(nothing, np.array([False, True])), LENGTHS).owner) == {0}
    assert set(plan(Opening(nothing, np.array([True, True])), LENGTHS).owner) == {0, 1}


@pytest.mark.parametrize(("participants", "sync_steps"), [(1, 4), (2, 4), (3, 2), (8, 1)])
def test_a_whole_share_takes_sync_steps_inner_steps(participants, sync_steps):
    made = plan(Opening(np.zeros((participants, N), bool), np.zeros(participants, bool)), LENGTHS)
    for rank in range(participants):
        share = np.flatnonzero(made.owner == rank)
        batches = inner_batches(share, LENGTHS, participants=participants, sync_steps=sync_steps)
        assert len(batches) == min(sync_steps, len(share))
        assert sorted(np.concatenate(batches)) == share.tolist()


def test_a_part_of_a_share_takes_fewer_inner_steps_not_larger_ones():
    half = np.arange(N // 4)
    batches = inner_batches(half, LENGTHS, participants=2, sync_steps=4)
    assert len(batches) == 2
    assert inner_batches(half[:0], LENGTHS, participants=2, sync_steps=4) == []


def test_a_sealed_batch_is_a_window():
    rl = RLSection(groups_per_step=6)
    assert groups_per_batch(rl, FaultToleranceSection(enable=True, sync_steps=4)) == 6
    ft = FaultToleranceSection(enable=True, semi_sync_method="diloco", sync_steps=4)
    assert groups_per_batch(rl, ft) == 24
    ft.enable = False
    assert groups_per_batch(rl, ft) == 6


# Groups that die, are wrong, and are kept apart, over many windows -------------------------------


@dataclass(eq=False)
class Group:
    """`local`, `base` [windows, N]: how often each sample is in the parameters."""

    local: np.ndarray
    base: np.ndarray
    done: np.ndarray
    window: int = 0

    def heal(self, window, base):
        self.window, self.base = window, base.copy()
        self.void()

    def void(self):
        self.local, self.done = self.base.copy(), mask()


class Simulation:
    """Attempts by random quorums under faults. `saved` is the checkpoint of the last commit."""

    def __init__(self, rng, n_groups, windows):
        self.rng = rng
        self.saved = (0, np.zeros((windows, N), dtype=int))
        self.groups = [self.fresh() for _ in range(n_groups)]
        self.kept_work = self.killed = 0

    def fresh(self):
        """A process that has nothing: it heals before it does anything."""
        empty = np.full_like(self.saved[1], -1)
        return Group(empty, empty, mask(), window=-1)

    def attempt(self):
        """One quorum: any part of the living groups, as a partition may leave it; the others keep
        what they have. The ledger lets none train below the tip."""
        quorum = self.rng.sample(self.groups, self.rng.randint(1, len(self.groups)))
        top = max(self.groups, key=lambda g: g.window)
        if top.window < self.saved[0]:
            top.heal(*self.saved)
        if top not in quorum:
            quorum[0] = top
        for g in quorum:
            if g.window < top.window:
                g.heal(top.window, top.base)
        self.kept_work += sum(int(g.done.sum()) for g in quorum)
        found = opened(*((g.done, False) for g in quorum))
        made = plan(found, LENGTHS)
        alive = [self.inner_steps(g, r, made, len(quorum)) for r, g in enumerate(quorum)]
        if all(alive) and self.rng.random() > 0.15:  # else the sums fail or a peer refuses
            self.sync(quorum)

    def inner_steps(self, g, rank, made, participants):
        if not made.keeps[rank]:
            g.void()
        todo = np.flatnonzero(made.owner == rank)
        for batch in inner_batches(todo, LENGTHS, participants=participants, sync_steps=4):
            if self.rng.random() < 0.05:
                self.groups[self.groups.index(g)] = self.fresh()
                self.killed += 1
                return False
            if self.rng.random() < 0.03:  # not finite: skipped, to be done by somebody
                continue
            g.local[g.window, batch] += 1
            g.done[batch] = True
        return True

    def sync(self, quorum):
        if not (np.sum([g.done for g in quorum], axis=0) == 1).all():
            return  # the proof fails
        base, window = quorum[0].base, quorum[0].window
        merged = base + sum(g.local - base for g in quorum)
        assert (merged[: window + 1] == 1).all() and (merged[window + 1 :] == 0).all()
        self.saved = (window + 1, merged)
        for g in quorum:
            assert g.window == window and (g.base == base).all()
            g.heal(*self.saved)


@pytest.mark.row("G9")
def test_every_sample_is_in_its_window_exactly_once_whatever_dies():
    kept_work = killed = 0
    for seed in range(60):
        rng, windows = random.Random(seed), 6
        world = Simulation(rng, rng.randint(2, 5), windows)
        for _ in range(3000):
            if world.saved[0] == windows:
                break
            world.attempt()
        assert world.saved[0] == windows
        kept_work, killed = kept_work + world.kept_work, killed + world.killed
    assert killed > 100 and kept_work > 1000  # the faults did happen
