"""The outer step of semi-synchronous training: from the groups' mean to the next base."""

from __future__ import annotations

from typing import Any

import torch

from torchtitan_rl_ft.replica.group import ReplicaGroup
from torchtitan_rl_ft.replica.shards import local_shard
from torchtitan_rl_ft.trainer.fragments import fragments, named_trainable

MOMENTUM = "momentum_buffer"


class OuterOptimizer:
    """SGD on the base, with the pseudo-gradient base - mean of the groups.

    `diloco`: Nesterov momentum (arXiv 2311.08105, algorithm 1; Nesterov as in its section 3.1).
    `local_sgd`: the mean itself, that is a rate of 1 without momentum (arXiv 1805.09767).
    """

    def __init__(
        self,
        fragments: list[dict[str, torch.nn.Parameter]],
        *,
        method: str,
        lr: float,
        momentum: float,
    ) -> None:
        if method == "local_sgd":
            lr, momentum = 1.0, 0.0
        self.fragments = [list(fragment.values()) for fragment in fragments]
        self._names = {name: p for fragment in fragments for name, p in fragment.items()}
        self._sgd = torch.optim.SGD(
            [{"params": params} for params in self.fragments],
            lr=lr,
            momentum=momentum,
            nesterov=momentum > 0,
        )
        if momentum > 0:
            # torch makes them at the first step, as a copy of the gradient: zeros are the same,
            # and healing and checkpoints find them from the start.
            for p in self._names.values():
                self._sgd.state[p][MOMENTUM] = torch.zeros_like(p)

    @property
    def has_state(self) -> bool:
        return bool(self._sgd.state)

    def step(self) -> None:
        """The parameters hold the base, their gradients the mean pseudo-gradient."""
        self._sgd.step()

    def names(self) -> dict[int, str]:
        """Name of each parameter, by its id()."""
        return {id(p): name for name, p in self._names.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """This rank's shards of the momentum, live."""
        return {name: local_shard(buffer) for name, buffer in self.state_dict().items()}

    # What a checkpoint holds (torch.distributed.checkpoint's Stateful) --------------------

    def state_dict(self) -> dict[str, Any]:
        if not self.has_state:
            return {}
        return {name: self._sgd.state[p][MOMENTUM] for name, p in self._names.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copies in place; a checkpoint is read into the tensors of `state_dict` already."""
        with torch.no_grad():
            for name, buffer in self.state_dict().items():
                if (theirs := state_dict[name]) is not buffer:
                    buffer.copy_(theirs)


def outer_optimizer(
    model_parts: list[torch.nn.Module], method: str, config: ReplicaGroup.Config
) -> OuterOptimizer:
    """As configured. Raises ValueError when the fragments do not fit the model."""
    named = named_trainable(model_parts)
    sizes = {name: p.numel() for name, p in named.items()}
    names = fragments(sizes, config.num_fragments, config.module_fqns_per_model_fragment)
    return OuterOptimizer(
        [{name: named[name] for name in fragment} for fragment in names],
        method=method,
        lr=config.outer_lr,
        momentum=config.outer_momentum,
    )
