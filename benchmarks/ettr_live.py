"""What faults cost a real job, by how they are handled: the same trace against each strategy.

    python -m benchmarks.ettr_live [--quick] [--seeds N ...] [--steps N] [--only TEXT] [--out FILE]
                                   [--keep FOLDER] [--verify]

Real jobs of the debug configuration, with real SGLang and real torchft, two trainer groups and two
engines, a checkpoint at every step. Strategies:

    no_fault       nothing strikes; its step time places the faults of the others
    role_isolated  this package: only what failed starts again. `spare`: its shipped best, a warm
                   standby trainer (recovery.standby; under faults of all roles a standby engine,
                   too), which is no place of work and so not in the ratio; `cold`: without any
    full_restart   any fault restarts the whole job in place, as ByteRobust does it (SOSP '25):
                   the exit is seen at once, everything is killed at once and started again, all
                   roles in parallel, from the newest checkpoint (of every step, or of every 5
                   steps). What was rolled out after that is lost. Nothing is charged for machines,
                   images or scheduling; files are in the page cache, checkpoint code and start are
                   this package's own. An exit that no fault of the trace has caused is not
                   charged to it: the arm is run again

Faults, SIGKILL each: `trainers`, one trainer group at a uniform random time in every window of 10
steps (the 10 % of RobustRL, OSDI '26); `all_roles`, in every window a group and an engine, in every
second one the rollout role. The trace of a seed is the same for all.

How long a step takes decides what a restart costs, so each figure has its step time beside it, and
there are three loads. `short`: rollouts and training overlap (rl.mode async, policies two steps
old at most), and about as many steps go by in a restart as the paper's 80 against 60 % implies (7).
`long`: twice as long a step. `sync`: as short, but engines and trainers wait for one another, so
that the strict ratio is near one half without any fault. Answers keep their length, since nothing
is learned (lr 1e-9).

--quick: 30 steps, one seed, the short load: less than 20 minutes on two idle cores. The full run
takes about three hours. Every arm is saved when it is over, and one with the same configuration is
not run again, also when the code has changed (remove the file, or name another one with --out): a
run that was cut off goes on. Aims: strict ETTR at 10 % at least 20 points above full restart; a
fifth of its recovery time; no sample lost.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.live import plots, tables
from benchmarks.live.accounts import account, key_of
from benchmarks.live.arms import ENGINES, GROUPS, Arm, config_hash, plan
from benchmarks.live.driver import ArmFailed, Disturbed, run
from benchmarks.live.results import Results
from benchmarks.live.trace import WINDOW_STEPS, TraceFault, draw
from benchmarks.report import Aim, finish

ROOT = Path(__file__).parents[1]
FULL = ROOT / "benchmarks" / "results" / "ettr_live.json"
QUICK = ROOT / "outputs" / "ettr_live_quick.json"


def machine() -> dict[str, Any]:
    """What figures must not be compared across."""
    return {
        "cpus": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
    }


def trace_of(arm: Arm, results: Results) -> list[TraceFault]:
    """Drawn from the seed, placed by the step time of the arm without faults.

    Raises ArmFailed: there is no such arm."""
    if arm.faults == "none":
        return []
    calm = [
        a
        for a in results.arms
        if (a["load"], a["seed"], a["strategy"]) == (arm.load, arm.seed, "no_fault")
    ]
    if not calm:
        raise ArmFailed(f"{key_of(arm)} needs the step time of no_fault")
    return draw(
        arm.faults,
        steps=arm.steps,
        step_s=calm[0]["step_s"],
        seed=arm.seed,
        groups=GROUPS,
        engines=ENGINES,
    )


def measure(arms: list[Arm], results: Results, keep: Path | None = None) -> list[str]:
    """Run what has not been run; what failed, one line each. Run folders stay in `keep`."""
    failed = []
    for i, arm in enumerate(arms):
        try:
            trace = trace_of(arm, results)
            saved = results.find(config_hash(arm, trace))
            if saved is None:
                print(f"[{i + 1}/{len(arms)}] {key_of(arm)} ...", flush=True)
                saved = run_one(arm, trace, keep)
                results.put(saved)
            else:
                print(f"[{i + 1}/{len(arms)}] {key_of(arm)}: saved by an earlier run", flush=True)
        except (ArmFailed, ValueError) as e:
            failed.append(f"{key_of(arm)}: {str(e).splitlines()[0]}")
            print(f"FAILED {key_of(arm)}: {e}", flush=True)
            continue
        show(saved)
    return failed


def run_one(
    arm: Arm, trace: list[TraceFault], keep: Path | None = None, tries: int = 2
) -> dict[str, Any]:
    """Once more where it was disturbed. Raises ArmFailed, ValueError."""
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="ettr_live_") as temp:
            folder = unused(keep or Path(temp), key_of(arm).replace("/", "-"))
            saved = account(arm, trace, run(arm, trace, folder))
    except Disturbed as e:
        if tries <= 1:
            raise
        print(f"disturbed, once more: {str(e).splitlines()[0]}", flush=True)
        return run_one(arm, trace, keep, tries - 1)
    return {**saved, "took_s": round(time.monotonic() - began, 1)}


def unused(parent: Path, name: str) -> Path:
    """A new folder; that of an arm that was cut off stays as it is."""
    names = itertools.chain([name], (f"{name}.{i}" for i in itertools.count(1)))
    folder = next(f for n in names if not (f := parent.resolve() / n).exists())
    folder.mkdir(parents=True)
    return folder


def wanted(arms: Sequence[Arm], only: str) -> list[Arm]:
    """Those whose key has this text, and the arms without faults that they are placed by."""
    chosen = [a for a in arms if only in key_of(a)]
    places = {(a.load, a.seed) for a in chosen}
    return [
        a for a in arms if a in chosen or (a.strategy == "no_fault" and (a.load, a.seed) in places)
    ]


def show(saved: dict[str, Any]) -> None:
    strict, paper = saved["ettr"]["strict"], saved["ettr"]["paper"]
    print(
        f"{saved['key']:50} step {saved['step_s'] or 0:5.2f} s  strict {strict:.3f}  "
        f"paper {paper:.3f}  wall {saved['wall_s']:6.1f} s",
        flush=True,
    )


def table(found: list[tables.Row]) -> list[str]:
    lines = [tables.HEAD, *(tables.cells(row) for row in found)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(tables.HEAD))]
    return ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--steps", type=int, help="of each arm, instead of 100 (or 50, or 30)")
    parser.add_argument(
        "--only",
        default="",
        help="arms whose key (load/seed/strategy/faults/...) has this text, and their no_fault",
    )
    parser.add_argument("--keep", type=Path, help="a folder for the run folders to stay in")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--verify", action="store_true")
    args = parser.parse_args()
    if args.steps is not None and args.steps < WINDOW_STEPS:
        parser.error(f"--steps {args.steps}: a fault needs a window of {WINDOW_STEPS} steps")
    out = args.out or (QUICK if args.quick else FULL)
    arms = wanted(plan(quick=args.quick, seeds=args.seeds, steps=args.steps), args.only)
    try:
        if not arms:
            raise ValueError(f"no arm's key has {args.only!r}")
        results = Results(out, machine(), {a.load: a.steps for a in arms})
    except ValueError as e:
        print(f"ettr_live: error: {e}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # jobs are ended
    failed = measure(arms, results, args.keep)
    found = tables.rows(results.arms)
    print("\n".join(table(found)))
    if found:
        plots.save(found, out.with_suffix(".png"))
    aims = tables.aims(found)
    results.data["aims"] = {
        n: {"value": a.value, "aim": a.aim, "met": a.met} for n, a in aims.items()
    }
    results.write()
    if failed:
        print("\n".join(["not measured:", *failed]))
        aims["arms_that_failed"] = Aim(float(len(failed)), 0.0)
    lacking = tables.unmeasured(found)
    if args.verify and lacking:
        print("\n".join(["not measured, so nothing is verified:", *lacking]))
        aims["arms_not_measured"] = Aim(float(len(lacking)), 0.0)
    figures = {f"{r.load}/{r.name}": {"strict": r.strict, "paper": r.paper} for r in found}
    return finish("ettr_live", figures, aims, verify=args.verify)


if __name__ == "__main__":
    sys.exit(main())
