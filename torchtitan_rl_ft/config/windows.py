"""How much is sealed and committed at once: a step, or a window of several inner steps."""

from __future__ import annotations

from torchtitan_rl_ft.config.sections import FaultToleranceSection, RLSection


def in_windows(ft: FaultToleranceSection) -> bool:
    """Whether training is semi-synchronous: groups step by themselves between outer syncs."""
    return ft.enable and ft.semi_sync_method is not None


def groups_per_batch(rl: RLSection, ft: FaultToleranceSection) -> int:
    """Prompt groups of a sealed batch, which is what one commit trains."""
    return rl.groups_per_step * (ft.sync_steps if in_windows(ft) else 1)
