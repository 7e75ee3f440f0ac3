"""TorchTitan's optimizers, and plain SGD, the one that keeps no state between steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.optim import Optimizer
from torchtitan.components.optimizer import OptimizersContainer


class RLOptimizers(OptimizersContainer):
    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        if name == "SGD":
            return torch.optim.SGD
        return OptimizersContainer._resolve_optimizer_factory(name)
