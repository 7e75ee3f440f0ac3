"""How soon a slot serves the current version again when its engine is killed.

    python benchmarks/engine_recovery.py [--repeats 5] [--quick] [--job] [--verify] [--out FILE]

A real SGLang engine (tiny model) is killed with SIGKILL under requests, with and without a
standby engine beside it. Clocked from the signal until an engine serves the current version. The
cold start, from the start of a process until it serves, is of the same run. --quick: 2 repeats,
less than 3 minutes on an idle machine. --job also kills an engine of a running debug job that has a
standby engine, and compares the longest wait for a batch around the kill (from a commit until the
next batch is sealed) with the median one. Aims: less than 3 s with a standby engine, and at least
10 times faster than a cold start; waits within 1.5 times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from report import Aim, finish, transport_of

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "fakes"), str(ROOT / "tests" / "integration")]
from job_run import Job  # noqa: E402
from policies import token_of, write_policy  # noqa: E402

from torchtitan_rl_ft.config.sections import RolloutSection  # noqa: E402
from torchtitan_rl_ft.models.tiny import make_tiny_model  # noqa: E402
from torchtitan_rl_ft.observability.events import EventList, Kind  # noqa: E402
from torchtitan_rl_ft.run_folder import RunFolder  # noqa: E402
from torchtitan_rl_ft.serving.launch import SGLangLauncher, has_accelerator  # noqa: E402
from torchtitan_rl_ft.serving.requests import GenerateRequest  # noqa: E402
from torchtitan_rl_ft.serving.service import ServingService  # noqa: E402
from torchtitan_rl_ft.weights.transports.disk import DiskTransport  # noqa: E402

POLL_S = 0.002
LIMIT_S = 120.0
CALLERS = 4
SETTLE_S = 0.5
"""Between kills requests get through: one that loses its engine too often is given up."""

JOB_BATCH = (
    *("--rl.groups_per_step", "64", "--rl.samples_per_prompt", "16"),
    *("--rollout.max_response_tokens", "16"),
)
"""Rollouts of about a second: a promotion costs the same whatever their length."""

JOB_STEPS_BEFORE, JOB_STEPS_AFTER = 40, 20


class Bench:
    """One pool of real engines, one of them active."""

    def __init__(self, service: ServingService, folder: RunFolder, model: Path) -> None:
        self._service, self._folder, self._model = service, folder, model

    async def publish(self) -> None:
        path, digest = await asyncio.to_thread(
            write_policy, self._folder.weights, self._model, 0, scale=1.01
        )
        await self._service.publish(0, token_of(0), path, digest, "none", LIMIT_S)

    async def until(self, *states: str) -> float:
        """When the engines are in these states, whatever their order: a monotonic time."""
        end = time.monotonic() + LIMIT_S
        while sorted(self._states()) != sorted(states):
            if time.monotonic() > end:
                raise SystemExit(f"not {states} within {LIMIT_S:g} s: {self._service.status()}")
            await asyncio.sleep(POLL_S)
        return time.monotonic()

    def _states(self) -> list[str]:
        return [e["state"] for e in self._service.status()["engines"]]

    async def kill(self) -> float:
        """Seconds from the SIGKILL, in the middle of requests, until an engine serves the version
        again."""
        await asyncio.sleep(SETTLE_S)
        [engine] = self._service.pool.serving(self._service.version)
        killed = time.monotonic()
        os.kill(engine.process.id.pid, signal.SIGKILL)
        await engine.gone.wait()
        while not self._service.pool.serving(self._service.version):
            await asyncio.sleep(POLL_S)
            if time.monotonic() - killed > LIMIT_S:
                raise SystemExit(f"not back within {LIMIT_S:g} s: {self._service.status()}")
        return time.monotonic() - killed

    @asynccontextmanager
    async def under_load(self) -> AsyncIterator[None]:
        """Callers that lose no request, whatever happens."""
        asking = [asyncio.create_task(self._ask(i)) for i in range(CALLERS)]
        try:
            yield
        finally:
            for task in asking:
                task.cancel()
            results = await asyncio.gather(*asking, return_exceptions=True)
            for error in results:
                if not isinstance(error, asyncio.CancelledError):
                    raise SystemExit(f"a request was lost: {error!r}")

    async def _ask(self, caller: int) -> None:
        sampling = {"max_new_tokens": 32, "ignore_eos": True}
        count = 0
        while True:
            count += 1
            request = GenerateRequest(f"{caller}-{count}", [3, 4, 5], 4, sampling, None, LIMIT_S)
            samples = await self._service.generate(request)
            assert {v for s in samples for v in s.versions} == {self._service.version}


@asynccontextmanager
async def engines(folder: Path, standby: int) -> AsyncIterator[Bench]:
    model = make_tiny_model(folder / "model", 0)
    rollout = RolloutSection(
        engines=1,
        standby_engines=standby,
        engine_max_restarts=1000,
        engine_restart_window_s=0.5,  # every start is the first one: no delays
    )
    run = RunFolder(folder / "run")
    launcher = SGLangLauncher(rollout, model, run, on_cpu=not has_accelerator())
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        service = ServingService(rollout, run, EventList(), launcher, http, DiskTransport())
        try:
            await service.open()
            yield Bench(service, run, model)
        finally:
            await service.close()


async def without_standby(folder: Path, repeats: int) -> tuple[float, list[float]]:
    """The cold start of the first engine, then the recoveries."""
    started = time.monotonic()
    async with engines(folder, 0) as bench:
        await bench.publish()
        cold_s = await bench.until("serving") - started
        async with bench.under_load():
            return cold_s, [await bench.kill() for _ in range(repeats)]


async def with_standby(folder: Path, repeats: int) -> list[float]:
    recoveries = []
    async with engines(folder, 1) as bench:
        await bench.publish()
        for _ in range(repeats):
            await bench.until("serving", "standby")
            async with bench.under_load():
                recoveries.append(await bench.kill())
    return recoveries


def waits_in_a_job(folder: Path) -> dict[str, float]:
    """From a commit until the next batch is sealed, in ms: median and 95th percentile without a
    fault, and the longest one between the kill and the first second of the promoted engine."""
    folder.mkdir()
    with Job(folder / "run") as job:
        job.start("--training.steps", "100000", "--rollout.standby_engines", "1", *JOB_BATCH)
        job.wait_event(Kind.READY, 3, LIMIT_S, adopted=False)
        job.wait_step(job.step() + JOB_STEPS_BEFORE, LIMIT_S)
        killed = time.monotonic()
        os.kill(job.process_of("engine-0").pid, signal.SIGKILL)
        job.wait_event(Kind.PROMOTE)
        job.wait_step(job.step() + JOB_STEPS_AFTER, LIMIT_S)
        commits = {e.step: e.mono_s for e in job.events(Kind.COMMIT)}
        seals = {e.step: e.mono_s for e in job.events(Kind.SEAL)}
        promoted = job.events(Kind.PROMOTE)[0].mono_s
        print(f"policies of the job travel by {transport_of(job.events())}")
        job.interrupt()
        job.end()
    waits = {s: max(0.0, seals[s + 1] - at) for s, at in commits.items() if s + 1 in seals}
    calm = [w for s, w in waits.items() if seals[s + 1] < killed][-JOB_STEPS_BEFORE:]
    hit = [w for s, w in waits.items() if seals[s + 1] > killed and commits[s] < promoted + 1.0]
    return {
        "median_wait_ms": 1000 * statistics.median(calm),
        "p95_wait_ms": 1000 * statistics.quantiles(calm, n=20)[-1],
        "longest_wait_around_kill_ms": 1000 * max(hit),
    }


def measure(repeats: int, job: bool) -> tuple[dict[str, Any], dict[str, Aim]]:
    with tempfile.TemporaryDirectory() as temp:
        folder = Path(temp)
        cold_s, replaced = asyncio.run(without_standby(folder / "a", repeats))
        promoted = asyncio.run(with_standby(folder / "b", repeats))
        waits = waits_in_a_job(folder / "c") if job else {}
    slow, fast = statistics.median(replaced), statistics.median(promoted)
    print(f"{'':18} {'median s':>9} {'least':>7} {'most':>7}")
    for name, values in (("cold start", [cold_s]), ("replaced", replaced), ("promoted", promoted)):
        least, most = min(values), max(values)
        print(f"{name:18} {statistics.median(values):9.3f} {least:7.3f} {most:7.3f}")
    print(f"a standby engine is {slow / fast:.0f} times faster than a new one")
    figures = {
        "cold_start_s": cold_s,
        "replaced_s": replaced,
        "promoted_s": promoted,
        "replaced_to_promoted": slow / fast,
        **waits,
    }
    aims = {
        "promoted_s": Aim(max(promoted), 3.0),
        "cold_start_to_promoted": Aim(cold_s / fast, 10.0, at_most=False),
    }
    if waits:
        ratio = waits["longest_wait_around_kill_ms"] / waits["median_wait_ms"]
        print(", ".join(f"{name} {ms:.0f}" for name, ms in waits.items()))
        aims["wait_ratio"] = Aim(ratio, 1.5)
    return figures, aims


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--job", action="store_true")
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    figures, aims = measure(2 if args.quick else args.repeats, args.job)
    if args.out is not None:
        shown = {n: {"value": a.value, "aim": a.aim, "met": a.met} for n, a in aims.items()}
        args.out.write_text(json.dumps({"figures": figures, "aims": shown}, indent=1) + "\n")
    return finish("engine_recovery", figures, aims, verify=args.verify)


if __name__ == "__main__":
    sys.exit(main())
