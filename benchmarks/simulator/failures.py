"""Which faults a job meets: drawn, injected by step, or those of a recorded run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from benchmarks.simulator.parameters import CAUSES, DAY_S, INJECTED, Cause

Role = Literal["trainer", "engine", "rollout"]


@dataclass(frozen=True)
class Fault:
    """A machine, or a process, that fails: `at_s` after the start, or `offset_s` after the job
    has first committed `after_step` steps."""

    role: Role
    index: int = 0
    at_s: float | None = None
    after_step: int = 0
    offset_s: float = 0.0
    cause: Cause = INJECTED


def injected(
    rng: np.random.Generator, *, steps: int, faults: int, step_s: float
) -> tuple[Fault, ...]:
    """One trainer fault at a uniform random time in each of `faults` equal windows of the steps
    ("10 % failure injection": 10 faults in 100 steps; RobustRL, OSDI '26)."""
    window = steps / faults
    found = []
    for i in range(faults):
        position = (i + float(rng.random())) * window
        step = int(position)
        found.append(Fault("trainer", after_step=step, offset_s=(position - step) * step_s))
    return tuple(found)


def poisson(
    rng: np.random.Generator,
    *,
    trainer_machines: int,
    engine_machines: int,
    trainer_groups: int,
    rate_per_day: float,
    engine_rate_share: float,
    horizon_s: float,
) -> tuple[Fault, ...]:
    """Machines fail independently, `rate_per_day` each; by a cause of the published shares.
    `engine_rate_share`: the rate of an engine's machine against a trainer's."""
    counts = np.array([c.count for c in CAUSES], dtype=float)
    shares = counts / counts.sum()
    found: list[Fault] = []
    roles: tuple[tuple[Role, int, int, float], ...] = (
        ("trainer", trainer_machines, trainer_groups, 1.0),
        ("engine", engine_machines, engine_machines, engine_rate_share),
    )
    for role, machines, units, factor in roles:
        mean = machines * rate_per_day * factor * horizon_s / DAY_S
        times_s = rng.random(rng.poisson(mean)) * horizon_s
        # As many draws whatever `units`: jobs in one group or in many meet the same faults.
        units_hit = (rng.random(len(times_s)) * units).astype(int)
        causes = rng.choice(len(CAUSES), size=len(times_s), p=shares)
        for at_s, unit, cause in zip(times_s, units_hit, causes, strict=True):
            found.append(Fault(role, int(unit), float(at_s), cause=CAUSES[cause]))
    return tuple(sorted(found, key=lambda f: f.at_s or 0.0))
