"""As Laminar isolates rollouts from trainers: a lost machine of rollouts comes back by itself. Its
trainer starts alone, from its checkpoint, while rollouts go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.simulator import parameters as p
from benchmarks.simulator.failures import Fault
from benchmarks.simulator.strategies.base import Steps

if TYPE_CHECKING:
    from benchmarks.simulator.job import Job


@dataclass
class LaminarLike:
    """`trainer_s`: nobody publishes it; taken as that of a whole job's trainers (assumption)."""

    trainer_s: float = p.RESTART_8B.job_s
    refill_s: float = p.LAMINAR_REFILL_S
    save_every: int = p.BASELINE_SAVE_EVERY
    name: str = "laminar_like"

    def answer(self, job: Job, fault: Fault) -> Steps:
        return self._trainer(job, fault) if fault.role == "trainer" else self._engine(job)

    def _trainer(self, job: Job, fault: Fault) -> Steps:
        injected = fault.cause == p.INJECTED
        epoch = job.new_epoch()
        job.lose_group(0, noticed=injected)
        yield job.env.timeout(0.0 if injected else p.INSPECTION_S[fault.cause.inspector])
        if epoch != job.epoch:
            return
        job.restarting()
        yield job.env.timeout(self.trainer_s)
        if epoch == job.epoch:
            job.group_back(0)

    def _engine(self, job: Job) -> Steps:
        lost = job.lose_engines(p.LAMINAR_REPLICAS_LOST, progress_kept=True)
        yield job.env.timeout(self.refill_s)
        job.engines_back(lost)
