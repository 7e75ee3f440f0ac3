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


def _sgd(groups: list[dict[str, Any]], **kwargs: Any) -> Optimizer:
    """Not fused, whatever `optimizer.implementation` is: PyTorch has no such SGD of sharded
    tensors."""
    unfused = [{**g, "fused": False, "foreach": True} if g.get("fused") else g for g in groups]
    return torch.optim.SGD(unfused, **kwargs)
