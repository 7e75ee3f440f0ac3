"""The part of trainer_probe.py for semi-sync.

RUN/window-<replica>.<rank>.jsonl gets each inner step's samples before it is done, and what the
model holds after a refusal and after a restore. While RUN/hold-<replica> names an inner step
(from 0), the group stops before it in any window, and says so by RUN/held-<replica>.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

from torchtitan_rl_ft.trainer.rl_trainer import RLFaultTolerantTrainer
from torchtitan_rl_ft.trainer.windows import WindowAttempt


def install(
    held: Callable[[RLFaultTolerantTrainer], dict],
    append: Callable[[RLFaultTolerantTrainer, str, dict], None],
) -> None:
    restore = RLFaultTolerantTrainer.restore
    run, inner_step = WindowAttempt.run, WindowAttempt._inner_step
    trainers: list[weakref.ref] = []  # of this process now; a restart in process lets it go

    def probed_restore(self, *args, **kwargs):
        restore(self, *args, **kwargs)
        trainers[:] = [weakref.ref(self)]
        append(self, "window", {"kind": "restored", **held(self)})

    def probed_run(self, work):
        result = run(self, work)
        if not result.committed:
            append(trainers[0](), "window", {"kind": "refused", **held(trainers[0]())})
        return result

    def probed_inner_step(self, batch, samples):
        trainer, inner = trainers[0](), self._window.tally.inner_steps
        line = {"kind": "inner", "step": trainer.lineage.step + 1, "inner": inner}
        append(trainer, "window", {**line, "samples": samples.tolist()})
        wait_while_held(trainer, inner)
        return inner_step(self, batch, samples)

    RLFaultTolerantTrainer.restore = probed_restore
    WindowAttempt.run, WindowAttempt._inner_step = probed_run, probed_inner_step


def wait_while_held(trainer: RLFaultTolerantTrainer, inner: int) -> None:
    folder, group = trainer.run_folder.path, trainer.ft_manager.replica_id
    hold = folder / f"hold-{group}"
    while hold.exists() and hold.read_text() == str(inner):
        (folder / f"held-{group}").touch()
        time.sleep(0.02)
