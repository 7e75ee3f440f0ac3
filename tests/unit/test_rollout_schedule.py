"""Which policy rolls out which step's samples, and what is too old."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl_ft.journal.records import GENESIS
from torchtitan_rl_ft.rollout.schedule import (
    Policy,
    Rules,
    Waiting,
    choose,
    known_policy,
    version_at,
    wanted,
)


def rules(mode="sync", age=0, groups=4, steps=100, start_fraction=0.5) -> Rules:
    return Rules(mode, start_fraction, age, groups, steps)


def test_sync_wants_one_batch_of_the_newest_policy():
    assert wanted(rules(), Policy(1, 0), planned_steps=0) == 4
    assert wanted(rules(), Policy(1, 0), planned_steps=1) == 0  # sealed, being trained
    assert wanted(rules(), Policy(7, 5), planned_steps=6) == 0  # step 6 committed, unpublished
    assert wanted(rules(), Policy(8, 6), planned_steps=6) == 4


def test_sync_ignores_a_larger_age():
    assert rules(age=3).max_age == 0


def test_async_wants_as_far_ahead_as_the_age_allows():
    assert wanted(rules("async", 2), Policy(1, 0), planned_steps=0) == 12
    assert wanted(rules("async", 2), Policy(1, 0), planned_steps=2) == 4
    assert wanted(rules("async", 2), Policy(1, 0), planned_steps=3) == 0


def test_semi_async_prefetches_only_what_may_be_old():
    assert wanted(rules("semi_async", 1), Policy(1, 0), planned_steps=0) == 4 + 2
    assert wanted(rules("semi_async", 1), Policy(1, 0), planned_steps=1) == 2
    assert wanted(rules("semi_async", 1, start_fraction=1.0), Policy(1, 0), 1) == 0


def test_nothing_is_wanted_beyond_the_last_step():
    assert wanted(rules("async", 9, steps=2), Policy(1, 0), planned_steps=1) == 4
    assert wanted(rules("async", 9, steps=2), Policy(1, 0), planned_steps=2) == 0


def test_policy_on_the_chain_keeps_its_step():
    assert known_policy(4, 1, "b", [GENESIS, "b", "c"]) == Policy(4, 1)
    assert version_at(Policy(4, 1), 2) == 5


def test_policy_of_another_history_is_behind_the_tip():
    """The tip will be published anew, as the next version."""
    for step, token in ((2, "x"), (9, "y"), (1, "z")):
        policy = known_policy(9, step, token, [GENESIS, "b", "c"])
        assert version_at(policy, 2) == 10
        assert wanted(rules(), policy, planned_steps=2) == 0
    assert version_at(known_policy(3, 4, "x", [GENESIS]), 0) == 4


def test_choose_takes_older_groups_first_and_whole_batches_only():
    waiting = [Waiting(i, 5) for i in (9, 2, 4)]
    assert choose(rules("async", 1), waiting, 5).seal == ()
    waiting += [Waiting(1, 5), Waiting(7, 4)]
    assert choose(rules("async", 1), waiting, 5).seal == (1, 2, 4, 7)


def test_choose_demands_fresh_groups():
    semi = rules("semi_async", 1)
    stale = [Waiting(i, 4) for i in range(4)]
    assert choose(semi, stale, 5).seal == ()
    assert choose(semi, [*stale, Waiting(10, 5)], 5).seal == ()
    assert choose(semi, [*stale, Waiting(10, 5), Waiting(11, 5)], 5).seal == (0, 1, 10, 11)


def test_choose_names_the_too_old():
    choice = choose(rules(), [Waiting(1, 4), Waiting(2, 5)], 5)
    assert choice.too_old == (1,) and choice.seal == ()


@given(
    st.sampled_from(["sync", "semi_async", "async"]),
    st.integers(1, 4),
    st.integers(1, 6),
    st.floats(0, 1),
    st.lists(st.integers(0, 10), max_size=40),
    st.integers(0, 10),
)
def test_choice_is_never_too_old_nor_short_of_fresh(mode, age, groups, fraction, versions, now):
    r = rules(mode, age, groups, start_fraction=fraction)
    waiting = [Waiting(i, v) for i, v in enumerate(versions) if v <= now]
    choice = choose(r, waiting, now)
    by_id = {w.group_id: w.min_version for w in waiting}
    assert len(choice.seal) in (0, groups) and len(set(choice.seal)) == len(choice.seal)
    assert all(now - by_id[i] <= r.max_age for i in choice.seal)
    assert all(now - by_id[i] > r.max_age for i in choice.too_old)
    if choice.seal:
        assert sum(by_id[i] == now for i in choice.seal) >= r.fresh_needed


@given(
    st.sampled_from(["sync", "semi_async", "async"]), st.integers(1, 4), st.integers(1, 6),
    st.integers(0, 5), st.floats(0, 1),
)  # fmt: skip
def test_what_is_wanted_can_be_sealed(mode, age, groups, ahead, fraction):
    """Groups rolled out now for as many as are wanted fill their batches without a drop."""
    r = rules(mode, age, groups, start_fraction=fraction)
    policy, planned = Policy(10, 5), 5 + ahead
    stock = [Waiting(i, 10) for i in range(wanted(r, policy, planned))]
    while stock:
        version = version_at(policy, planned)
        fresh = [Waiting(1000 + 100 * planned + i, version) for i in range(r.fresh_needed)]
        if version == 10:
            fresh = []
        choice = choose(r, stock + fresh, version)
        assert choice.too_old == () and choice.seal
        stock = [w for w in stock if w.group_id not in choice.seal]
        planned += 1
