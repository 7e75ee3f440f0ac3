"""The engine groups of a job, as `[[rollout.groups]]` or `rollout.engines` give them."""

from __future__ import annotations

from collections.abc import Sequence

from torchtitan_rl_ft.config.sections import EngineGroup, RolloutSection

POLICY = "policy"
"""Names all groups that take the policy's versions; the default of a request."""


def engine_groups(rollout: RolloutSection) -> list[EngineGroup]:
    """The groups in order. Without a table: one regular group of `rollout.engines`."""
    return list(rollout.groups) or [EngineGroup(name=POLICY, engines=rollout.engines)]


def takes_versions(group: EngineGroup) -> bool:
    """Whether engines of the group are given the policy's versions."""
    return group.role != "frozen"


def policy_engines(groups: Sequence[EngineGroup]) -> int:
    """Engines that are given the policy's versions."""
    return sum(g.engines for g in groups if takes_versions(g))
