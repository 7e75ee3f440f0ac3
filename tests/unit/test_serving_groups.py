"""Slots, groups and units: pure decisions."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from torchtitan_rl_ft.config.groups import engine_groups
from torchtitan_rl_ft.config.sections import EngineGroup, RolloutSection
from torchtitan_rl_ft.serving.duties import Duty
from torchtitan_rl_ft.serving.groups import GroupUnknown, chosen, shortage, slot_plans
from torchtitan_rl_ft.serving.unit import Unit

PREFILL = EngineGroup(name="p", role="prefill", engines=2)
DECODE = EngineGroup(name="d", role="decode", engines=4)
REFERENCE = EngineGroup(name="reference", role="frozen", model="/m", engines=2)


def rollout(*groups: EngineGroup, **fields: Any) -> RolloutSection:
    return RolloutSection(groups=list(groups), **fields)


def test_without_groups_every_slot_is_a_unit_of_the_policy() -> None:
    plans = slot_plans(RolloutSection(engines=3, standby_engines=1))
    assert [(p.slot, p.group.name, p.unit, p.first_device) for p in plans] == [
        (0, "policy", 0, 0),
        (1, "policy", 1, 1),
        (2, "policy", 2, 2),
        (3, "policy", 3, 3),
    ]
    assert [p.duty for p in plans] == [Duty.ACTIVE] * 3 + [Duty.STANDBY]


@pytest.mark.row("C11")
def test_halves_are_shared_out_to_units() -> None:
    plans = slot_plans(rollout(REFERENCE, PREFILL, DECODE))
    units = {p.slot: p.unit for p in plans}
    # Two units of one prefill and two decode engines.
    assert units == {0: 0, 1: 1, 2: 2, 3: 3, 4: 2, 5: 3, 6: 2, 7: 3}
    assert [p.takes_versions for p in plans] == [False] * 2 + [True] * 6


def test_a_request_chooses_among_groups_that_can_answer_it() -> None:
    groups = engine_groups(rollout(EngineGroup(name="a"), PREFILL, DECODE, REFERENCE))

    def names(name: str) -> list[str]:
        return [g.name for g in chosen(groups, name)]

    assert names("policy") == ["a", "p", "d"]
    assert names("a") == ["a"]
    assert names("p") == names("d") == ["p", "d"]
    assert names("reference") == ["reference"]
    with pytest.raises(GroupUnknown, match="group 'x' is unknown: a, d, p, policy, reference"):
        names("x")


@pytest.mark.parametrize(
    ("given_up", "floor", "missing"),
    [
        ([], 1, None),
        ([1], 1, None),  # one of two reference engines
        ([0, 1], 1, "no engine of group reference is left"),
        ([2, 4], 3, None),  # the unit of 3, 5 and 7 is whole
        ([2, 4], 4, "3 of 6 engines are left, rollout.min_engines is 4"),
        ([2, 3], 1, "0 of 6 engines are left, rollout.min_engines is 1"),  # decode alone
    ],
)
def test_shortage(given_up: list[int], floor: int, missing: str | None) -> None:
    plans = slot_plans(rollout(REFERENCE, PREFILL, DECODE))
    assert shortage(plans, given_up, floor) == missing


@pytest.mark.row("C11")
def test_a_generation_of_a_unit_ends_with_its_first_member() -> None:
    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

    async def check() -> None:
        unit = Unit()
        first: list[Any] = [Named("engine-0"), Named("engine-1"), Named("engine-2")]
        told = [unit.join(e) for e in first]
        unit.leave(first[1], "killed")
        # One that joins while the others are still on their way out is of the next generation.
        late: Any = Named("engine-1")
        its = unit.join(late)
        assert told[0].result() == "engine-1 of its unit was retired: killed"
        assert told[2].done() and not told[1].done()
        unit.leave(first[0], "with its unit")
        unit.leave(first[2], "with its unit")
        assert not its.done()

    asyncio.run(check())
