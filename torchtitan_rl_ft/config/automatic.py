"""Values that follow from others when nobody has set them. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torchtitan_rl_ft.config.debug_mode import DEFAULT_DUMPS, DebugMode


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
    if rollout["groups"] and origins["rollout.engines"].startswith(("default", "registry ")):
        engines = sum(g.get("engines", 1) for g in rollout["groups"] if g.get("role") != "frozen")
        found["rollout.engines"] = (engines, "rollout.groups, those that serve the policy")
    return found | _debug_values(rollout, origins)


def splittable_groups(values: Mapping[str, Mapping[str, Any]]) -> int | None:
    """With recovery.decrease_batch_size_if_needed: the largest smaller `rl.groups_per_step` whose
    batch the layout can split. None: nothing to change, or the rules have to refuse the batch."""
    rl, ft = values["rl"], values["fault_tolerance"]
    groups, samples = rl["groups_per_step"], rl["samples_per_prompt"]
    if not values["recovery"]["decrease_batch_size_if_needed"] or groups < 1 or samples < 1:
        return None
    parts = data_parallel_parts(ft["replica_groups"], ft["ranks_per_group"], values["parallelism"])
    step = parts // math.gcd(parts, samples) if parts > 0 else 1
    fitting = groups // step * step
    return None if fitting in (0, groups) else fitting


def data_parallel_parts(
    replica_groups: int, ranks_per_group: int, parallelism: Mapping[str, Any]
) -> int:
    """Parts into which a batch is split: replica groups times data-parallel ranks."""
    model_parallel = math.prod(
        parallelism[f"{name}_parallel_degree"] for name in ("context", "tensor", "pipeline")
    )
    return replica_groups * max(1, ranks_per_group // max(1, model_parallel))


def _debug_values(rollout: dict[str, Any], origins: dict[str, str]) -> dict[str, tuple[Any, str]]:
    """The mode that dumps to load imply, and where dumps are when nobody said it."""
    mode, load = rollout["debug_mode"], rollout["load_debug_rollout_data"]
    if load and mode == DebugMode.NONE:
        return {"rollout.debug_mode": (DebugMode.TRAIN_ONLY.value, "load_debug_rollout_data")}
    for wanted, path in (
        (DebugMode.ROLLOUT_ONLY, "rollout.save_debug_rollout_data"),
        (DebugMode.TRAIN_ONLY, "rollout.load_debug_rollout_data"),
    ):
        if mode == wanted and origins[path] == "default":
            return {path: (DEFAULT_DUMPS, f"rollout.debug_mode = {mode}")}
    return {}
