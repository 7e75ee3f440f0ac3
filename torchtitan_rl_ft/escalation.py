"""What is tried after a fault, in which order, how often: the one table of recovery.

A fault begins at the first rung that can mend it. A rung that is used up, or that there is none
of here, is climbed over. docs/faults.md shows both tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from torchtitan_rl_ft.exit_codes import ExitCode


class Rung(StrEnum):
    """In the order in which they are climbed."""

    IN_PROCESS = "in_process"
    ROLE = "role"
    GROUP = "group"
    JOB = "job"


class Fault(StrEnum):
    STEP = "a step failed"
    PEER_RANK = "a rank of the same group is gone"
    PROCESS = "a process ended"
    WEDGED = "a process is over its limit"
    MEMORY = "out of memory"
    DEVICE = "the device's context is lost"
    STARVED = "no batch, or a role that does not answer"
    CONFIG = "wrong configuration"
    NUMERIC = "numeric stop"
    WRONG_RESULT = "wrong results of one group"

    @property
    def ends_the_job(self) -> bool:
        return self in NO_RESTART_HELPS


@dataclass(frozen=True)
class Remedy:
    """A rung: what is done, what bounds it, and the event that tells of it."""

    rung: Rung
    what: str
    bound: str
    event: str


REMEDIES = (
    Remedy(
        Rung.IN_PROCESS,
        "`recovery.inprocess_restart`: the ranks of the group build process groups, manager and "
        "state anew inside their living processes, and heal or restore like a new member",
        "`recovery.inprocess_max_restarts` in `recovery.role_restart_window_s`, per rank",
        "`restart`, phase `in_process`",
    ),
    Remedy(
        Rung.ROLE,
        "the process alone is started again. A rank of a group of several: with "
        "`recovery.inprocess_restart`, while the others start again in process",
        "`recovery.role_max_restarts` in `recovery.role_restart_window_s`, pauses that double",
        "`restart`, phase `role`",
    ),
    Remedy(
        Rung.GROUP,
        "a replica group: all its processes end and are started again",
        "`recovery.role_max_restarts` in `recovery.role_restart_window_s`, pauses that double",
        "`restart`, phase `group`",
    ),
    Remedy(
        Rung.JOB,
        "the job ends; started again, it goes on from checkpoint and journal",
        "whoever starts it: the exit code says whether that helps",
        "`escalate`, phase `job`, and `run`, phase `end`",
    ),
)


@dataclass(frozen=True)
class Rule:
    """Where a fault begins, and why not lower."""

    fault: Fault
    first: Rung
    why: str


RULES = (
    Rule(Fault.STEP, Rung.IN_PROCESS, "a heal, a quorum, a collective, refusals without end"),
    Rule(Fault.PEER_RANK, Rung.IN_PROCESS, "of the living ranks; the dead one begins at `role`"),
    Rule(Fault.PROCESS, Rung.ROLE, "a signal, or exit code 1: there is no process to restart in"),
    Rule(Fault.WEDGED, Rung.ROLE, "the watcher kills it: what hangs starts nothing"),
    Rule(Fault.MEMORY, Rung.ROLE, "the process would keep its fragmented or leaked memory"),
    Rule(Fault.DEVICE, Rung.ROLE, "every later call on that context fails"),
    Rule(Fault.STARVED, Rung.ROLE, "the state is good; a wait in process has just been too long"),
    Rule(Fault.CONFIG, Rung.JOB, "exit code 2: every restart meets it again"),
    Rule(Fault.NUMERIC, Rung.JOB, "exit code 3: every restart meets it again"),
    Rule(
        Fault.WRONG_RESULT,
        Rung.JOB,
        "exit code 4: not started again on that machine; the job goes on while "
        "`fault_tolerance.min_replica_size` groups are left",
    ),
)

FIRST_RUNG = {rule.fault: rule.first for rule in RULES}

NO_RESTART_HELPS = {
    Fault.CONFIG: "the configuration is at fault, a restart would not help",
    Fault.NUMERIC: "stopped on numeric grounds, a restart would not help",
    Fault.WRONG_RESULT: "another group found its results wrong, it is not started again",
}


@dataclass(frozen=True)
class RestartLimits:
    """At most `max_restarts` of one role within `window_s`; the first at once, then with
    pauses that double from `backoff_s` to `backoff_max_s`."""

    max_restarts: int
    window_s: float
    backoff_s: float = 1.0
    backoff_max_s: float = 30.0

    def recent(self, now_s: float, restarts_s: Sequence[float]) -> int:
        """How many of `restarts_s` are within the window."""
        return sum(now_s - t <= self.window_s for t in restarts_s)

    def delay_s(self, recent: int) -> float:
        """Pause before the next start after `recent` restarts within the window."""
        if recent == 0:
            return 0.0
        return min(self.backoff_s * 2 ** (recent - 1), self.backoff_max_s)


@dataclass(frozen=True)
class Step:
    """The rung to take. `reason`: why no lower one, empty when it is the fault's first."""

    rung: Rung
    delay_s: float = 0.0
    reason: str = ""


def fault_of_exit(returncode: int | None) -> Fault:
    """Of a process that has ended and should not have. None: nobody told how."""
    codes: dict[int, Fault] = {
        ExitCode.CONFIG: Fault.CONFIG,
        ExitCode.NUMERIC: Fault.NUMERIC,
        ExitCode.WRONG_RESULT: Fault.WRONG_RESULT,
    }
    return Fault.PROCESS if returncode is None else codes.get(returncode, Fault.PROCESS)


def next_step(
    fault: Fault,
    *,
    limits: Mapping[Rung, RestartLimits],
    restarts_s: Mapping[Rung, Sequence[float]],
    now_s: float,
) -> Step:
    """Pure. `limits`: the rungs that there are for whoever asks (the job is always one).
    `restarts_s`: when each was taken before, on the clock of `now_s`."""
    if (reason := NO_RESTART_HELPS.get(fault)) is not None:
        return Step(Rung.JOB, reason=reason)
    rungs = list(Rung)
    reasons: list[str] = []
    for rung in rungs[rungs.index(FIRST_RUNG[fault]) : -1]:
        if rung not in limits:
            continue
        bound = limits[rung]
        recent = bound.recent(now_s, restarts_s.get(rung, ()))
        if recent < bound.max_restarts:
            return Step(rung, bound.delay_s(recent), "; ".join(reasons))
        reasons.append(f"{recent} restarts within {bound.window_s:g} s are used up")
    return Step(Rung.JOB, reason="; ".join(reasons))


def tables() -> str:
    """Both tables in Markdown, as docs/faults.md shows them."""
    rungs = ["| rung | what is done | bound | event |", "|---|---|---|---|"]
    rungs += [f"| `{r.rung}` | {r.what} | {r.bound} | {r.event} |" for r in REMEDIES]
    faults = ["| fault | first rung | why |", "|---|---|---|"]
    faults += [f"| {r.fault} | `{r.first}` | {r.why} |" for r in RULES]
    return "\n".join([*rungs, "", *faults])
