"""The simulator against saved live runs: the same trace, predicted and measured ETTR.

`ettr_live.json` has `arms` (benchmarks/live/accounts.py), of which are read: `strategy`, `load`,
`trace` (`[{"at_s"} or {"step", "phase_offset_s"}, "subject"]`), `steps`, `step_s`, `recovery`
(`{role: {phase: seconds}}`; role `job` where it was started again as a whole), `startup_s`, `ettr`
(`{"strict", "paper"}`), `wall_s`, `seed`, `checkpoint_every_steps`, `mode` (of rollouts and
training; sync where it is missing).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.live.arms import ENGINES, GROUPS
from benchmarks.simulator.cluster import Cluster, Workload
from benchmarks.simulator.experiments import Make, simulate
from benchmarks.simulator.failures import Fault, Role
from benchmarks.simulator.job import Result
from benchmarks.simulator.strategies.full_restart import FullRestart
from benchmarks.simulator.strategies.role_isolated import RoleIsolated
from torchtitan_rl_ft.escalation import RestartLimits
from torchtitan_rl_ft.rollout.schedule import Mode

TOLERANCE_POINTS = 5.0
OUTAGE_PHASES = ("detect", "restart", "reconnect")
JOB_PHASES = ("detect", "restart")
"""Until work begins. What is done again is simulated; of a job, so is its first batch."""

ROLLOUT_SHARE = 0.5  # assumption: of a step; faults of either role are equally likely to hit it

NO_FAULT = "no_fault"


class LiveResultsInvalid(Exception):
    """The file of live results is not what it should be."""


@dataclass(frozen=True)
class Arm:
    strategy: str
    trace: tuple[Fault, ...]
    steps: int
    step_s: float
    save_every: int
    recovery_s: Mapping[str, float]
    startup_s: float
    strict: float
    paper: float
    wall_s: float
    seed: int
    mode: Mode = "sync"
    load: str = ""
    """What makes a step as long as it is: arms of one load have one kind of step."""

    told: str = ""
    """As the live benchmark calls it."""

    one_host: bool = False

    @property
    def name(self) -> str:
        of_load = f"{self.load}/" if self.load else ""
        if self.told:
            return of_load + self.told
        saved = f", saved every {self.save_every}" if self.strategy == "full_restart" else ""
        roles = {f.role for f in self.trace}
        struck = "" if not roles else f", {'all roles' if len(roles) > 1 else 'trainers'}"
        return f"{of_load}{self.strategy}{struck}{saved}"

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str, *, one_host: bool = False) -> Arm:
        """Raises LiveResultsInvalid."""
        try:
            recovery_s = {
                role: sum(
                    float(phases.get(phase) or 0.0)
                    for phase in (JOB_PHASES if role == "job" else OUTAGE_PHASES)
                )
                for role, phases in data["recovery"].items()
            }
            return cls(
                str(data["strategy"]),
                tuple(_fault(f) for f in data["trace"]),
                int(data["steps"]),
                float(data["step_s"]),
                int(data.get("checkpoint_every_steps", 1)),
                recovery_s,
                float(data["startup_s"]),
                float(data["ettr"]["strict"]),
                float(data["ettr"]["paper"]),
                float(data["wall_s"]),
                int(data["seed"]),
                _mode(str(data.get("mode", "sync"))),
                str(data.get("load", "")),
                str(data.get("name", "")),
                one_host,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise LiveResultsInvalid(f"{where}: {type(e).__name__}: {e}") from e


def _fault(data: Mapping[str, Any]) -> Fault:
    role, _, number = str(data["subject"]).partition("-")
    if role not in ("trainer", "engine", "rollout"):
        raise ValueError(f"no such subject in the simulator: {data['subject']}")
    index, known_role = int(number or 0), _role(role)
    if data.get("at_s") is not None:
        return Fault(known_role, index, at_s=float(data["at_s"]))
    offset_s = float(data.get("phase_offset_s") or 0.0)
    return Fault(known_role, index, after_step=int(data["step"]), offset_s=offset_s)


def _role(text: str) -> Role:
    roles: dict[str, Role] = {"trainer": "trainer", "engine": "engine", "rollout": "rollout"}
    return roles[text]


def _mode(text: str) -> Mode:
    modes: dict[str, Mode] = {"sync": "sync", "async": "async"}
    return modes[text]


@dataclass(frozen=True)
class Comparison:
    arm: str
    seed: int
    definition: str
    predicted: float
    measured: float

    @property
    def points(self) -> float:
        return 100 * (self.predicted - self.measured)

    @property
    def met(self) -> bool:
        return abs(self.points) <= TOLERANCE_POINTS


def load_arms(file: Path) -> list[Arm]:
    """Raises LiveResultsInvalid; FileNotFoundError before a live run was saved."""
    text = file.read_text()
    try:
        data = json.loads(text)
        arms, cpus = data["arms"], int(data.get("machine", {}).get("cpus") or GROUPS + ENGINES)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise LiveResultsInvalid(f"{file}: no JSON with arms: {e}") from e
    # With a core for each slot a lost one's is left idle.
    one_host = cpus < GROUPS + ENGINES
    return [Arm.from_json(a, f"{file}, arm {i}", one_host=one_host) for i, a in enumerate(arms)]


def compare(arms: Sequence[Arm]) -> list[Comparison]:
    found = []
    for arm in arms:
        busy = busy_share([a for a in arms if a.load == arm.load])
        result = predict(arm)
        useful_s = result.steps * arm.step_s
        modelled = result.strict * result.wall_s / useful_s
        strict = (modelled if busy is None else busy) * useful_s / result.wall_s
        paper = result.paper
        for definition, predicted, measured in (
            ("strict", strict, arm.strict),
            ("paper", paper, arm.paper),
        ):
            found.append(Comparison(arm.name, arm.seed, definition, predicted, measured))
    return found


def busy_share(arms: Sequence[Arm]) -> float | None:
    """Of a step's slot-seconds, those with output: measured where nothing failed, because it is a
    property of the workload. None: there is no such arm."""
    found = [
        arm.strict * arm.wall_s / (arm.steps * arm.step_s)
        for arm in arms
        if arm.strategy == NO_FAULT
    ]
    return statistics.fmean(found) if found else None


def predict(arm: Arm) -> Result:
    """Recovery times, start-up and step time are measured; what faults make of them is not."""
    overlap = arm.mode == "async"
    work = Workload(
        arm.mode,
        rollout_s=arm.step_s * (1 if overlap else ROLLOUT_SHARE),
        train_s=arm.step_s * (1 if overlap else 1 - ROLLOUT_SHARE),
        steps=arm.steps,
        sync_s=0.0,  # inside the measured step
        save_blocking_s=0.0,
        save_async_s=0.0,
        startup_s=arm.startup_s,
    )
    cluster = Cluster(GROUPS, ENGINES, GROUPS, one_host=arm.one_host)
    return simulate(work, cluster, _strategy(arm), arm.trace)


LIVE_LIMITS = RestartLimits(max_restarts=1_000, window_s=600.0, backoff_s=0.0)
"""As the live jobs run; pauses are inside the measured recovery times."""


def _strategy(arm: Arm) -> Make:
    longest_s = max(arm.recovery_s.values(), default=0.0)
    trainer_s = arm.recovery_s.get("trainer", longest_s)
    if arm.strategy == "full_restart":
        restart_s = arm.recovery_s.get("job", longest_s)
        return lambda: FullRestart(restart_s, save_every=arm.save_every, detection_s=0.0)
    if arm.strategy not in (NO_FAULT, "role_isolated"):
        raise LiveResultsInvalid(f"no model of the strategy {arm.strategy!r}")
    return lambda: RoleIsolated(
        trainer_s=trainer_s,
        job_s=longest_s,
        refill_s=arm.recovery_s.get("engine", longest_s),
        rollout_s=arm.recovery_s.get("rollout", longest_s),
        save_every=arm.save_every,
        restart_limits=LIVE_LIMITS,
    )
