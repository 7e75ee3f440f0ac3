"""What it costs a step that a run is journaled, watched, told of and looked at.

    python -m benchmarks.overhead [--rounds 4] [--steps 16] [--quick] [--verify] [--out FILE]

Real jobs of the debug configuration (real SGLang, real torchft), steps of over a second, two lives
in turns, `on` and `off`, and in the next round the other way round:

    on   journal, trace of each sample, status page with /metrics scraped every second, inspector,
         OpenTelemetry to a receiver on this machine, TensorBoard, numeric guards as shipped
    off  none of these

Not to be switched off, so in both: events, metrics.jsonl, the watcher of phases and beats, torchft,
commit votes (benchmarks/train_throughput.py has these against plain TorchTitan). A step's time is
that between two commits; of each round the difference of the two medians counts. Beside it the CPU
time of all processes of the job per step, which other work on the machine does not change.
--quick: 2 rounds, and another file. Aim: less than 2 % at a step of at least 1 s.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.live.arms import LOADS
from benchmarks.live.driver import Job
from benchmarks.report import Aim, finish, transport_of
from torchtitan_rl_ft.observability.events import Kind
from torchtitan_rl_ft.run_folder import write_atomic

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "overhead.json"
QUICK = ROOT / "outputs" / "overhead_quick.json"

WARM_UP_STEPS = 4
"""Both groups train by then, and nothing is compiled or read for the first time any more."""

STEP_LIMIT_S = 30.0
START_LIMIT_S = 180.0
SCRAPE_INTERVAL_S = 1.0

COMMON = (
    *("--training.steps", "100000"),
    *("--optimizer.lr", "1e-9"),  # answers keep their length, and steps their time
    *("--rollout.retain_ttl", "0"),
    *LOADS["sync"].keys,  # nothing hides behind anything
)
OFF = (
    *("--rollout.journal", "false"),
    *("--observability.trace_samples", "false"),
    *("--observability.status_page", "false"),
    *("--recovery.check_for_nan_in_loss_and_grad", "false"),
)
ON = ("--metrics.enable_tensorboard", "--recovery.run_workload_inspector_server")


@dataclass(frozen=True)
class Life:
    """One job: seconds between commits after the warm-up, CPU seconds of all its processes per
    step, how often it was scraped and has exported, and how its policies travelled."""

    step_s: list[float]
    cpu_s: float
    scrapes: int
    exports: int
    transport: str = ""


class Sink(ThreadingHTTPServer):
    """An OTLP/HTTP receiver that takes everything and keeps nothing: its own work is no cost of the
    job."""

    daemon_threads = True

    def __init__(self) -> None:
        self.requests = 0
        sink = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                sink.requests += 1
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def receiving() -> Iterator[Sink]:
    sink = Sink()
    thread = threading.Thread(target=sink.serve_forever, args=(0.1,), daemon=True)
    thread.start()
    try:
        yield sink
    finally:
        sink.shutdown()
        thread.join()
        sink.server_close()


class Scraper(threading.Thread):
    """Reads /metrics of the supervisor as Prometheus would."""

    def __init__(self, job: Job) -> None:
        super().__init__(daemon=True)
        self._job, self._over = job, threading.Event()
        self.scrapes = 0

    def run(self) -> None:
        with httpx.Client(trust_env=False, timeout=5.0) as client:
            while not self._over.wait(SCRAPE_INTERVAL_S):
                role = self._job.folder.role("supervisor")
                if role is None or not role.url:
                    continue
                try:
                    self.scrapes += client.get(f"{role.url}/metrics").status_code == 200
                except httpx.TransportError:
                    continue

    def end(self) -> None:
        self._over.set()
        self.join()


def live(folder: Path, steps: int, *, on: bool) -> Life:
    """One life of so many counted steps. Raises SystemExit: what is on did not work."""
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        job = stack.enter_context(Job(folder / "run"))
        keys = OFF
        sink = scraper = None
        if on:
            sink = stack.enter_context(receiving())
            keys = (*ON, "--otel.endpoint", sink.endpoint)
            scraper = Scraper(job)
            scraper.start()
            stack.callback(scraper.end)
        job.start(*COMMON, *keys)
        job.wait_step(WARM_UP_STEPS, START_LIMIT_S)
        job.wait_for(lambda: _both(job), "both groups to train", START_LIMIT_S)
        first, cpu_s = job.step(), _cpu_s(job)
        job.wait_step(first + steps, STEP_LIMIT_S * steps)
        last = job.step()
        cpu_s = (_cpu_s(job) - cpu_s) / (last - first)
        commits = [e.mono_s for e in job.events(Kind.COMMIT) if first <= (e.step or 0) <= last]
        transport = transport_of(job.events())
        job.interrupt()
        job.end()
    scrapes = scraper.scrapes if scraper is not None else 0
    exports = sink.requests if sink is not None else 0
    if on and not (scrapes and exports):
        raise SystemExit(f"{scrapes} scrapes and {exports} exports: what is measured is not on")
    step_s = [b - a for a, b in itertools.pairwise(commits)]
    return Life(step_s, cpu_s, scrapes, exports, transport)


def _both(job: Job) -> bool:
    rows = job.metrics()
    return bool(rows) and rows[-1]["participants"] == 2


def _cpu_s(job: Job) -> float:
    """Of all living processes of the job, since their starts."""
    total = 0.0
    for member in job.alive():
        try:
            times = psutil.Process(member.pid).cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def measure(rounds: int, steps: int) -> list[dict[str, Life]]:
    found = []
    with tempfile.TemporaryDirectory() as temp:
        for i in range(rounds):
            order = ("on", "off") if i % 2 == 0 else ("off", "on")
            lives = {w: live(Path(temp) / f"{i}-{w}", steps, on=w == "on") for w in order}
            found.append(lives)
            medians = ", ".join(
                f"{w} {1000 * statistics.median(lives[w].step_s):.1f}" for w in lives
            )
            print(f"round {i + 1}: median ms per step: {medians}", flush=True)
    return found


def figures(found: list[dict[str, Life]]) -> dict[str, Any]:
    """Pure. Milliseconds per step; `added` of each round is the difference of its medians, and
    `added_error_ms` the standard error of their mean."""
    on, off = ([1000 * statistics.median(r[w].step_s) for r in found] for w in ("on", "off"))
    added = [a - b for a, b in zip(on, off, strict=True)]
    cpu_on, cpu_off = (statistics.median(1000 * r[w].cpu_s for r in found) for w in ("on", "off"))
    error = statistics.stdev(added) / math.sqrt(len(added)) if len(added) > 1 else None
    return {
        "transport": found[0]["on"].transport,
        "rounds": len(found),
        "steps_per_life": len(found[0]["on"].step_s),
        "on_ms": on,
        "off_ms": off,
        "added_ms": statistics.fmean(added),
        "added_error_ms": error,
        "added_percent": 100 * statistics.fmean(added) / statistics.fmean(off),
        "cpu_on_ms": cpu_on,
        "cpu_off_ms": cpu_off,
        "cpu_added_percent": 100 * (cpu_on - cpu_off) / cpu_off,
        "scrapes": sum(r["on"].scrapes for r in found),
        "exports": sum(r["on"].exports for r in found),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out = args.out or (QUICK if args.quick else RESULTS)
    told = figures(measure(2 if args.quick else args.rounds, args.steps))
    error = "" if told["added_error_ms"] is None else f" +- {told['added_error_ms']:.1f}"
    print(
        f"added {told['added_ms']:.1f}{error} ms of {statistics.fmean(told['off_ms']):.1f} ms per "
        f"step, {told['cpu_on_ms'] - told['cpu_off_ms']:.0f} of {told['cpu_off_ms']:.0f} ms of CPU"
    )
    aims = {
        "added_percent": Aim(told["added_percent"], 2.0),
        "off_ms": Aim(statistics.fmean(told["off_ms"]), 1000.0, at_most=False),
    }
    shown = {n: {"value": a.value, "aim": a.aim, "met": a.met} for n, a in aims.items()}
    write_atomic(out, json.dumps({"figures": told, "aims": shown}, indent=1).encode() + b"\n")
    return finish("overhead", told, aims, verify=args.verify)


if __name__ == "__main__":
    sys.exit(main())
