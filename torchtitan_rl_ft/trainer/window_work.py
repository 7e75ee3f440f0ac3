"""A group's own work in a window, and the base it started from.

Outside an attempt the model and its optimizer always hold the base, so a donor, a checkpoint and
a publish see it without knowing of windows; the work lies on the shelf. Inside an attempt the
model holds the work and the base lies on the shelf.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from torchtitan_rl_ft.replica.shards import local_shard
from torchtitan_rl_ft.trainer.policy_loss import Stat


@dataclass
class Tally:
    """What the inner steps of this rank's group add up to."""

    done: np.ndarray  # bool [N]: samples of the group
    logprobs: np.ndarray | None  # [T] of this rank's samples, when they are recorded
    loss: float = 0.0  # this rank's share, in the batch's weights
    stats: torch.Tensor = field(default_factory=lambda: torch.zeros(len(Stat), dtype=torch.float64))
    inner_steps: int = 0


class WindowWork:
    """Swaps between base and work, for the window `key` names."""

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        optimizer_tensors: Callable[[], list[torch.Tensor]],
    ) -> None:
        self._parameters = [local_shard(p.detach()) for p in parameters]
        self._optimizer_tensors = optimizer_tensors
        self._shelf: list[torch.Tensor] = []
        self._key: object = None
        self._open = False
        self.tally = Tally(np.zeros(0, dtype=bool), None)

    def open(self, key: object, n_samples: int, n_recorded: int) -> None:
        """Take the work at `key` up again, or start it from what the model holds."""
        if key == self._key:
            self._swap()
        else:
            self._key = key
            self._store()
            self._start(n_samples, n_recorded)
        self._open = True

    def give_up(self) -> None:
        """Inside an attempt: back to the base, nothing done."""
        self._copy(self._shelf, self._live())
        recorded = self.tally.logprobs
        self._start(len(self.tally.done), 0 if recorded is None else len(recorded))

    def shelve(self) -> None:
        """The attempt was refused: the model holds the base again, the work is kept."""
        self._swap()
        self._open = False

    def settle(self) -> None:
        """The attempt was committed: parameters hold the base, ready for the outer step; the inner
        optimizer goes on with its own state."""
        self._copy(self.base(), self._parameters)
        self.void()

    def void(self) -> None:
        """Forget the work: the model holds another base now."""
        self._key, self._open = None, False

    def base(self) -> list[torch.Tensor]:
        """This rank's shards of the base's parameters."""
        return self._shelf[: len(self._parameters)] if self._open else self._parameters

    def write_pseudo_gradients(self, gradients: list[torch.Tensor], share: float) -> None:
        """`share` x (base - local) of each parameter, this rank's shards, into `gradients`."""
        for g, base, local in zip(gradients, self.base(), self._parameters, strict=True):
            torch.sub(base, local, out=g).mul_(share)

    def _start(self, n_samples: int, n_recorded: int) -> None:
        logprobs = np.zeros(n_recorded) if n_recorded else None
        self.tally = Tally(np.zeros(n_samples, dtype=bool), logprobs)

    def _live(self) -> list[torch.Tensor]:
        return [*self._parameters, *self._optimizer_tensors()]

    def _store(self) -> None:
        if not self._shelf:
            self._shelf = [torch.empty_like(t) for t in self._live()]
        self._copy(self._live(), self._shelf)

    def _swap(self) -> None:
        with torch.no_grad():
            for live, shelved in zip(self._live(), self._shelf, strict=True):
                kept = live.clone()
                live.copy_(shelved)
                shelved.copy_(kept)

    @staticmethod
    def _copy(source: list[torch.Tensor], target: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for there, here in zip(source, target, strict=True):
                here.copy_(there)
