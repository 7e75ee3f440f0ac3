"""Faults of a trainer rank that only code inside it can make: wrong numbers, a flipped bit.

RUN/faults.json, looked at in every step, is a list of {"kind": "scale" | "flip", "replica": g,
"rank": r, "step": s, "factor": f, "plus": a, "times": n}, of rank r or, without it, of every rank:
scale: gradients and loss times `factor`, the loss plus `plus` (0: a loss near 0 stays there), from
step `s` on, in `times` computations (0: in all that follow); flip: one bit of a parameter, once,
before step `s` or a later one.
"""

from __future__ import annotations

import json
import os

import torch

from torchtitan_rl_ft.trainer.rl_trainer import RLFaultTolerantTrainer

FILE_NAME = "faults.json"


class Faults:
    """What is left of them for one rank."""

    def __init__(self) -> None:
        self.used: dict[str, int] = {}

    def due(self, trainer, kind: str, default_times: int) -> list[dict]:
        path = trainer.run_folder.path / FILE_NAME
        if not path.exists():
            return []
        found = []
        for fault in json.loads(path.read_text()):
            key, times = json.dumps(fault), fault.get("times", default_times)
            rank = int(os.environ["RANK"])
            mine = fault["replica"] == trainer.config.fault_tolerance.replica_id
            mine = mine and fault.get("rank", rank) == rank
            if fault["kind"] != kind or not mine or trainer.lineage.step + 1 < fault["step"]:
                continue
            if not times or self.used.get(key, 0) < times:
                self.used[key] = self.used.get(key, 0) + 1
                found.append(fault)
        return found


def install() -> None:
    """Wrap the trainer class."""
    faults = Faults()
    compute, seed = RLFaultTolerantTrainer._forward_backward, RLFaultTolerantTrainer.seed_step

    def computing(self, rows):
        before = [None if p.grad is None else p.grad.clone() for p in self._parameters()]
        loss = compute(self, rows)
        for fault in faults.due(self, "scale", 0):
            for p, old in zip(self._parameters(), before, strict=True):
                p.grad.mul_(fault["factor"])
                if old is not None:
                    p.grad.add_(old * (1 - fault["factor"]))
            loss = loss * fault["factor"] + fault.get("plus", 0.0)
        return loss

    def seeding(self, *inner_step):
        seed(self, *inner_step)
        for _ in faults.due(self, "flip", 1):
            tensor = next(iter(self.state.tensors().values()))
            tensor.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 20)

    RLFaultTolerantTrainer._forward_backward = computing
    RLFaultTolerantTrainer.seed_step = seeding
