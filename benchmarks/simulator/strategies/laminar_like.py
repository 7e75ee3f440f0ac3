"""As Laminar isolates rollouts from trainers: a lost machine of rollouts comes back by itself. Its
trainer starts alone, from its checkpoint, while rollouts go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.simulator import detection
from benchmarks.simulator import parameters as p
from benchmarks.simulator.failures import Fault
from benchmarks.simulator.strategies.base import Steps

if TYPE_CHECKING:
    from benchmarks.simulator.job import Job


@dataclass
class LaminarLike:
    """`trainer_s`: nobody publishes it; taken as RobustRL's of trainers alone, like ours
    (assumption)."""

    trainer_s: float = p.RESTART_8B.trainer_s
    refill_s: float = p.LAMINAR_REFILL_S
    save_every: int = p.BASELINE_SAVE_EVERY
    name: str = "laminar_like"

    def answer(self, job: Job, fault: Fault) -> Steps:
        return self._trainer(job, fault) if fault.role == "trainer" else self._engine(job)

    def _trainer(self, job: Job, fault: Fault) -> Steps:
        unnoticed_s = detection.inspected_s(fault.cause)
        epoch = job.new_epoch()
        job.lose_group(0, noticed=unnoticed_s == 0)
        yield job.env.timeout(unnoticed_s)
        if epoch != job.epoch:
            return
        job.restarting()
        yield job.env.timeout(self.trainer_s)
        if epoch == job.epoch:
            job.group_back(0)

    def _engine(self, job: Job) -> Steps:
        lost = job.lose_engines(1, progress_kept=True)
        yield job.env.timeout(self.refill_s)
        job.engines_back(lost)
