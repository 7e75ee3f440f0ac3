"""Which slot belongs to which group of engines, and which slots are one unit. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torchtitan_rl_ft.config.groups import POLICY, engine_groups, takes_versions
from torchtitan_rl_ft.config.placement import engine_ranks
from torchtitan_rl_ft.config.sections import EngineGroup, RolloutSection
from torchtitan_rl_ft.serving.duties import Duty


@dataclass(frozen=True)
class SlotPlan:
    """What a slot is for. Slots of one `unit` are retired together; `first_device` is the number
    of its first accelerator on this node."""

    slot: int
    group: EngineGroup
    unit: int
    ranks: int
    first_device: int
    duty: Duty = Duty.ACTIVE
    external_url: str | None = None
    """Where the engine is, when it is somebody else's."""

    @property
    def takes_versions(self) -> bool:
        return takes_versions(self.group)


def slot_plans(rollout: RolloutSection) -> list[SlotPlan]:
    """One for every engine that is started, in the order of the groups; then standby engines, and
    those of others: they belong to the first regular group.

    A prefill and a decode group of p and d engines make gcd(p, d) units: requests stay inside of
    one, and the exit of a member ends all of them.
    """
    groups = engine_groups(rollout)
    wanted = [(g, Duty.ACTIVE) for g in groups for _ in range(g.engines)]
    regular = next((g for g in groups if g.role == "regular"), None)
    if regular is not None:
        wanted += [(regular, Duty.STANDBY)] * rollout.standby_engines
    found: list[SlotPlan] = []
    device = 0
    for slot, (group, duty) in enumerate(wanted):
        ranks = engine_ranks([*rollout.engine_args, *group.engine_args])
        found.append(SlotPlan(slot, group, _unit(slot, group, groups), ranks, device, duty))
        device += ranks
    return found + _external_plans(rollout, regular, len(found))


def _external_plans(
    rollout: RolloutSection, group: EngineGroup | None, first_slot: int
) -> list[SlotPlan]:
    if group is None:
        return []
    slots = enumerate(rollout.external_urls, start=first_slot)
    return [SlotPlan(i, group, i, 0, 0, Duty.EXTERNAL, url.rstrip("/")) for i, url in slots]


def _unit(slot: int, group: EngineGroup, groups: Sequence[EngineGroup]) -> int:
    """The slot of the unit's first engine."""
    if group.role not in ("prefill", "decode"):
        return slot
    halves = {g.role: g.engines for g in groups}
    units = math.gcd(halves["prefill"], halves["decode"])
    return _first_slot("prefill", groups) + (slot - _first_slot(group.role, groups)) % units


def _first_slot(role: str, groups: Sequence[EngineGroup]) -> int:
    first = 0
    for group in groups:
        if group.role == role:
            return first
        first += group.engines
    raise KeyError(role)


def shortage(plans: Sequence[SlotPlan], given_up: Collection[int], floor: int) -> str | None:
    """What is missing when the engines of the slots `given_up` never come back, or None.
    `floor` is `rollout.min_engines`."""
    usable = [p for p in plans if p.slot not in given_up]
    roles = {(p.unit, p.group.role) for p in usable}
    halves = {u for u, _ in roles if (u, "prefill") in roles and (u, "decode") in roles}
    policy = [
        p for p in usable if p.takes_versions and (p.group.role == "regular" or p.unit in halves)
    ]
    of_all = sum(p.takes_versions for p in plans)
    if len(policy) < floor:
        return f"{len(policy)} of {of_all} engines are left, rollout.min_engines is {floor}"
    for name in {p.group.name: None for p in plans if not p.takes_versions}:
        if not any(p.group.name == name for p in usable):
            return f"no engine of group {name} is left"
    return None


class GroupUnknown(Exception):
    """There is no group of that name; the message names those that there are."""


def chosen(groups: Sequence[EngineGroup], name: str) -> list[EngineGroup]:
    """The groups that a request for `name` may go to. "policy" is all that take the policy's
    versions; either half of disaggregated engines stands for both. Raises GroupUnknown."""
    if name == POLICY:
        return [g for g in groups if takes_versions(g)]
    found = next((g for g in groups if g.name == name), None)
    if found is None:
        known = sorted({POLICY, *(g.name for g in groups)})
        raise GroupUnknown(f"group {name!r} is unknown: {', '.join(known)}")
    if found.role in ("prefill", "decode"):
        return [g for g in groups if g.role in ("prefill", "decode")]
    return [found]
