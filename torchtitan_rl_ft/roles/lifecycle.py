"""What a role's exit means: finished, start it again, or end the run. Pure decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from torchtitan_rl_ft.escalation import Fault, RestartLimits, Rung, fault_of_exit, next_step
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.host.process import describe

COMPLETE = (ExitCode.DONE, ExitCode.REQUEUE)
"""Ends of a role that has done its part, at least for now."""


class Duty(StrEnum):
    """What a role's exit code 0 means to the run."""

    DRIVER = "driver"  # the run is done
    WORKER = "worker"  # its part is done
    SERVICE = "service"  # a fault: it serves until it is told to stop
    HELPER = "helper"  # a fault, but the run goes on without it
    STANDBY = "standby"  # a fault; the run goes on without it


class Action(StrEnum):
    FINISHED = "finished"  # nothing to do
    STOPPED = "stopped"  # it was told to, or the run ends anyway
    EXPELLED = "expelled"  # not started again here; the run goes on without it
    RESTART = "restart"  # start it again after delay_s
    DONE = "done"  # end the run: complete
    FAIL = "fail"  # end the run with exit_code
    ABANDON = "abandon"  # the run goes on without it


@dataclass(frozen=True)
class Verdict:
    action: Action
    reason: str
    delay_s: float = 0.0
    exit_code: int = ExitCode.DONE
    rung: Rung | None = None
    """RESTART, FAIL: what is tried."""


def after_exit(
    duty: Duty,
    returncode: int | None,
    *,
    ending: bool,
    now_s: float,
    restarts_s: Sequence[float],
    limits: RestartLimits,
) -> Verdict:
    """Decide on a role that has ended.

    The driver's code REQUEUE is the run's; a worker's: its group has left at a step boundary, and
    comes back when it is started from outside.

    `returncode` is negative for a signal, None when nobody told us (an adopted role); `ending`
    tells that the run's outcome is settled; `restarts_s` are the times of the role's earlier
    restarts on the clock of `now_s`.
    """
    if ending and (returncode not in COMPLETE or duty is not Duty.WORKER):
        return Verdict(Action.STOPPED, "the run is ending")
    if returncode == ExitCode.DONE and duty is Duty.DRIVER:
        return Verdict(Action.DONE, "complete")
    if returncode == ExitCode.DONE and duty is Duty.WORKER:
        return Verdict(Action.FINISHED, "its part is complete")
    if returncode == ExitCode.REQUEUE and duty is Duty.DRIVER:
        return Verdict(Action.DONE, "to be started again", exit_code=ExitCode.REQUEUE)
    if returncode == ExitCode.REQUEUE and duty is Duty.WORKER:
        return Verdict(Action.FINISHED, "it has left at a step boundary")
    if returncode == ExitCode.WRONG_RESULT and duty is Duty.WORKER:
        return Verdict(
            Action.EXPELLED,
            "another group found its results wrong, so it is not started again on this machine",
            exit_code=ExitCode.WRONG_RESULT,
            rung=Rung.JOB,
        )
    fault = fault_of_exit(returncode)
    rung = Rung.GROUP if duty is Duty.WORKER else Rung.ROLE
    step = next_step(fault, limits={rung: limits}, restarts_s={rung: restarts_s}, now_s=now_s)
    if step.rung is Rung.JOB and duty is Duty.HELPER:
        return Verdict(Action.STOPPED, f"{step.reason}, the run goes on without it")
    if step.rung is Rung.JOB:
        code = ExitCode.FAILED if fault is Fault.PROCESS else ExitCode(returncode or 0)
        if duty is Duty.STANDBY:
            return Verdict(Action.ABANDON, step.reason)
        return Verdict(Action.FAIL, step.reason, exit_code=code, rung=step.rung)
    reason = describe(returncode)
    if returncode == ExitCode.DONE:
        reason = "it ended although the run goes on"
    return Verdict(Action.RESTART, reason, delay_s=step.delay_s, rung=step.rung)
