"""What is published, against what the simulator says: one table, and what cannot be met together.

The one free quantity is the time of a step, which nobody publishes. Each figure that depends on it
is compared at the step time that fits it best (calibration), so a figure with several numbers is a
test, and step times that differ show which figures contradict each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from benchmarks.simulator import failures
from benchmarks.simulator import parameters as p
from benchmarks.simulator.cluster import Cluster, Workload
from benchmarks.simulator.estimate import Estimate
from benchmarks.simulator.experiments import (
    MODE,
    Pair,
    expected_ettr,
    simulate,
    stressed,
)
from benchmarks.simulator.failures import Fault
from benchmarks.simulator.strategies.full_restart import FullRestart
from benchmarks.simulator.strategies.role_isolated import RoleIsolated
from torchtitan_rl_ft.rollout.schedule import Mode

STEPS_S = (25.0, 33.0, 42.0, 50.0, 60.0, 70.0, 80.0, 100.0, 140.0, 200.0, 342.0, 600.0)
"""Step times that are tried."""

TIME_POINTS, ETTR_POINTS = 3.0, 3.0
"""Tolerances: about the spread of a single run over the fault times (printed beside them); how
often the published runs were repeated is not stated."""

SCALE_POINTS = 5.0  # of figures of another system, whose failure rate is not stated
RATIO = 0.1  # 1.5 to 1.7
FORMULA_POINTS = 1.0


class Verdict(StrEnum):
    MET = "met"
    MISSED = "MISSED"
    APART = "apart"
    """No step time meets it: it contradicts other published figures. The reason is printed."""


@dataclass(frozen=True)
class Target:
    name: str
    predicted: Estimate
    target: float
    tolerance: float
    source: str
    step_s: float | None = None
    at_least: bool = False
    """The source says "over": more is met too."""
    reason: str = ""
    """Why a miss is a contradiction in the figures, shown by the simulator; empty: it is not."""

    @property
    def verdict(self) -> Verdict:
        off = self.predicted.mean - self.target
        if abs(off) <= self.tolerance or (self.at_least and off > 0):
            return Verdict.MET
        return Verdict.APART if self.reason else Verdict.MISSED


Figures = dict[float, dict[int, list[Pair]]]
"""Of a sweep: by step time and number of faults."""


def all_targets(seeds: Sequence[int]) -> list[Target]:
    sweep = run_sweep(seeds)
    return [
        *ettr_sweep(sweep),
        *time_sweep(sweep, seeds),
        *(under_stress := stress(seeds)),
        *restart_ratios(seeds),
        *hours(seeds, under_stress[0].step_s or STEPS_S[0]),
        no_fault(sweep),
        *hundred_thousand(seeds),
        closed_form(seeds),
    ]


def run_sweep(seeds: Sequence[int]) -> Figures:
    few, many = p.SWEEP_FAULTS[0], p.SWEEP_FAULTS[-1]
    return {s: {n: _sweep_pairs(s, n, seeds) for n in (0, few, many)} for s in STEPS_S}


def _sweep_pairs(step_s: float, faults: int, seeds: Sequence[int]) -> list[Pair]:
    return stressed(
        gpus=p.SWEEP_GPUS,
        steps=p.SWEEP_STEPS,
        faults=faults,
        step_s=step_s,
        seeds=seeds if faults else seeds[:2],
    )


def best_step_s(misses: dict[float, float]) -> float:
    return min(misses, key=lambda s: misses[s])


SWEEP = "RobustRL, fault sweep"
TIME_PUBLISHED = (-2.2, -12.2)
"""Percent, at 2 and at 10 % of the steps."""


def ettr_sweep(sweep: Figures) -> list[Target]:
    few, many = (2.7, 15.7)
    found = {s: _estimates(by, lambda pair: pair.ettr_points) for s, by in sweep.items()}
    step_s = best_step_s({s: abs(a.mean - few) + abs(b.mean - many) for s, (a, b) in found.items()})
    low, high = found[step_s]
    return [
        Target("sweep 2 %: ETTR, points", low, few, ETTR_POINTS, SWEEP, step_s),
        Target("sweep 10 %: ETTR, points", high, many, ETTR_POINTS, SWEEP, step_s),
    ]


def time_sweep(sweep: Figures, seeds: Sequence[int]) -> list[Target]:
    few, many = TIME_PUBLISHED
    found = {s: _estimates(by, lambda pair: pair.time_percent) for s, by in sweep.items()}
    step_s = best_step_s({s: abs(a.mean - few) + abs(b.mean - many) for s, (a, b) in found.items()})
    low, high = found[step_s]
    reason = _why_time_is_apart(sweep, found, seeds)
    return [
        Target("sweep 2 %: time, %", low, few, TIME_POINTS, SWEEP, step_s, reason=reason),
        Target("sweep 10 %: time, %", high, many, TIME_POINTS, SWEEP, step_s, reason=reason),
    ]


def _estimates(
    by_faults: dict[int, list[Pair]], figure: Callable[[Pair], float]
) -> tuple[Estimate, Estimate]:
    few, many = p.SWEEP_FAULTS[0], p.SWEEP_FAULTS[-1]
    return (
        Estimate.of([figure(pair) for pair in by_faults[few]]),
        Estimate.of([figure(pair) for pair in by_faults[many]]),
    )


def _why_time_is_apart(
    sweep: Figures, found: dict[float, tuple[Estimate, Estimate]], seeds: Sequence[int]
) -> str:
    """Faults at uniform times cost a baseline that saves every 5 steps 2 steps more than one that
    saves each step. What it would be without them is simulated as well."""
    least_s = max(found, key=lambda s: found[s][1].mean)
    least = found[least_s][1]

    def percent(step_s: float, save_every: int, mode: Mode = MODE) -> float:
        pairs = stressed(
            gpus=p.SWEEP_GPUS,
            steps=p.SWEEP_STEPS,
            faults=p.SWEEP_FAULTS[-1],
            step_s=step_s,
            seeds=seeds,
            base=lambda: FullRestart(save_every=save_every),
            mode=mode,
        )
        return float(np.mean([pair.time_percent for pair in pairs]))

    modes: tuple[Mode, ...] = ("sync", "async")
    others = ", ".join(
        f"{percent(p.HOURS_STEP_S, p.BASELINE_SAVE_EVERY, mode):.1f} % in {mode}" for mode in modes
    )
    saves_each = {s: percent(s, 1) for s in (60.0, 80.0, 140.0)}
    if not restarts_alone_fit(least.mean, list(saves_each.values())):
        return ""
    without = ", ".join(f"{each:.1f} % at {s:g} s a step" for s, each in saves_each.items())
    return (
        f"of all step times from {STEPS_S[0]:g} to {STEPS_S[-1]:g} s the least at 10 % is "
        f"{least.mean:.1f} % (one run: ± {least.spread:.1f}) at {least_s:g} s ({others}, at "
        f"{p.HOURS_STEP_S:g} s). Faults at uniform times cost a baseline that saves every 5 steps "
        "2 steps of redoing more on average than one that saves every step, and its rollouts. The "
        "published time has room for about the restarts alone: a baseline that saves every step "
        f"too gives {without}"
    )


def restarts_alone_fit(least: float, saves_each: Sequence[float]) -> bool:
    """Whether the published time at 10 % is a contradiction and no fault of the simulator: more is
    saved at any step time, and what a baseline that saves each step would cost is about it."""
    few, many = min(saves_each), max(saves_each)
    published = TIME_PUBLISHED[1]
    return least < published - TIME_POINTS and few - TIME_POINTS <= published <= many + TIME_POINTS


STRESS = "RobustRL, 8B-Math at 10 %"


def _saved_each_step(step_s: float, seeds: Sequence[int]) -> list[Pair]:
    """The 10 % stress against a baseline that saves every step."""
    return stressed(
        gpus=p.STRESS_GPUS,
        steps=p.STRESS_STEPS,
        faults=p.STRESS_FAULTS,
        step_s=step_s,
        seeds=seeds,
        base=lambda: FullRestart(save_every=1),
    )


def stress(seeds: Sequence[int]) -> list[Target]:
    """80 against 60 %: the step time at which the baseline has 60 %; ours there is the test."""

    def both(of: list[Pair]) -> tuple[Estimate, Estimate]:
        base = Estimate.of([100 * pair.base.credit for pair in of])
        return base, Estimate.of([100 * pair.ours.credit for pair in of])

    found = {s: both(_saved_each_step(s, seeds)) for s in STEPS_S if s <= 100}
    step_s = best_step_s({s: abs(base.mean - 60) for s, (base, _) in found.items()})
    base, ours = found[step_s]
    return [
        Target("10 %: ETTR of the baseline, %", base, 60.0, ETTR_POINTS, STRESS, step_s),
        Target("10 %: ETTR of ours, %", ours, 80.0, ETTR_POINTS, STRESS, step_s, at_least=True),
    ]


def restart_ratios(seeds: Sequence[int]) -> list[Target]:
    """A check of the simulator's accounts, not of its model: the restart times are parameters."""
    found = []
    for name, times in (("8B", p.RESTART_8B), ("32B", p.RESTART_32B)):
        pairs = stressed(
            gpus=p.STRESS_GPUS,
            steps=p.STRESS_STEPS,
            faults=p.STRESS_FAULTS,
            step_s=60.0,
            seeds=seeds[:4],
            base=lambda times=times: FullRestart(restart_s=times.job_s),
            ours=lambda times=times: RoleIsolated(trainer_s=times.trainer_s),
        )
        ratio = Estimate.of(
            [float(np.mean(x.base.outages_s) / np.mean(x.ours.outages_s)) for x in pairs]
        )
        source = "RobustRL, restart times"
        found.append(Target(f"restart ratio (an input), {name}", ratio, 1.6, RATIO, source))
    return found


def hours(seeds: Sequence[int], stress_step_s: float) -> list[Target]:
    """0.8 to 2.1 h saved in 100 steps, at the step time of 80 against 60 % and at its own."""

    def saved_h(of: list[Pair]) -> Estimate:
        return Estimate.of([(x.base.wall_s - x.ours.wall_s) / 3600 for x in of])

    long_pairs = _saved_each_step(p.HOURS_STEP_S, seeds)
    at_60, long = saved_h(_saved_each_step(stress_step_s, seeds)), saved_h(long_pairs)
    base = 100 * float(np.mean([x.base.credit for x in long_pairs]))
    middle, half = (0.8 + 2.1) / 2, (2.1 - 0.8) / 2
    reason = ""
    if base > 60 + ETTR_POINTS and abs(long.mean - middle) <= half:
        reason = (
            f"80 against 60 % needs some {stress_step_s:g} s a step, at which {at_60.mean:.1f} h "
            f"are saved; 0.8 h as 8.4 % and 2.1 h as 17.4 % are steps of {p.HOURS_STEP_S:g} s and "
            f"more, at which {long.mean:.1f} h are saved and the baseline has {base:.0f} %"
        )
    source = "RobustRL, end-to-end time, 8B"
    return [
        Target("10 %: hours saved", at_60, middle, half, source, stress_step_s, reason=reason),
        Target("10 %: hours saved, long steps", long, middle, half, source, p.HOURS_STEP_S),
    ]


def no_fault(sweep: Figures) -> Target:
    """Saving each step against every 5 steps: nothing, as trainers wait for rollouts anyway."""
    step_s = STEPS_S[0]
    found = Estimate.of([pair.time_percent for pair in sweep[step_s][0]])
    return Target("no faults: time, %", found, 0.0, 1.0, SWEEP, step_s)


RATES_100K = (p.RATE_RSC_1, 8.0e-3, 9.5e-3)
"""Failures per machine and day that are tried, from the highest published one upwards (the MTTF
measured on the same cluster implies 23.7 per 1,000)."""


def hundred_thousand(seeds: Sequence[int]) -> list[Target]:
    """100K GPUs, stalls of 10 and 3 min. The failure rate is not stated: one rate has to
    fit both figures (calibration)."""

    def effective(rate: float, stall_s: float) -> Estimate:
        cluster, days = Cluster.of_gpus(100_000), 3.0
        ratios = []
        for seed in seeds[:8]:
            trace = machines_fail(cluster, rate, days, seed)
            strategy = FullRestart(stall_s, save_every=1, detection_s=0.0)
            work = Workload.of_step(MODE, 42.0)
            result = simulate(work, cluster, lambda s=strategy: s, trace, days * p.DAY_S)
            ratios.append(100 * result.credit)
        return Estimate.of(ratios)

    goals = {
        p.STALL_100K_S: 100 * p.EFFECTIVE_100K,
        p.STALL_100K_HSDP_S: 100 * p.EFFECTIVE_100K_HSDP,
    }
    tried = {rate: [effective(rate, stall_s) for stall_s in goals] for rate in RATES_100K}

    def miss(rate: float) -> float:
        pairs = zip(tried[rate], goals.values(), strict=True)
        return sum(abs(found.mean - goal) for found, goal in pairs)

    rate = min(tried, key=miss)
    long, short = tried[rate]
    source = f"FT-HSDP, abstract; at {1_000 * rate:g} failures per 1,000 machines and day"
    name = "100K GPUs, stalls of {} min: effective, %"
    return [
        Target(name.format(10), long, goals[p.STALL_100K_S], SCALE_POINTS, source),
        Target(name.format(3), short, goals[p.STALL_100K_HSDP_S], SCALE_POINTS, source),
    ]


def machines_fail(
    cluster: Cluster, rate_per_day: float, days: float, seed: int
) -> tuple[Fault, ...]:
    return failures.poisson(
        np.random.default_rng(seed),
        trainer_machines=cluster.trainer_machines,
        engine_machines=cluster.engines,
        trainer_groups=cluster.trainer_groups,
        rate_per_day=rate_per_day,
        engine_rate_share=1.0,
        horizon_s=days * p.DAY_S,
    )


def closed_form(seeds: Sequence[int]) -> Target:
    """Checkpoint and restart of a job of trainers, against the formula."""
    step_s, every, days = 300.0, 6, 60.0
    cluster = Cluster.of_gpus(8_192)
    machines = cluster.trainer_machines + cluster.engines
    work = Workload.of_step("sync", step_s)
    ratios = []
    for seed in seeds[:8]:
        trace = machines_fail(cluster, p.RATE_LLAMA, days, seed)
        strategy = FullRestart(save_every=every, detection_s=0.0)
        result = simulate(work, cluster, lambda s=strategy: s, trace, days * p.DAY_S)
        ratios.append(100 * result.steps * step_s / result.wall_s)
    expected = expected_ettr(
        failures_per_day=machines * p.RATE_LLAMA,
        restart_s=p.RESTART_8B.job_s,
        interval_s=every * step_s,
        save_s=p.SAVE_BLOCKING_S,
    )
    name = "8,192 GPUs, checkpoint and restart: ETTR, %"
    source = "RSC clusters, closed form"
    return Target(name, Estimate.of(ratios), 100 * expected, FORMULA_POINTS, source, step_s)
