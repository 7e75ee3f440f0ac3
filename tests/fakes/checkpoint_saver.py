"""Saves checkpoint after checkpoint in one child after another, each killed at a random moment.

    python tests/fakes/checkpoint_saver.py FOLDER KILLS SEED

What a child was told to be durable is appended to FOLDER/told, one path a line.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from fakes.tiny_trainer import TinyTrainer  # noqa: E402

WIDTH = 400


def save_on_and_on(folder: Path, life: int) -> None:
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / f"store-{life}"), 1), rank=0, world_size=1
    )
    mode = "async" if life % 2 else "disabled"
    trainer = TinyTrainer(folder, width=WIDTH, async_mode=mode)
    trainer.history, trainer.step = f"life{life:02d}-", 1000 * life
    with torch.no_grad(), open(folder / "told", "a", buffering=1) as told:
        for step in range(1000 * life + 1, 1000 * life + 1000):
            trainer.step = step
            trainer.model.weight.fill_(float(step))
            path = trainer.path()
            known = len(trainer.told)
            trainer.manager.save(step)
            trainer.manager.finish(wait=True)
            if len(trainer.told) > known:
                told.write(f"{path}\n")


def main() -> None:
    folder, kills, rng = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    for life in range(1, kills + 1):
        child = os.fork()
        if child == 0:
            save_on_and_on(folder, life)
            os._exit(1)
        before = set(folder.glob("checkpoint/step-*"))
        while set(folder.glob("checkpoint/step-*")) == before:  # it has come to its first save
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "a child died by itself"
            time.sleep(0.001)
        time.sleep(rng.random() * 0.15)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
