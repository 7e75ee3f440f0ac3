"""Writes down each start of training inside a rank's process: RUN/life-<replica>.<rank>.jsonl.

`modules` names the very objects of the imported modules: equal lines show that nothing was imported
again.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from torchtitan_rl_ft.trainer.rl_trainer import RLFaultTolerantTrainer

WATCHED = ("torch", "torchft", "torchtitan.trainer", "torchtitan_rl_ft.trainer.stepper")


def install(append: Callable[[Any, str, dict], None]) -> None:
    train = RLFaultTolerantTrainer.train

    def probed(self: RLFaultTolerantTrainer) -> None:
        process = psutil.Process()
        append(
            self,
            "life",
            {
                "pid": os.getpid(),
                "modules": {name: id(sys.modules[name]) for name in WATCHED},
                "threads": process.num_threads(),
                "thread_names": thread_names(),
                "fds": process.num_fds(),
                "trainers": sum(type(o) is type(self) for o in gc.get_objects()),
            },
        )
        train(self)

    RLFaultTolerantTrainer.train = probed  # type: ignore[method-assign]


def thread_names() -> dict[str, int]:
    names: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it is just ending
            names[(task / "comm").read_text().strip()] += 1
    return dict(names)
