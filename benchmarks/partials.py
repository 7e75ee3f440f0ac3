"""What it costs that unfinished samples are journaled.

    python benchmarks/partials.py [--rounds 5] [--intervals 16,64,256] [--out FILE]

A serving role with two real engines, tiny model, is asked for all groups of a step at once, by the
rollout role's own client, keeper and journal (on disk, durable) in this process; then the groups
are accepted. Nothing kept and each `recovery.partial_interval_tokens` take turns in random order,
so that what else the machine does meets all alike. CPU time per token is the figure to compare on a
busy machine; `of_off` is the ratio to nothing kept. Prints JSON lines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))
from conftest import TOKEN, ServingRole, serving_role  # noqa: E402

from torchtitan_rl_ft.journal.store import Journal, NewGroup  # noqa: E402
from torchtitan_rl_ft.observability.events import EventList  # noqa: E402
from torchtitan_rl_ft.rollout.generation import GenerateRequest, ServingClient  # noqa: E402
from torchtitan_rl_ft.rollout.partials import PartialKeeper  # noqa: E402

WORK = {"64 x 16": (16, 4, 16), "64 x 400": (16, 4, 400)}
"""Groups of a step, samples of a group, tokens of a sample."""

OFF = 0


def cpu_s(role: ServingRole) -> dict[str, float]:
    engines = sum(tree_s(engine["pid"]) for engine in role.engines())
    return {
        "rollout": used_s(psutil.Process()),
        "serving": used_s(psutil.Process(role.process.pid)),
        "engines": engines,
    }


def tree_s(pid: int) -> float:
    root = psutil.Process(pid)
    return sum(map(used_s, [root, *root.children(recursive=True)]))


def used_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def step(
    client: ServingClient, journal: Journal, work: str, interval: int, name: str
) -> None:
    """Roll out and accept one step's groups."""
    groups, samples, tokens = WORK[work]
    keeper = PartialKeeper(journal, EventList(), interval)
    writing = asyncio.create_task(keeper.run())
    ids = journal.issue([NewGroup({}, f"{name}-{g}") for g in range(groups)], {})

    async def roll_out(g: int, group_id: int) -> None:
        seeds = [random.randrange(2**31) for _ in range(samples)]
        sampling = {"max_new_tokens": tokens, "ignore_eos": True}
        unfinished = keeper.of(group_id, samples)
        found = await client.generate(
            GenerateRequest(
                f"{name}-{g}", [3, 4, 5, 6 + g % 8], samples, sampling, seeds, 300.0, (), interval
            ),
            unfinished.take,
        )
        arrays = {"tokens": np.array([s.output_ids for s in found], np.int32)}
        journal.accept(group_id, arrays, min_version=1, max_version=1)

    await asyncio.gather(*(roll_out(g, i) for g, i in enumerate(ids)))
    writing.cancel()
    await asyncio.wait({writing})


async def measure(
    role: ServingRole, folder: Path, rounds: int, intervals: list[int]
) -> dict[tuple[str, int], list[dict[str, float]]]:
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    address = role.folder.role("serving")
    assert address is not None
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        client = ServingClient(http, lambda: address.url, TOKEN)
        with Journal.open(folder, events=EventList()) as journal:
            for n in range(rounds + 1):  # the first round warms up
                for interval in random.sample(intervals, len(intervals)):
                    for work, (groups, samples, tokens) in WORK.items():
                        before, began = cpu_s(role), time.monotonic()
                        await step(client, journal, work, interval, f"{work}-{interval}-{n}")
                        took_s, after = time.monotonic() - began, cpu_s(role)
                        total = groups * samples * tokens
                        figures = {
                            f"{name}_us_per_token": (after[name] - before[name]) / total * 1e6
                            for name in after
                        }
                        if n:
                            figures["step_s"] = took_s
                            found.setdefault((work, interval), []).append(figures)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--intervals", default="16,64,256")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    intervals = [OFF, *map(int, args.intervals.split(","))]
    folder = Path(tempfile.mkdtemp(prefix="partials-"))
    with serving_role(folder, engines=2) as role:
        role.until(lambda: set(role.states()) == {"stale"}, 120)
        role.until_served(role.publish(0)["version"])
        found = asyncio.run(measure(role, folder / "journal", args.rounds, intervals))
    lines = []
    for work in WORK:
        off = medians(found[work, OFF])
        for interval in intervals:
            own = medians(found[work, interval])
            lines.append(
                {
                    "work": work,
                    "interval_tokens": interval or "off",
                    "rounds": args.rounds,
                    **{name: round(value, 3) for name, value in own.items()},
                    "of_off": {name: round(own[name] / off[name], 3) for name in own},
                }
            )
    for line in lines:
        print(json.dumps(line))
    if args.out is not None:
        args.out.write_text(json.dumps({"steps": lines}, indent=1) + "\n")


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}


if __name__ == "__main__":
    main()
