"""How well dead engines are told from living ones, and wedged ranks from waiting ones; how fast.

    python benchmarks/detection.py [--part roles] [--quick] [--verify] [--out FILE]

Two real SGLang engines (tiny model, a context of 32,768 tokens) under the detector of the serving
role: first wait 0, interval 1 s, timeout 2 s. Labelled faults and innocents, a trial each; what no
real engine can be made to do is done by fake ones. A retirement of an engine in which nothing was
broken is a false alarm, whenever it comes; not of one that ended by itself (its port was taken).
Aims: precision and recall 1, exits in less than 2 s and hangs in less than interval + timeout
(medians). 12 minutes, with --quick 4.

`--part roles`: two real trainer groups and a process that beats as the rollout role does, under the
watcher of the supervisor (detection_roles.py). Aim: hangs in less than the limit (4 s) and 3 s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import detection_roles
from detection_cases import (
    FAKE_FAULTS,
    FAKE_INNOCENTS,
    INTERVAL_S,
    REAL_FAULTS,
    REAL_INNOCENTS,
    ROOT,
    TIMEOUT_S,
    Bench,
    Fault,
    Innocent,
)
from report import Aim, finish
from serving_pool import open_pool

from torchtitan_rl_ft.config.sections import RolloutSection
from torchtitan_rl_ft.models.tiny import TinySpec, make_tiny_model
from torchtitan_rl_ft.observability.events import EventList
from torchtitan_rl_ft.run_folder import RunFolder
from torchtitan_rl_ft.serving.launch import SGLangLauncher
from torchtitan_rl_ft.serving.service import ServingService
from torchtitan_rl_ft.weights.transports.disk import DiskTransport

UNNOTICED_S = 20.0
"""A fault that is not found within this time is missed."""

SPEC = TinySpec(max_positions=32768, hidden_size=128, intermediate_size=512, layers=4)
ENGINE_ARGS = [
    "--max-total-tokens=34000",
    "--chunked-prefill-size=-1",
    "--max-running-requests=16",
    "--max-queued-requests=4",
]


@dataclass(frozen=True)
class Trial:
    """`delay_s`: from the injection to the retirement; None: not retired."""

    case: str
    kind: str  # exit, hang or innocent
    delay_s: float | None
    cause: str
    suspected: bool = False  # an innocent that was kept from requests for a while


def settings(**more: Any) -> dict[str, Any]:
    return {
        "health_check_first_wait": 0.0,
        "health_check_interval": INTERVAL_S,
        "health_check_timeout": TIMEOUT_S,
        "install_timeout_s": 30.0,
        "request_timeout_s": 60.0,
        "engine_start_timeout_s": 120.0,
        "engine_max_restarts": 1000,
        "engine_restart_window_s": 0.5,
        **more,
    }


@asynccontextmanager
async def real_engines(folder: Path) -> AsyncIterator[tuple[Bench, EventList]]:
    model = make_tiny_model(folder / "model", 0, SPEC)
    rollout = RolloutSection(**settings(engines=2, engine_args=ENGINE_ARGS))
    run, events = RunFolder(folder / "run"), EventList()
    launcher = SGLangLauncher(rollout, model, run, on_cpu=True)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        service = ServingService(rollout, run, events, launcher, http, DiskTransport())
        await service.open()
        try:
            yield Bench(service, run, model, http), events
        finally:
            await service.close()


@asynccontextmanager
async def fake_engines(folder: Path) -> AsyncIterator[tuple[Bench, EventList]]:
    model = make_tiny_model(folder / "model", 0)
    async with open_pool(folder / "run", model, **settings(engines=2)) as pool:
        yield Bench(pool.service, pool.folder, model, pool.http), pool.events


class Recorder:
    """Trials on one set of engines."""

    def __init__(self, bench: Bench, events: EventList, trials: list[Trial]) -> None:
        self.bench, self._events, self._trials = bench, events, trials
        self._seen = 0

    def retirements(self) -> list[dict[str, Any]]:
        """New ones since the last call."""
        return [e for e in self._new_moves() if e["new"] == "retired"]

    def _new_moves(self) -> list[dict[str, Any]]:
        """Without the retirement of engines that ended by themselves."""
        new = self._events.events[self._seen :]
        self._seen = len(self._events.events)
        moves = [e for e in new if e["kind"] == "transition"]
        ended = [e for e in moves if e["new"] == "retired" and e["cause"].startswith("exit code")]
        for event in ended:
            print(f"    {event['subject']} ended by itself: {event['cause']}", flush=True)
        return [e for e in moves if e not in ended]

    async def innocents(self, case: Innocent) -> None:
        print(f"  {case.name}", flush=True)
        began = time.monotonic()
        await case.live(self.bench)
        took_s = time.monotonic() - began
        moves = self._new_moves()
        for slot in self.bench.slots:
            own = [e for e in moves if e["subject"] == f"engine-{slot}"]
            causes = [e["cause"] for e in own if e["new"] == "retired"]
            suspected = any(e["new"] == "suspect" for e in own)
            delay_s = took_s if causes else None
            self._trials.append(Trial(case.name, "innocent", delay_s, "; ".join(causes), suspected))
        await self.bench.all_serve()

    async def faults(self, cases: Sequence[Fault], *, loaded: bool) -> None:
        """Each on an engine of its own, at the same time."""
        print(f"  {', '.join(c.name for c in cases)}{', under load' if loaded else ''}", flush=True)
        if loaded:
            async with self.bench.under_load(groups=4):
                await asyncio.sleep(0.3)
                await asyncio.gather(*(self._fault(c, i) for i, c in enumerate(cases)))
        else:
            await asyncio.gather(*(self._fault(c, i) for i, c in enumerate(cases)))
        broken = {f"engine-{slot}" for slot in range(len(cases))}
        for event in self.retirements():
            if event["subject"] in broken:
                broken.discard(event["subject"])
            else:
                self._trials.append(Trial("bystander", "innocent", 0.0, event["cause"]))
        began = time.monotonic()
        await self.bench.all_serve()
        print(f"    all serve again after {time.monotonic() - began:.1f} s", flush=True)
        # They came up, installed and served under watch.
        for event in self.retirements():
            self._trials.append(Trial("cold start", "innocent", 0.0, event["cause"]))
        self._trials += [Trial("cold start", "innocent", None, "")] * len(cases)

    async def _fault(self, case: Fault, slot: int) -> None:
        engine = self.bench.engine(slot)
        undo = await case.inject(self.bench, engine)
        began, delay_s = time.monotonic(), None
        try:
            async with asyncio.timeout(UNNOTICED_S):
                await engine.gone.wait()
            delay_s = time.monotonic() - began
        except TimeoutError:
            engine.condemn("benchmark: missed")
        self._trials.append(Trial(case.name, case.kind, delay_s, engine.reason))
        if undo is not None:
            await undo()


def role_trials(repeats: int, rounds: int) -> list[Trial]:
    """Trainers and rollout."""
    return [
        Trial(t.case, t.kind, t.delay_s, t.cause) for t in detection_roles.trials(repeats, rounds)
    ]


async def run(repeats: int, rounds: int) -> list[Trial]:
    """Engines."""
    trials: list[Trial] = []
    for title, engines, innocents, faults in (
        ("fake engines", fake_engines, FAKE_INNOCENTS, FAKE_FAULTS),
        ("real engines", real_engines, REAL_INNOCENTS, REAL_FAULTS),
    ):
        print(title, flush=True)
        with tempfile.TemporaryDirectory(prefix="detection-") as folder:
            async with engines(Path(folder)) as (bench, events):
                await bench.until(lambda b=bench: all_stale(b))
                await bench.publish()
                await bench.all_serve()
                recorder = Recorder(bench, events, trials)
                trials += [Trial("cold start", "innocent", None, "")] * len(bench.slots)
                for _ in range(rounds):
                    for innocent in innocents:
                        await recorder.innocents(innocent)
                queue = [fault for _ in range(repeats) for fault in faults]
                for n in range(0, len(queue), len(bench.slots)):
                    cases = queue[n : n + len(bench.slots)]
                    loaded = n // len(bench.slots) % 2 == 1 and not any(c.idle for c in cases)
                    await recorder.faults(cases, loaded=loaded)
    return trials


def all_stale(bench: Bench) -> bool:
    return all(e["state"] == "stale" for e in bench.service.status()["engines"])


# What came out ----------------------------------------------------------------------------------


def delays(trials: Sequence[Trial]) -> dict[str, float]:
    """Median, 95th percentile (nearest rank) and longest of the delays, in seconds."""
    found = sorted(t.delay_s for t in trials if t.delay_s is not None)
    if not found:
        return {}
    rank = max(0, -(-95 * len(found) // 100) - 1)
    return {"median_s": statistics.median(found), "p95_s": found[rank], "max_s": found[-1]}


def figures(trials: Sequence[Trial]) -> dict[str, Any]:
    cases: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        cases[trial.case].append(trial)
    faults = [t for t in trials if t.kind != "innocent"]
    found = [t for t in faults if t.delay_s is not None]
    alarms = [t for t in trials if t.delay_s is not None]
    return {
        "faults": len(faults),
        "innocents": len(trials) - len(faults),
        "precision": len(found) / len(alarms) if alarms else 0.0,
        "recall": len(found) / len(faults) if faults else 0.0,
        "exits": delays([t for t in faults if t.kind == "exit"]),
        "hangs": delays([t for t in faults if t.kind == "hang"]),
        "cases": {
            case: {
                "kind": of_case[0].kind,
                "trials": len(of_case),
                "retired": sum(t.delay_s is not None for t in of_case),
                "suspected": sum(t.suspected for t in of_case),
                **delays(of_case),
            }
            for case, of_case in cases.items()
        },
    }


def show(found: dict[str, Any]) -> None:
    print(
        f"{'case':40} {'trials':>6} {'retired':>7} {'median s':>9} {'p95 s':>7} {'max s':>7} "
        f"{'suspected':>9}"
    )
    for kind in ("exit", "hang", "innocent"):
        for name, case in found["cases"].items():
            if case["kind"] == kind:
                times = [case.get(key) for key in ("median_s", "p95_s", "max_s")]
                shown = ["-" if t is None else f"{t:.3f}" for t in times]
                print(
                    f"{name:40} {case['trials']:6} {case['retired']:7} "
                    f"{shown[0]:>9} {shown[1]:>7} {shown[2]:>7} "
                    f"{case['suspected'] if kind == 'innocent' else '':>9}"
                )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=("engines", "roles"), default="engines")
    parser.add_argument("--repeats", type=int, help="trials of each fault (6; roles: 2)")
    parser.add_argument("--rounds", type=int, default=2, help="trials of each innocent and engine")
    parser.add_argument("--quick", action="store_true", help="one of each")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--verify", action="store_true")
    args = parser.parse_args()
    engines = args.part == "engines"
    name = "detection" if engines else "detection_roles"
    repeats, rounds = args.repeats or (6 if engines else 2), args.rounds
    if args.quick:
        repeats = rounds = 1
    began = time.monotonic()
    if engines:
        trials = asyncio.run(run(repeats, rounds))
        times = {"interval_s": INTERVAL_S, "timeout_s": TIMEOUT_S}
    else:
        trials = role_trials(repeats, rounds)
        times = {"silence_s": detection_roles.SILENCE_S, "phase_s": detection_roles.PHASE_S}
    found = {**times, **figures(trials), "took_s": round(time.monotonic() - began, 1)}
    show(found)
    accused = [t for t in trials if t.kind == "innocent" and t.delay_s is not None]
    for trial in accused:
        print(f"false alarm: {trial.case}: {trial.cause}")
    out = args.out or ROOT / f"benchmarks/results/{name}.json"
    out.write_text(json.dumps({**found, "trials": [asdict(t) for t in trials]}, indent=1))
    # A wedged rank is given a second to write its stacks.
    hang_s = INTERVAL_S + TIMEOUT_S if engines else detection_roles.SILENCE_S + 3.0
    aims = {
        "precision": Aim(found["precision"], 1.0, at_most=False),
        "recall": Aim(found["recall"], 1.0, at_most=False),
        "hangs/median_s": Aim(found["hangs"].get("median_s", UNNOTICED_S), hang_s),
    }
    if engines:
        aims["exits/median_s"] = Aim(found["exits"].get("median_s", UNNOTICED_S), 2.0)
    return finish(name, found, aims, verify=args.verify)


if __name__ == "__main__":
    sys.exit(main())
