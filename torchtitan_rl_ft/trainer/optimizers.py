"""TorchTitan's optimizers, and plain SGD, the one that keeps no state between steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
            return _sgd
        return OptimizersContainer._resolve_optimizer_factory(name)


def _sgd(
    parameters: Any, *, fused: bool = False, foreach: bool = False, **kwargs: Any
) -> Optimizer:
    """PyTorch has no fused SGD of sharded tensors."""
    return torch.optim.SGD(parameters, foreach=foreach or fused, **kwargs)
