"""Plain TorchTitan on the same model, rows and loss as the RL trainer: the yardstick.

    python benchmarks/plain_torchtitan.py RUN_FOLDER STEPS OUT GROUPS SAMPLES LONGEST

TorchTitan's own base trainer, optimizer and clipping, fed with the micro-batches that the RL
trainer makes of the same batches; writes the seconds of each step to OUT as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path

from torchtitan_rl_ft.platform import torchtitan_cpu

torchtitan_cpu.install()

import numpy as np  # noqa: E402
from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fakes"))
from run_host import made_up_batch  # noqa: E402

from torchtitan_rl_ft.config.resolve import Resolved  # noqa: E402
from torchtitan_rl_ft.config_registry import base, finished  # noqa: E402
from torchtitan_rl_ft.trainer.rows import micro_batches, row_length  # noqa: E402

SHAPE = [int(v) for v in sys.argv[4:7]]


class SameRows(BaseDataLoader):
    """The RL trainer's rows of batch 1, 2, ..., one micro-batch a step."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, seq_len: int, local_batch_size: int, **kwargs) -> None:
        self._seq_len, self._rows = seq_len, local_batch_size

    def __iter__(self):
        groups, samples, longest = SHAPE
        step = 0
        while True:
            step += 1
            batch = made_up_batch(step, 0, list(range(groups)), samples, longest)
            length = row_length(batch, self._seq_len, fixed=False)
            indices = np.arange(batch.n_samples)
            for mb in micro_batches(batch, indices, rows=self._rows, length=length, count=1):
                yield {"input": mb.input_BS, "positions": mb.positions_BS}, mb.labels_BSC

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state_dict: dict) -> None:
        pass


class TimedTrainer(Trainer):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def train_step(self, data_iterator) -> None:
        begin = time.perf_counter()
        super().train_step(data_iterator)
        SECONDS.append(time.perf_counter() - begin)


SECONDS: list[float] = []


def main() -> None:
    ours = finished(base(), Resolved.read(sys.argv[1]))
    shared = {f.name for f in dataclasses.fields(TimedTrainer.Config)}
    values = {n: getattr(ours, n) for n in shared if n not in ("dataloader", "checkpoint")}
    values["training"] = dataclasses.replace(values["training"], steps=int(sys.argv[2]))
    config = TimedTrainer.Config(
        **values, dataloader=SameRows.Config(), checkpoint=CheckpointManager.Config(enable=False)
    )
    trainer = config.build()
    trainer.train()
    Path(sys.argv[3]).write_text(json.dumps(SECONDS))


if __name__ == "__main__":
    main()
