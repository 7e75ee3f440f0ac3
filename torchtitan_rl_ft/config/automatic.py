"""Values that follow from others when nobody has set them. Pure."""

from __future__ import annotations

from typing import Any


def automatic_values(
    values: dict[str, dict[str, Any]], origins: dict[str, str]
) -> dict[str, tuple[Any, str]]:
    """ "section.key" -> (value, why)."""
    ft = values["fault_tolerance"]
    found: dict[str, tuple[Any, str]] = {}
    if ft["enable"]:
        if ft["group_size"] == 0:
            # TorchTitan multiplies by it: 0 would be a data-parallel world of none.
            found["fault_tolerance.group_size"] = (
                ft["replica_groups"],
                "fault_tolerance.replica_groups",
            )
        if ft["lighthouse_min_replicas"] == 0:
            found["fault_tolerance.lighthouse_min_replicas"] = (
                ft["min_replica_size"],
                "fault_tolerance.min_replica_size",
            )
        if origins["training.disable_cuda_graphs"] == "default":
            found["training.disable_cuda_graphs"] = (True, "fault_tolerance.enable")
    elif origins["fault_tolerance.replica_groups"] == "default":
        found["fault_tolerance.replica_groups"] = (1, "fault_tolerance.enable = false")
    rollout = values["rollout"]
    if rollout["groups"] and origins["rollout.engines"] == "default":
        engines = sum(g.get("engines", 1) for g in rollout["groups"] if g.get("role") != "frozen")
        found["rollout.engines"] = (engines, "rollout.groups, those that serve the policy")
    return found
