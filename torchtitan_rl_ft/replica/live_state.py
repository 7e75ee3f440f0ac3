"""The training state as it is now: what a donor offers and a joiner takes.

Stock TorchTitan offers an optimizer state cached at start (a joiner then trains with a stale
learning rate for ever) and calls `model.state_dict()` while FSDP is in the middle of a forward
(which crashes the healthy group). Here references to the local shards are taken once, between
steps everything is read live, and loading copies in place.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.components.optimizer.utils import init_optim_state

from torchtitan_rl_ft.replica.shards import local_shard


class StateMismatch(Exception):
    """A peer's state does not fit this group's model or optimizer."""


class Progress(Protocol):
    """The trainer's own counters. Values are JSON."""

    def progress(self) -> dict[str, Any]: ...

    def load_progress(self, progress: dict[str, Any]) -> None: ...


class LiveState:
    """Parameters, buffers, optimizer, scheduler and counters of one rank."""

    def __init__(
        self,
        model_parts: list[torch.nn.Module],
        optimizers: OptimizersContainer,
        lr_schedulers: LRSchedulersContainer,
        progress: Progress,
        outer: Callable[[], dict[str, torch.Tensor]] = dict,
    ) -> None:
        """`outer`: live shards of the outer optimizer's state, in semi-synchronous training."""
        self._parameters: dict[str, torch.Tensor] = {}
        for i, part in enumerate(model_parts):
            for name, tensor in [*part.named_parameters(), *part.named_buffers()]:
                self._parameters[f"{i}.{name}"] = local_shard(tensor.detach())
        self._optimizers = list(optimizers)
        for optimizer in self._optimizers:
            init_optim_state(optimizer)
        self._lr_schedulers = lr_schedulers
        self._progress = progress
        self._outer = outer

    def state_dict(self) -> dict[str, Any]:
        """References to live tensors plus plain values; valid until the next optimizer step."""
        return {
            "parameters": dict(self._parameters),
            "optimizers": [self._optimizer_tensors(o) for o in self._optimizers],
            "param_groups": [[_scalars(g) for g in o.param_groups] for o in self._optimizers],
            "lr_scheduler": self._lr_schedulers.state_dict(),
            "outer": self._outer(),
            "progress": json.dumps(self._progress.progress()),
        }

    def optimizer_tensors(self) -> list[torch.Tensor]:
        """Live shards of the optimizers' state, in a fixed order."""
        return [t for o in self._optimizers for t in self._optimizer_tensors(o).values()]

    def tensors(self) -> dict[str, torch.Tensor]:
        """What all groups hold alike at equal step, by name."""
        found = dict(self._parameters)
        for i, optimizer in enumerate(self._optimizers):
            found |= {
                f"optimizer {i}.{k}": t for k, t in self._optimizer_tensors(optimizer).items()
            }
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy a peer's state in place. Raises StateMismatch before anything is changed."""
        own = self.state_dict()
        pairs = _match(own["parameters"], state["parameters"], "model")
        pairs += _match(own["outer"], state["outer"], "outer optimizer")
        for mine, theirs in zip(own["optimizers"], state["optimizers"], strict=True):
            pairs += _match(mine, theirs, "optimizer")
        with torch.no_grad():
            for mine, theirs in pairs:
                mine.copy_(theirs)
        self._lr_schedulers.load_state_dict(state["lr_scheduler"])
        for optimizer, groups in zip(self._optimizers, state["param_groups"], strict=True):
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.update(values)
        self._progress.load_progress(json.loads(state["progress"]))

    def reset_optimizer(self) -> None:
        """Back to the state before the first step: no moments, scheduler at 0."""
        with torch.no_grad():
            for optimizer in self._optimizers:
                for tensor in self._optimizer_tensors(optimizer).values():
                    tensor.zero_()
            for tensor in self._outer().values():
                tensor.zero_()
        self._lr_schedulers.load_state_dict({"last_epoch": 0})

    @staticmethod
    def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        tensors = {}
        for i, group in enumerate(optimizer.param_groups):
            for j, p in enumerate(group["params"]):
                for key, value in optimizer.state[p].items():
                    if isinstance(value, torch.Tensor):
                        tensors[f"{i}.{j}.{key}"] = local_shard(value)
        return tensors


def _scalars(group: dict[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a param group, the live learning rate among them."""
    plain = (bool, int, float, str, type(None))
    return {
        k: v
        for k, v in group.items()
        if isinstance(v, plain) or (isinstance(v, tuple) and all(isinstance(x, plain) for x in v))
    }


def _match(
    own: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], what: str
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if own.keys() != theirs.keys():
        odd = sorted(own.keys() ^ theirs.keys())
        raise StateMismatch(f"{what} state differs in {len(odd)} entries, first {odd[0]!r}")
    for name, tensor in own.items():
        if tensor.shape != theirs[name].shape:
            raise StateMismatch(
                f"{what} tensor {name!r} is {tuple(theirs[name].shape)}, ours {tuple(tensor.shape)}"
            )
    return [(tensor, theirs[name]) for name, tensor in own.items()]
