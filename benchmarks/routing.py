"""Requests straight to two real engines against requests through an SGLang gateway.

    python benchmarks/routing.py [--rounds 20] [--groups 32]

Two serving roles with two engines each, tiny model; they are asked in turns, so that what else the
machine does meets both. Seconds for groups of 4 samples of 16 tokens, all asked for at once, and
of one group on its own. Prints JSON lines.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))
from conftest import ServingRole, serving_role  # noqa: E402

SAMPLES = 4
SAMPLING = {"max_new_tokens": 16, "ignore_eos": True}


def ask(role: ServingRole, name: str) -> None:
    role.generate(name, n=SAMPLES, seeds=list(range(SAMPLES)), sampling=SAMPLING)


def seconds_for(role: ServingRole, names: list[str]) -> float:
    began = time.monotonic()
    with ThreadPoolExecutor(len(names)) as threads:
        list(threads.map(lambda name: ask(role, name), names))
    return time.monotonic() - began


def ready(role: ServingRole) -> None:
    role.until(lambda: set(role.states()) == {"stale"}, 120)
    role.until_served(role.publish(0)["version"])
    if role.status()["gateway"] is not None:
        role.until(lambda: len(role.status()["gateway"]["listed"]) == 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--groups", type=int, default=32)
    args = parser.parse_args()
    with ExitStack() as stack:
        roles = {}
        for router in ("own", "smg"):
            run = Path(tempfile.mkdtemp(prefix="routing-"))
            roles[router] = stack.enter_context(serving_role(run, engines=2, router=router))
        for role in roles.values():
            ready(role)
        together: dict[str, list[float]] = {router: [] for router in roles}
        alone: dict[str, list[float]] = {router: [] for router in roles}
        for n in range(args.rounds + 1):
            for router, role in roles.items():
                names = [f"{n}-{i}" for i in range(args.groups)]
                together[router].append(seconds_for(role, names))
                alone[router].append(seconds_for(role, [f"{n}-alone"]))
    for router in roles:
        median_s = statistics.median(together[router][1:])  # the first round warms up
        tokens = args.groups * SAMPLES * SAMPLING["max_new_tokens"]
        shown = {
            "router": router,
            "samples": args.groups * SAMPLES,
            "rounds": args.rounds,
            "median_s": round(median_s, 3),
            "tokens_per_s": round(tokens / median_s),
            "alone_median_s": round(statistics.median(alone[router][1:]), 4),
        }
        print(json.dumps(shown))


if __name__ == "__main__":
    main()
