"""What faults cost at scales nobody here can rent, simulated with this project's own decisions.

    python -m benchmarks.simulator [--verify] [--out DIR] [--seeds 12] [--live FILE]

Prints the published figures beside what the simulator says of them, ETTR from 128 to 100,000 GPUs
for four strategies, and the simulator beside the saved live runs. Writes simulator.json and
simulator.png to DIR (benchmarks/results). --verify: exit code 1 when a target is missed, or no live
runs are there; not for targets that contradict other published figures ("apart"), which are named
as not reproduced. Less than 2 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.simulator import parameters as p
from benchmarks.simulator import report, validation
from benchmarks.simulator.estimate import Estimate
from benchmarks.simulator.experiments import ScaleRow, at_scale, stressed, without_faults
from benchmarks.simulator.targets import Target, Verdict, all_targets
from benchmarks.simulator.validation import Comparison, LiveResultsInvalid

RESULTS = Path(__file__).parents[1] / "results"
SCALE_STEP_S = p.HOURS_STEP_S


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulator", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--verify", action="store_true", help="exit 1 when a target is missed")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--seeds", type=int, default=12, help="repeats of each run, at least 2")
    parser.add_argument("--live", type=Path, default=RESULTS / "ettr_live.json")
    args = parser.parse_args()
    if args.seeds < 2:
        parser.error("--seeds: a confidence interval needs 2 repeats at least")
    args.out.mkdir(parents=True, exist_ok=True)
    began_s, console = time.monotonic(), Console(width=None if sys.stdout.isatty() else 170)
    seeds = range(args.seeds)
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        targets_run = pool.submit(all_targets, seeds)
        scale_runs = [pool.submit(at_scale, *cell, SCALE_STEP_S, seeds) for cell in scale_cells()]
        targets = targets_run.result()
        sweep = sweep_at(sweep_step_s(targets), seeds)
        scales = list(chain.from_iterable(run.result() for run in scale_runs))
    report.print_targets(console, targets)
    report.print_scales(console, scales, SCALE_STEP_S, without_faults(SCALE_STEP_S))
    comparisons = validate(console, args.live)
    took_s = time.monotonic() - began_s
    write(args.out, targets, scales, sweep, comparisons, {"seeds": args.seeds, "took_s": took_s})
    missed = all_missed(targets, comparisons)
    report.print_verdict(console, targets, missed)
    console.print(f"{took_s:.0f} s")
    return 1 if args.verify and missed else 0


def scale_cells() -> list[tuple[int, str, float]]:
    """(GPUs, rate, how often engines fail against trainers)."""
    cells = [(gpus, rate, 1.0) for rate in p.RATES for gpus in p.SCALES_GPUS]
    return cells + [(gpus, "3.8", p.INFERENCE_RATE_SHARE) for gpus in p.SCALES_GPUS[-3:]]


def all_missed(targets: Sequence[Target], comparisons: Sequence[Comparison]) -> list[str]:
    missed = [t.name for t in targets if t.verdict is Verdict.MISSED]
    if not comparisons:
        missed.append("live: no saved runs to be validated against")
    return missed + [f"live {c.arm}, {c.definition}" for c in comparisons if not c.met]


def sweep_step_s(targets: Sequence[Target]) -> float:
    """That at which the ETTR of the sweep fits best."""
    return next(t.step_s for t in targets if t.name.startswith("sweep 2 %: ETTR") and t.step_s)


def sweep_at(step_s: float, seeds: Sequence[int]) -> list[dict[str, Any]]:
    make = partial(stressed, gpus=p.SWEEP_GPUS, steps=p.SWEEP_STEPS, step_s=step_s, seeds=seeds)
    rows = []
    for faults in p.SWEEP_FAULTS:
        pairs = make(faults=faults)
        rows.append(
            {
                "faults_percent": 100 * faults / p.SWEEP_STEPS,
                "step_s": step_s,
                "time_percent": asdict(Estimate.of([x.time_percent for x in pairs])),
                "ettr_points": asdict(Estimate.of([x.ettr_points for x in pairs])),
            }
        )
    return rows


def validate(console: Console, live: Path) -> list[Comparison]:
    try:
        comparisons = validation.compare(validation.load_arms(live))
    except FileNotFoundError:
        console.print(f"no live results to validate against: {live} is not there yet")
        return []
    except LiveResultsInvalid as e:
        raise SystemExit(f"live results: {e}; benchmarks/ettr_live.py writes them anew") from e
    report.print_validation(console, comparisons)
    return comparisons


def write(
    out: Path,
    targets: Sequence[Target],
    scales: Sequence[ScaleRow],
    sweep: Sequence[dict[str, Any]],
    comparisons: Sequence[Comparison],
    about: dict[str, Any],
) -> None:
    text = report.to_json(targets, scales, sweep, comparisons, about)
    (out / "simulator.json").write_text(text)
    report.plot(out / "simulator.png", sweep, scales)


if __name__ == "__main__":
    sys.exit(main())
