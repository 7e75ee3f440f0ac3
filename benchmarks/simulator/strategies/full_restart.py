"""As ByteRobust is described as RobustRL's baseline: any fault starts the whole job again, in
place and with no machine to wait for; what was rolled out since the last commit is lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.simulator import detection
from benchmarks.simulator import parameters as p
from benchmarks.simulator.failures import Fault
from benchmarks.simulator.strategies.base import Steps, restart_job

if TYPE_CHECKING:
    from benchmarks.simulator.job import Job


@dataclass
class FullRestart:
    """`detection_s`: None: by cause, as ByteRobust's inspections find them."""

    restart_s: float = p.RESTART_8B.job_s
    save_every: int = p.BASELINE_SAVE_EVERY
    detection_s: float | None = None
    name: str = "full_restart"

    def answer(self, job: Job, fault: Fault) -> Steps:
        if fault.role == "trainer":
            job.lose_group(0, noticed=False)
        elif fault.role == "engine":
            job.lose_engines(1, progress_kept=False)
        yield job.env.timeout(self._unnoticed_s(fault))
        yield from restart_job(job, self.restart_s, rollouts_kept=False)

    def _unnoticed_s(self, fault: Fault) -> float:
        if self.detection_s is not None:
            return self.detection_s
        return detection.inspected_s(fault.cause)
