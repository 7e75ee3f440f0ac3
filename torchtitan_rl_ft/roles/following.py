"""What a job is expected to be, for those who follow its files."""

from __future__ import annotations

from torchtitan_rl_ft.config.debug_mode import DebugMode, debug_mode
from torchtitan_rl_ft.config.groups import engine_groups
from torchtitan_rl_ft.config.resolve import Resolved
from torchtitan_rl_ft.observability.run_follower import RunFollower
from torchtitan_rl_ft.observability.run_state import RunState


def follower_of(resolved: Resolved) -> RunFollower:
    """Of the job's run folder; nothing is read yet."""
    sections = resolved.sections
    mode = debug_mode(sections.rollout)
    trains, rolls_out = mode is not DebugMode.ROLLOUT_ONLY, mode is not DebugMode.TRAIN_ONLY
    state = RunState(
        total_steps=resolved.get("training.steps"),
        groups=sections.fault_tolerance.replica_groups if trains else 0,
        engines=sum(g.engines for g in engine_groups(sections.rollout)) if rolls_out else 0,
    )
    return RunFollower(resolved.run_folder, state)
