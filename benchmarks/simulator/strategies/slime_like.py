"""As slime treats engines: probed at long intervals, refilled before the next weight update. A
trainer's fault is the job's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.simulator import detection
from benchmarks.simulator import parameters as p
from benchmarks.simulator.failures import Fault
from benchmarks.simulator.strategies.base import Steps
from benchmarks.simulator.strategies.full_restart import FullRestart
from torchtitan_rl_ft.serving import verdict

if TYPE_CHECKING:
    from benchmarks.simulator.job import Job


@dataclass
class SlimeLike(FullRestart):
    """Probes are judged by our own detector with slime's times; exits are seen by probes alone."""

    refill_s: float = p.REFILL_S
    name: str = "slime_like"

    def __post_init__(self) -> None:
        limits = verdict.Limits(p.SLIME_PROBE_S, p.SLIME_PROBE_S, p.SLIME_PROBE_S, failures=1)
        self._engine_unnoticed_s = {
            symptom: detection.engine_s(limits, reachable=symptom is p.Symptom.STUCK)
            for symptom in p.Symptom
        }

    def answer(self, job: Job, fault: Fault) -> Steps:
        if fault.role == "engine":
            return self._refill(job, fault)
        return super().answer(job, fault)

    def _refill(self, job: Job, fault: Fault) -> Steps:
        epoch = job.epoch
        lost = job.lose_engines(1, progress_kept=False)
        yield job.env.timeout(self._engine_unnoticed_s[fault.cause.symptom])
        yield job.next_commit()
        yield job.env.timeout(self.refill_s)
        if epoch == job.epoch:
            job.engines_back(lost)
