"""What it costs that engines stream: requests for samples, streamed and not.

    python benchmarks/streaming.py [--rounds 8] [--intervals 1,8,16,32,64]

Two serving roles with two real engines each, tiny model: one streams every request, one none. They
are asked in turns, in random order, so that what else the machine does meets all alike; SGLang
takes the interval with each request. CPU time is that of serving and its engines, and is the figure
to compare on a busy machine. Prints JSON lines.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))
from conftest import ServingRole, serving_role  # noqa: E402

WORK = {"128 x 16": (16, 8, 16), "32 x 256": (4, 8, 256)}
"""Groups asked for at once, samples of a group, tokens of a sample."""

NEVER = 0
ALWAYS_STREAMS, NEVER_STREAMS = 1, 1_000_000


def cpu_s(role: ServingRole) -> tuple[float, float]:
    """Of serving, and of its engines."""
    pids = [engine["pid"] for engine in role.engines()]
    processes = [p for pid in pids for p in tree(pid)]
    return used_s(psutil.Process(role.process.pid)), sum(map(used_s, processes))


def tree(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def used_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def burst(role: ServingRole, work: str, interval: int, name: str) -> dict[str, float]:
    """Figures for one set of groups, asked for at once."""
    groups, samples, tokens = WORK[work]
    sampling = {"max_new_tokens": tokens, "ignore_eos": True}
    if interval != NEVER:
        sampling["stream_interval"] = interval

    def ask(group: int) -> None:
        seeds = [random.randrange(2**31) for _ in range(samples)]
        prompt = [3, 4, 5, 6 + group % 8]
        request = {"input_ids": prompt, "n": samples, "seeds": seeds, "sampling": sampling}
        answer = role.generate(f"{name}-{group}", **request)
        assert sum(len(s["output_ids"]) for s in answer) == samples * tokens

    before, began = cpu_s(role), time.monotonic()
    with ThreadPoolExecutor(groups) as threads:
        list(threads.map(ask, range(groups)))
    took_s, after, total = time.monotonic() - began, cpu_s(role), groups * samples * tokens
    return {
        "tokens_per_s": total / took_s,
        "serving_us_per_token": (after[0] - before[0]) / total * 1e6,
        "engines_us_per_token": (after[1] - before[1]) / total * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--intervals", default="1,8,16,32,64")
    args = parser.parse_args()
    intervals = [NEVER, *map(int, args.intervals.split(","))]
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    with ExitStack() as stack:
        roles = [
            stack.enter_context(
                serving_role(
                    Path(tempfile.mkdtemp(prefix="streaming-")),
                    engines=2,
                    stream_interval_tokens=interval,
                )
            )
            for interval in (ALWAYS_STREAMS, NEVER_STREAMS)
        ]
        for role in roles:
            role.until(lambda role=role: set(role.states()) == {"stale"}, 120)
            role.until_served(role.publish(0)["version"])
        for n in range(args.rounds + 1):  # the first round warms up
            for interval in random.sample(intervals, len(intervals)):
                for work in WORK:
                    role = roles[interval == NEVER]
                    figures = burst(role, work, interval, f"{work}-{interval}-{n}")
                    if n:
                        found.setdefault((work, interval), []).append(figures)
    for (work, interval), rounds in sorted(found.items()):
        shown = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
        best = max(r["tokens_per_s"] for r in rounds)
        named = {"work": work, "interval": interval or "not streamed", "rounds": len(rounds)}
        figures = {name: round(value, 1) for name, value in shown.items()}
        print(json.dumps({**named, "best_tokens_per_s": round(best), **figures}))


if __name__ == "__main__":
    main()
