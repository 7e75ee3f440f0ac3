"""Seen and done from outside a trainer, for tests of checkpoints (trainer_probe.py).

PROBE_DROPOUT_UNTIL: a step up to which the model has dropout, which those of this package have none
of. RUN/slow-disk: shards are not written while it exists. Noted: what each generator draws between
two steps, just before the next step is seeded.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.nn import functional

from torchtitan_rl_ft.trainer.rl_trainer import RLFaultTolerantTrainer

DROPOUT_UNTIL = int(os.environ.get("PROBE_DROPOUT_UNTIL", "0"))

draws: list[float] = []
"""Of Python's, NumPy's and torch's generator, before the step that runs."""


def install() -> None:
    _slow_disk()
    _note_draws()
    if DROPOUT_UNTIL:
        _drop_out()


def _slow_disk() -> None:
    create, gate = FileSystem.create_stream, Path(os.environ["TORCHTITAN_RL_FT_RUN"]) / "slow-disk"

    def held(self, path, mode):
        while str(path).endswith(".distcp") and mode == "wb" and gate.exists():
            time.sleep(0.02)
        return create(self, path, mode)

    FileSystem.create_stream = held


def _note_draws() -> None:
    seed_step = RLFaultTolerantTrainer.seed_step

    def noting(self, *args) -> None:
        draws[:] = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        seed_step(self, *args)

    RLFaultTolerantTrainer.seed_step = noting


def _drop_out() -> None:
    build = RLFaultTolerantTrainer.__init__

    def built(self, config) -> None:
        build(self, config)

        def dropped(module, args, output):
            return functional.dropout(output, 0.1 if self.lineage.step < DROPOUT_UNTIL else 0.0)

        for part in self.model_parts:
            part.norm.register_forward_hook(dropped)

    RLFaultTolerantTrainer.__init__ = built
