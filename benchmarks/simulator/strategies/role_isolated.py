"""This project's answer, by its own decisions: detectors, restart limits, exactly-once rules."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.simulator import detection
from benchmarks.simulator import parameters as p
from benchmarks.simulator.failures import Fault
from benchmarks.simulator.parameters import Symptom
from benchmarks.simulator.strategies.base import Steps, restart_job
from torchtitan_rl_ft.config.recovery import RecoverySection
from torchtitan_rl_ft.config.sections import FaultToleranceSection
from torchtitan_rl_ft.escalation import RestartLimits
from torchtitan_rl_ft.host import phase_limits
from torchtitan_rl_ft.roles.lifecycle import Action, Duty, after_exit
from torchtitan_rl_ft.serving import verdict

if TYPE_CHECKING:
    from benchmarks.simulator.job import Job

KILLED = -9
"""Return code of a process that a fault, or the watcher, has killed."""


def default_restart_limits() -> RestartLimits:
    recovery = RecoverySection()
    return RestartLimits(recovery.role_max_restarts, recovery.role_restart_window_s)


def default_phase_limits() -> phase_limits.Limits:
    recovery = RecoverySection()
    return phase_limits.Limits(recovery.phase_timeout_s, recovery.rank_silence_timeout_s)


def default_engine_limits() -> verdict.Limits:
    return verdict.Limits(p.ENGINE_SILENCE_S, p.ENGINE_SILENCE_S, p.ENGINE_PROBE_S)


@dataclass
class RoleIsolated:
    """`trainer_s`: from the end of a trainer group's process until it trains again, without what
    it does again; `job_s` the same of all roles; `rollout_s`: of the role that has the journal."""

    trainer_s: float = p.RESTART_8B.trainer_s
    job_s: float = p.RESTART_8B.job_s
    refill_s: float = p.REFILL_S
    rollout_s: float = p.RESTART_8B.trainer_s
    save_every: int = p.OWN_SAVE_EVERY
    name: str = "role_isolated"
    restart_limits: RestartLimits = field(default_factory=default_restart_limits)
    phase_limits: phase_limits.Limits = field(default_factory=default_phase_limits)
    engine_limits: verdict.Limits = field(default_factory=default_engine_limits)
    collective_s: float = FaultToleranceSection().process_group_timeout_ms / 1_000
    """After which groups that hang with a silent one give the step up."""

    def __post_init__(self) -> None:
        self._restarts_s: defaultdict[str, list[float]] = defaultdict(list)
        self._last: dict[str, int] = {}  # the newest fault of each role: it alone ends the outage
        self._faults = 0
        self._trainer_unnoticed_s = {s: detection.trainer_s(self.phase_limits, s) for s in Symptom}
        self._engine_unnoticed_s = {
            Symptom.EXIT: 0.0,  # an exit is noticed at once
            Symptom.SILENT: detection.engine_s(self.engine_limits, reachable=False),
            Symptom.STUCK: detection.engine_s(self.engine_limits, reachable=True),
        }

    def answer(self, job: Job, fault: Fault) -> Steps:
        if fault.role == "trainer":
            return self._trainer(job, fault)
        if fault.role == "engine":
            return self._engine(job, fault)
        return self._rollout(job)

    def _trainer(self, job: Job, fault: Fault) -> Steps:
        role = f"trainer-{fault.index}"
        number, epoch = self._begin(role), job.epoch
        unnoticed_s = self._trainer_unnoticed_s[fault.cause.symptom]
        others_left = job.lose_group(fault.index, noticed=unnoticed_s == 0)
        if others_left and unnoticed_s > 0:
            hung_s = min(unnoticed_s, self.collective_s)
            yield job.env.timeout(hung_s)
            job.go_on_without()
            unnoticed_s -= hung_s
        yield job.env.timeout(unnoticed_s)
        if epoch != job.epoch or not self._newest(role, number):
            return
        job.restarting()
        decision = after_exit(
            Duty.WORKER,
            KILLED,
            ending=False,
            now_s=job.env.now,
            restarts_s=self._restarts_s[role],
            limits=self.restart_limits,
        )
        if decision.action is not Action.RESTART:
            # The job ends; whoever started it starts it again, and the journal is still there.
            self._restarts_s.clear()
            yield from restart_job(job, self.job_s, rollouts_kept=True)
            return
        self._restarts_s[role].append(job.env.now)
        yield job.env.timeout(decision.delay_s + self.trainer_s)
        if epoch == job.epoch and self._newest(role, number):
            job.group_back(fault.index)

    def _engine(self, job: Job, fault: Fault) -> Steps:
        epoch = job.epoch
        lost = job.lose_engines(1, progress_kept=True)
        yield job.env.timeout(self._engine_unnoticed_s[fault.cause.symptom] + self.refill_s)
        if epoch == job.epoch:
            job.engines_back(lost)

    def _rollout(self, job: Job) -> Steps:
        number, epoch = self._begin("rollout"), job.epoch
        job.pause()
        yield job.env.timeout(self.rollout_s)
        if epoch == job.epoch and self._newest("rollout", number):
            job.unpause()

    def _begin(self, role: str) -> int:
        self._faults += 1
        self._last[role] = self._faults
        return self._faults

    def _newest(self, role: str, number: int) -> bool:
        return self._last[role] == number
