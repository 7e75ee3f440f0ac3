"""A config registry as a user's own package would have it."""

from __future__ import annotations

from torchtitan_rl_ft.config_registry import base
from torchtitan_rl_ft.trainer.rl_trainer import RLFaultTolerantTrainer


def gentle() -> RLFaultTolerantTrainer.Config:
    """`base` with other values, one of ours and one of TorchTitan's."""
    config = base()
    config.training.max_norm = 0.25
    config.training.steps = 9
    config.rl.kl_coef = 0.125
    return config
