"""Faults of a trainer rank that only code inside it can make: wrong numbers, a flipped bit.

TRAINER_FAULTS is JSON, a list of
{"kind": "scale" | "flip", "replica": g, "step": s, "factor": f, "times": n}:
scale: gradients and loss of step `s` times `factor`, in the first `times` computations (0: in all
from step `s` on); flip: one bit of a parameter, before step `s`.
"""

from __future__ import annotations

import json
import os

import torch

from torchtitan_rl_ft.trainer.rl_trainer import RLFaultTolerantTrainer

FAULTS_ENV = "TRAINER_FAULTS"


def install() -> None:
    """Wrap the trainer class; nothing without faults for it."""
    faults = json.loads(os.environ.get(FAULTS_ENV, "[]"))
    if not faults:
        return
    compute, seed = RLFaultTolerantTrainer._forward_backward, RLFaultTolerantTrainer.seed_step

    def mine(self, kind):
        return [
            f
            for f in faults
            if f["kind"] == kind and f["replica"] == self.config.fault_tolerance.replica_id
        ]

    def computing(self, rows):
        before = [None if p.grad is None else p.grad.clone() for p in self._parameters()]
        loss = compute(self, rows)
        for fault in mine(self, "scale"):
            step, times = self.lineage.step + 1, fault.get("times", 0)
            if step < fault["step"] or (times and (step != fault["step"] or not fault["times"])):
                continue
            if times:
                fault["times"] = times - 1 or -1
            if times == -1:
                continue
            for p, old in zip(self._parameters(), before, strict=True):
                p.grad.mul_(fault["factor"])
                if old is not None:
                    p.grad.add_(old * (1 - fault["factor"]))
            loss = loss * fault["factor"]
        return loss

    def seeding(self):
        seed(self)
        for fault in mine(self, "flip"):
            if self.lineage.step + 1 == fault["step"] and not fault.get("done"):
                fault["done"] = True
                tensor = next(iter(self.state.tensors().values()))
                tensor.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 20)

    RLFaultTolerantTrainer._forward_backward = computing
    RLFaultTolerantTrainer.seed_step = seeding
