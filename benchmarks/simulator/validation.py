"""The simulator against saved live runs: the same trace, predicted and measured ETTR.

`ettr_live.json` has `arms`, each with `strategy`, `trace` (`[{"at_s"} or {"step",
"phase_offset_s"}, "subject"]`), `steps`, `step_s`, `recovery` (`{role: {phase: seconds}}`),
`startup_s`, `ettr` (`{"strict", "paper"}`), `wall_s`, `seed`; and, where they are not the debug
job's, `mode`, `rollout_share` (of a step), `trainer_groups`, `engines`, `checkpoint_interval`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.simulator.cluster import Cluster, Workload
from benchmarks.simulator.experiments import Make, simulate
from benchmarks.simulator.failures import Fault, Role
from benchmarks.simulator.job import Result
from benchmarks.simulator.strategies.full_restart import FullRestart
from benchmarks.simulator.strategies.role_isolated import RoleIsolated

TOLERANCE_POINTS = 5.0
OUTAGE_PHASES = ("detect", "restart", "reconnect")
"""What is done again (`redo`) is simulated."""

NO_FAULT = "no_fault"


class LiveResultsInvalid(Exception):
    """The file of live results is not what it should be."""


@dataclass(frozen=True)
class Arm:
    strategy: str
    trace: tuple[Fault, ...]
    steps: int
    step_s: float
    recovery_s: Mapping[str, float]
    startup_s: float
    strict: float
    paper: float
    wall_s: float
    seed: int
    data: Mapping[str, Any]

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str) -> Arm:
        """Raises LiveResultsInvalid."""
        try:
            recovery_s = {
                role: sum(float(phases.get(phase) or 0.0) for phase in OUTAGE_PHASES)
                for role, phases in data["recovery"].items()
            }
            return cls(
                str(data["strategy"]),
                tuple(_fault(f) for f in data["trace"]),
                int(data["steps"]),
                float(data["step_s"]),
                recovery_s,
                float(data["startup_s"]),
                float(data["ettr"]["strict"]),
                float(data["ettr"]["paper"]),
                float(data["wall_s"]),
                int(data["seed"]),
                data,
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


@dataclass(frozen=True)
class Comparison:
    strategy: str
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
        arms = json.loads(text)["arms"]
    except (ValueError, KeyError, TypeError) as e:
        raise LiveResultsInvalid(f"{file}: no JSON with arms: {e}") from e
    return [Arm.from_json(arm, f"{file}, arm {i}") for i, arm in enumerate(arms)]


def compare(arms: Sequence[Arm]) -> list[Comparison]:
    busy = busy_share(arms)
    found = []
    for arm in arms:
        result, work, cluster = predict(arm)
        useful_s = result.steps * arm.step_s
        modelled = result.strict * result.wall_s / useful_s
        strict = (modelled if busy is None else busy) * useful_s / result.wall_s
        found.append(Comparison(arm.strategy, arm.seed, "strict", strict, arm.strict))
        found.append(Comparison(arm.strategy, arm.seed, "paper", result.paper, arm.paper))
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


def predict(arm: Arm) -> tuple[Result, Workload, Cluster]:
    """Recovery times, start-up and step time are measured; what faults make of them is not."""
    share = float(arm.data.get("rollout_share", 0.5))
    work = Workload(
        mode=arm.data.get("mode", "sync"),
        rollout_s=share * arm.step_s,
        train_s=(1 - share) * arm.step_s,
        steps=arm.steps,
        sync_s=0.0,  # inside the measured step
        save_blocking_s=0.0,
        save_async_s=0.0,
        startup_s=arm.startup_s,
    )
    groups = int(arm.data.get("trainer_groups", 2))
    cluster = Cluster(groups, int(arm.data.get("engines", 2)), groups)
    return simulate(work, cluster, _strategy(arm), arm.trace), work, cluster


def _strategy(arm: Arm) -> Make:
    every = int(arm.data.get("checkpoint_interval", 1))
    longest_s = max(arm.recovery_s.values(), default=0.0)
    trainer_s = arm.recovery_s.get("trainer", longest_s)
    if arm.strategy.startswith("full_restart"):
        restart_s = arm.recovery_s.get("job", trainer_s)
        return lambda: FullRestart(restart_s, save_every=every, detection_s=0.0)
    if arm.strategy not in (NO_FAULT, "role_isolated"):
        raise LiveResultsInvalid(f"no model of the strategy {arm.strategy!r}")
    return lambda: RoleIsolated(
        trainer_s=trainer_s,
        job_s=longest_s,
        refill_s=arm.recovery_s.get("engine", longest_s),
        rollout_s=arm.recovery_s.get("rollout", longest_s),
        save_every=every,
    )
