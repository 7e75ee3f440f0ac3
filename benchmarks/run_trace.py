"""What the trace of a run costs: while the run writes it down, and to make it.

    python benchmarks/run_trace.py [--samples 100000] [--repeats 5] [--verify] [--out FILE]

Events of a run of 16 samples per prompt group and 64 groups per step are written by the code that
writes them in a run, with and without what each sample went through, by turns; every tenth group
moved from one engine to another. Then `torchtitan report --trace`, in processes of its own,
of the whole run (100,000 samples) and of a tenth of it, with the peak memory. Aims: at most 200 us
more per prompt group of 16 samples, a trace in at most 20 s, at most 1.5 times the memory for
ten times the samples. Needs no engine and no accelerator.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import Aim, finish

from torchtitan_rl_ft.observability.events import EventLog, Kind
from torchtitan_rl_ft.rollout.sample_times import GroupTimes
from torchtitan_rl_ft.serving.sample_times import LegTimes

SAMPLES_PER_GROUP, GROUPS_PER_STEP = 16, 64
MESSAGES = 8
"""That an engine streams of a sample."""

MAKE_TRACE = """
import json, resource, sys, time
from torchtitan_rl_ft.cli import main
began_s = time.monotonic()
code = main(["report", sys.argv[1], "--trace", sys.argv[2], "--json"])
took_s = time.monotonic() - began_s
peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"code": code, "took_s": took_s, "peak_mib": peak_mib}))
"""


def legs_of(group: int, since_s: float) -> list[list[Any]]:
    """One sample's way, told message by message as in the router."""
    found = []
    for engine in ("engine-0", "engine-1")[: 2 if group % 10 == 0 else 1]:
        times = LegTimes(since_s + 0.001)
        for message in range(MESSAGES):
            ended = message == MESSAGES - 1
            times.told(since_s + 0.1 * message, {"meta_info": {"queue_time": 0.01}}, ended)
        found.append(times.to_json(engine, 256, since_s, since_s + 1.0))
    return found


def write(folder: Path, samples: int, *, traced: bool) -> float:
    """Events of a run; microseconds that each ACCEPT took, with what it tells."""
    folder.mkdir()
    log = EventLog(folder / "events.jsonl", run="run", role="rollout", name="rollout")
    log.emit(Kind.RUN, phase="start")
    accepting_s, groups = 0.0, samples // SAMPLES_PER_GROUP
    for group in range(groups):
        began_s = time.perf_counter()
        told: dict[str, Any] = {"group": group}
        if traced:
            now_s = time.monotonic()
            legs = [legs_of(group, now_s - 1.0) for _ in range(SAMPLES_PER_GROUP)]
            times = GroupTimes(now_s - 1.0, now_s - 1.0, now_s - 0.1, now_s, 0, legs)
            told["trace"] = times.to_json([0.5] * SAMPLES_PER_GROUP)
        log.emit(Kind.ACCEPT, version=1, **told)
        accepting_s += time.perf_counter() - began_s
        if (group + 1) % GROUPS_PER_STEP == 0:
            step = (group + 1) // GROUPS_PER_STEP
            sealed = list(range(group + 1 - GROUPS_PER_STEP, group + 1))
            log.emit(Kind.SEAL, step=step, batch=step, groups=sealed)
            log.emit(Kind.COMMIT, step=step, batch=step)
    log.close()
    return accepting_s / groups * 1e6


def trace(folder: Path) -> dict[str, float]:
    file = folder / "trace.json.gz"
    command = [sys.executable, "-c", MAKE_TRACE, str(folder), str(file)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = json.loads(told.splitlines()[-1])
    assert found["code"] == 0
    return {
        "took_s": round(found["took_s"], 2),
        "peak_mib": round(found["peak_mib"], 1),
        "file_mib": round(file.stat().st_size / 2**20, 2),
        "events_mib": round((folder / "events.jsonl").stat().st_size / 2**20, 2),
    }


def measure(folder: Path, samples: int, repeats: int) -> dict[str, Any]:
    costs_us: dict[bool, list[float]] = {True: [], False: []}
    for repeat in range(repeats):
        for traced in (True, False):
            cost = write(folder / f"cost-{repeat}-{traced}", 8_000, traced=traced)
            costs_us[traced].append(cost)
    write(folder / "whole", samples, traced=True)
    write(folder / "tenth", samples // 10, traced=True)
    write(folder / "untraced", samples, traced=False)
    off_us, on_us = statistics.median(costs_us[False]), statistics.median(costs_us[True])
    return {
        "samples": samples,
        "accept_us": {"off": round(off_us, 1), "on": round(on_us, 1)},
        "trace": {name: trace(folder / name) for name in ("tenth", "whole", "untraced")},
        "own_peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="run-trace-") as folder:
        figures = measure(Path(folder), args.samples, args.repeats)
    made, accept_us = figures["trace"], figures["accept_us"]
    aims = {
        "us more per prompt group": Aim(accept_us["on"] - accept_us["off"], 200.0),
        "seconds to make the trace": Aim(made["whole"]["took_s"], 20.0),
        "memory, whole / tenth": Aim(made["whole"]["peak_mib"] / made["tenth"]["peak_mib"], 1.5),
    }
    if args.out is not None:
        shown = {n: {"value": a.value, "aim": a.aim, "met": a.met} for n, a in aims.items()}
        args.out.write_text(json.dumps({"figures": figures, "aims": shown}, indent=1) + "\n")
    return finish("run_trace", figures, aims, verify=args.verify)


if __name__ == "__main__":
    sys.exit(main())
