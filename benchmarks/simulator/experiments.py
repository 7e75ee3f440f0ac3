"""The runs behind the tables: stress, sweep, scale. Every seed of a comparison has one trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.simulator import failures
from benchmarks.simulator import parameters as p
from benchmarks.simulator.cluster import Cluster, Workload
from benchmarks.simulator.estimate import Estimate
from benchmarks.simulator.failures import Fault
from benchmarks.simulator.job import Job, Result
from benchmarks.simulator.strategies.base import Strategy
from benchmarks.simulator.strategies.full_restart import FullRestart
from benchmarks.simulator.strategies.laminar_like import LaminarLike
from benchmarks.simulator.strategies.role_isolated import RoleIsolated
from benchmarks.simulator.strategies.slime_like import SlimeLike
from torchtitan_rl_ft.rollout.schedule import Mode

MODE: Mode = "semi_async"
"""That of the shipped configuration of RobustRL's workload (one of its three)."""

Make = Callable[[], Strategy]


def simulate(
    work: Workload,
    cluster: Cluster,
    make: Make,
    faults: Sequence[Fault],
    horizon_s: float = math.inf,
) -> Result:
    return Job(work, cluster, make(), faults, horizon_s).run()


@dataclass(frozen=True)
class Pair:
    """Of one trace: the baseline and ours."""

    base: Result
    ours: Result

    @property
    def time_percent(self) -> float:
        return 100 * (self.ours.wall_s / self.base.wall_s - 1)

    @property
    def ettr_points(self) -> float:
        return 100 * (self.ours.credit - self.base.credit)


def stressed(
    *,
    gpus: int,
    steps: int,
    faults: int,
    step_s: float,
    seeds: Sequence[int],
    base: Make = FullRestart,
    ours: Make = RoleIsolated,
    mode: Mode = MODE,
) -> list[Pair]:
    """A trainer fault in each of `faults` equal windows of `steps` steps."""
    work, cluster = Workload.of_step(mode, step_s, steps), Cluster.of_gpus(gpus)
    pairs = []
    for seed in seeds:
        rng = np.random.default_rng([seed, faults])
        trace: tuple[Fault, ...] = ()
        if faults:
            trace = failures.injected(rng, steps=steps, faults=faults, step_s=step_s)
        pairs.append(
            Pair(simulate(work, cluster, base, trace), simulate(work, cluster, ours, trace))
        )
    return pairs


@dataclass(frozen=True)
class ScaleRow:
    gpus: int
    rate: str
    engine_rate_share: float
    strategy: str
    strict: Estimate
    paper: Estimate
    faults: float  # per repeat
    days: float  # of each repeat
    job_restarts: float


SCALE_STRATEGIES: dict[str, tuple[Make, int | None]] = {
    "full_restart": (lambda: FullRestart(save_every=1), None),
    "slime_like": (lambda: SlimeLike(save_every=1), None),
    "laminar_like": (lambda: LaminarLike(save_every=1), None),
    "role_isolated": (RoleIsolated, None),
    "role_isolated, groups": (RoleIsolated, p.GROUP_MACHINES),
}
"""Strategy and machines of a replica group (None: one group). All save every step."""

FAULTS_WANTED, SHORTEST_DAYS, LONGEST_DAYS = 60, 0.5, 20.0


def at_scale(
    gpus: int, rate: str, engine_rate_share: float, step_s: float, seeds: Sequence[int]
) -> list[ScaleRow]:
    """Machines that fail as Poisson processes, for as long as brings about `FAULTS_WANTED`."""
    machines = gpus // p.GPUS_PER_MACHINE
    per_day = machines * p.RATES[rate] * (1 + engine_rate_share) / 2
    days = min(max(FAULTS_WANTED / per_day, SHORTEST_DAYS), LONGEST_DAYS)
    rows = []
    for name, (make, group_machines) in SCALE_STRATEGIES.items():
        cluster = Cluster.of_gpus(gpus, group_machines=group_machines)
        results = []
        for seed in seeds:
            trace = failures.poisson(
                np.random.default_rng([seed, gpus]),
                trainer_machines=cluster.trainer_machines,
                engine_machines=cluster.engines,
                trainer_groups=cluster.trainer_groups,
                rate_per_day=p.RATES[rate],
                engine_rate_share=engine_rate_share,
                horizon_s=days * p.DAY_S,
            )
            work = Workload.of_step(MODE, step_s)
            results.append(simulate(work, cluster, make, trace, days * p.DAY_S))
        rows.append(
            ScaleRow(
                gpus,
                rate,
                engine_rate_share,
                name,
                Estimate.of([r.strict for r in results]),
                Estimate.of([r.paper for r in results]),
                float(np.mean([r.faults for r in results])),
                days,
                float(np.mean([r.job_restarts for r in results])),
            )
        )
    return rows


def without_faults(step_s: float, days: float = 1.0) -> Result:
    work, cluster = Workload.of_step(MODE, step_s), Cluster.of_gpus(p.STRESS_GPUS)
    return simulate(work, cluster, RoleIsolated, (), days * p.DAY_S)


def expected_ettr(
    *, failures_per_day: float, restart_s: float, interval_s: float, save_s: float
) -> float:
    """E[ETTR] = (1 - N r (u0 + dt / 2)) / (1 + w / dt) of checkpoint and restart: N r failures a
    day, u0 a restart, dt between checkpoints, w a checkpoint (arXiv 2410.21680, second-hand)."""
    lost = failures_per_day * (restart_s + interval_s / 2) / p.DAY_S
    return (1 - lost) / (1 + save_s / interval_s)
