"""Requests straight to two real engines against requests through an SGLang gateway.

    python benchmarks/routing.py [--rounds 5] [--groups 32]

One serving role at a time, tiny model, the same seeds: seconds for groups of 4 samples of 16
tokens, all asked for at once, and of one request on its own. Prints JSON lines.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))
from conftest import ServingRole, serving_role  # noqa: E402

SAMPLES = 4
SAMPLING = {"max_new_tokens": 16, "ignore_eos": True}


def ask(role: ServingRole, name: str) -> float:
    """Seconds for one group."""
    began = time.monotonic()
    seeds = list(range(SAMPLES))
    role.generate(name, n=SAMPLES, seeds=seeds, sampling=SAMPLING)
    return time.monotonic() - began


def measure(role: ServingRole, rounds: int, groups: int) -> dict[str, float]:
    version = role.publish(0)["version"]
    role.until_served(version)
    if (gateway := role.status()["gateway"]) is not None and len(gateway["listed"]) < 2:
        role.until(lambda: len(role.status()["gateway"]["listed"]) == 2)
    with ThreadPoolExecutor(groups) as threads:
        seconds = []
        for number in range(rounds + 1):  # the first one warms up
            began = time.monotonic()
            list(threads.map(lambda i, n=number: ask(role, f"{n}-{i}"), range(groups)))
            seconds.append(time.monotonic() - began)
    alone = [ask(role, f"alone-{i}") for i in range(20)]
    median_s = statistics.median(seconds[1:])
    return {
        "samples": groups * SAMPLES,
        "median_s": round(median_s, 3),
        "tokens_per_s": round(groups * SAMPLES * SAMPLING["max_new_tokens"] / median_s),
        "alone_median_s": round(statistics.median(alone), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--groups", type=int, default=32)
    args = parser.parse_args()
    for router in ("own", "smg"):
        run = Path(tempfile.mkdtemp(prefix="routing-"))
        with serving_role(run, engines=2, router=router) as role:
            role.until(lambda: set(role.states()) == {"stale"}, 120)
            print(json.dumps({"router": router, **measure(role, args.rounds, args.groups)}))


if __name__ == "__main__":
    main()
