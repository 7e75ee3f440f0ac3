"""Moments within a step at which a trainer rank looks for its orders (trainer_probe.py), and the
gradients of its first steps, kept for tests that compare them.

RUN/gradients-<replica>.<rank>-<step>.safetensors are the whole gradients, after the sum over the
groups, of the first PROBE_GRADIENTS steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from torchtitan_rl_ft.replica.group import ReplicaGroup
from torchtitan_rl_ft.trainer.checkpoint import RLCheckpointManager
from torchtitan_rl_ft.trainer.publishing import Announcer
from torchtitan_rl_ft.trainer.rl_trainer import RLFaultTolerantTrainer

POINTS = {  # point: what is called, and whether it is before or after it
    "reducing": (ReplicaGroup, "all_reduce", "after"),  # a sum has begun
    "announced": (Announcer, "announce", "after"),  # serving has the policy
    "written": (RLCheckpointManager, "_commit", "before"),  # a checkpoint's files, no marker yet
    "marked": (RLCheckpointManager, "_commit", "after"),  # the ledger has not heard of it
}


def install(look: Callable[[str], None]) -> None:
    for point, (owner, method, when) in POINTS.items():
        setattr(owner, method, _watched(getattr(owner, method), point, when, look))
    if steps := int(os.environ.get("PROBE_GRADIENTS", "0")):
        _keep_gradients(steps)


def _watched(
    called: Callable[..., Any], point: str, when: str, look: Callable[[str], None]
) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        if when == "before":
            look(point)
        answer = called(*args, **kwargs)
        if when == "after":
            look(point)
        return answer

    return watched


def _keep_gradients(steps: int) -> None:
    update = RLFaultTolerantTrainer.update

    def updated(self: RLFaultTolerantTrainer) -> dict[str, float]:
        if self.lineage.step < steps:
            found = {}
            for i, p in enumerate(self._parameters()):
                whole = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                found[f"{i:04d}"] = whole.clone()
            rank = f"{self.ft_manager.replica_id}.{os.environ['RANK']}-{self.lineage.step + 1}"
            save_file(found, self.run_folder.path / f"gradients-{rank}.safetensors")
        return update(self)

    RLFaultTolerantTrainer.update = updated
