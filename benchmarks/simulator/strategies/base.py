"""What a strategy is, and the one move that all have: the whole job is started again."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Protocol

import simpy

from benchmarks.simulator.failures import Fault

if TYPE_CHECKING:
    from benchmarks.simulator.job import Job

Steps = Generator[simpy.Event, Any, None]


class Strategy(Protocol):
    """`save_every`: steps between checkpoints. `answer` runs beside the job, once per fault."""

    name: str
    save_every: int

    def answer(self, job: Job, fault: Fault) -> Steps: ...


def restart_job(job: Job, restart_s: float, *, rollouts_kept: bool) -> Steps:
    """Unless a newer fault begins it anew."""
    epoch = job.new_epoch()
    job.job_down()
    yield job.env.timeout(restart_s)
    if epoch == job.epoch:
        job.job_back(rollouts_kept=rollouts_kept)
