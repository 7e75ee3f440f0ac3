"""Hangs of trainers and of the rollout role in benchmarks/detection.py, and what only looks like
one. Two real trainer groups (TorchTitan, torchft) on a real lighthouse and a real ledger, under the
watcher of the supervisor; the batches are made up, by a process that beats as the rollout role
does."""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "integration"))
from trainer_run import TrainerRun  # noqa: E402
from watching import watched  # noqa: E402

SILENCE_S = 4.0
PHASE_S = 4.0
UNNOTICED_S = 40.0
START_TIMEOUT_S = 180.0

VICTIM = 1
NAME = f"trainer-{VICTIM}"

KEYS: dict[str, Any] = {
    "recovery__rank_silence_timeout_s": SILENCE_S,
    "recovery__enable_ft_package": True,
    "recovery__phase_timeouts": str(
        [f"{p}={PHASE_S:g}" for p in ("forward_backward", "reduce", "commit", "checkpoint")]
    ).replace("'", '"'),
    "fault_tolerance__process_group_timeout_ms": 2000,
    "fault_tolerance__join_timeout_ms": 500,
    "checkpoint__interval": 5,
}
HOST_ARGS = ("--slow-s", "0.1")


@dataclass(frozen=True)
class RoleTrial:
    """As a trial of detection.py."""

    case: str
    kind: str  # hang or innocent
    delay_s: float | None
    cause: str


@dataclass(frozen=True)
class Hang:
    """`act` of the victim as it enters `point`: stop (SIGSTOP), hold (a call of C that keeps the
    interpreter; torchft's own beat goes on), sleep (a call that has let go of it)."""

    point: str
    act: str
    first: bool = False  # in the first step of its process

    @property
    def name(self) -> str:
        manner = {"stop": "stopped", "hold": "holds the GIL", "sleep": "hangs without the GIL"}
        where = "first step" if self.first else self.point
        return f"trainer {manner[self.act]}: {where}"


HANGS = [
    *(Hang("waiting_for_batch", act) for act in ("stop", "hold")),
    *(Hang("quorum", act) for act in ("stop", "hold")),
    *(Hang("reduce", act) for act in ("stop", "hold", "sleep")),
    *(Hang("checkpoint", act) for act in ("stop", "hold", "sleep")),
    *(Hang("forward_backward", act, first=True) for act in ("stop", "hold")),
]


class Bench:
    """One run under watch."""

    def __init__(self, run: TrainerRun, trials: list[RoleTrial]) -> None:
        self.run, self.trials = run, trials
        self._told = 0

    def until(self, condition: Callable[[], Any], what: str) -> None:
        self.run.wait_for(condition, what, START_TIMEOUT_S)

    def together(self, n: int = 3) -> None:
        """`n` steps of both groups."""
        self.until(lambda: self.run.metrics()[-1:] and self._participants() == 2, "both groups")
        at = len(self.run.metrics())
        self.until(lambda: len(self.run.metrics()) >= at + n, "more steps")

    def _participants(self) -> float:
        return self.run.metrics()[-1]["participants"]

    def accused(self) -> list[dict[str, Any]]:
        """Faults that the watcher told of since the last call."""
        found = [e for e in self.run.events("fault") if e.get("phase") == "wedged"]
        new, self._told = found[self._told :], len(found)
        return new

    def innocent(self, case: str, live: Callable[[], None], processes: int) -> None:
        print(f"  {case}", flush=True)
        began = time.monotonic()
        live()
        accused = self.accused()
        for n in range(processes):
            cause = accused[n]["cause"] if n < len(accused) else ""
            delay_s = time.monotonic() - began if cause else None
            self.trials.append(RoleTrial(case, "innocent", delay_s, cause))

    def hang(self, case: Hang) -> None:
        print(f"  {case.name}", flush=True)
        if case.first:
            self.run.kill(NAME)
        self.run.order(VICTIM, case.point, act=case.act, sleep_s=600)
        if case.first:
            self.run.start(NAME)
        order = self.run.run.path / f"order-{VICTIM}.0"
        self.until(lambda: not order.exists(), "the victim to take its order")
        process = self.run.processes[NAME][0]
        self._await_end(case.name, NAME, lambda: process.poll() is not None)
        self.run.kill(NAME)
        self.run.start(NAME)
        self.together()

    def rollout_hang(self, act: str) -> None:
        case = f"rollout {'stopped' if act == 'stop' else 'holds the GIL'}"
        print(f"  {case}", flush=True)
        host = self.run.processes["host"][0]
        if act == "stop":
            host.send_signal(signal.SIGSTOP)
        else:
            order = self.run.run.path / "hold-host"
            order.touch()
            self.until(lambda: not order.exists(), "the host to take its order")
        self._await_end(case, "rollout", lambda: host.poll() is not None)
        self.run.kill("host")
        self.run.start("host", host_args=HOST_ARGS)
        self.together()

    def _await_end(self, case: str, subject: str, ended: Callable[[], bool]) -> None:
        began, delay_s = time.monotonic(), None
        while time.monotonic() - began < UNNOTICED_S:
            if ended():
                delay_s = time.monotonic() - began
                break
            time.sleep(0.005)
        causes = []
        for event in self.accused():
            if event["data"]["subject"] == subject:
                causes.append(event["cause"])
            else:
                self.trials.append(RoleTrial("bystander", "innocent", 0.0, event["cause"]))
        self.trials.append(RoleTrial(case, "hang", delay_s, "; ".join(causes)))


def innocents(bench: Bench) -> Iterator[tuple[str, Callable[[], None], int]]:
    """(case, what happens meanwhile, how many processes have to be left alone)."""
    run, patience_s = bench.run, 2 * max(SILENCE_S, PHASE_S)

    def no_batch() -> None:
        order = run.run.path / "pause-host"
        order.touch()
        time.sleep(patience_s)
        order.unlink()
        bench.together()

    def slow_save() -> None:
        run.order(VICTIM, "checkpoint", act="sleep", sleep_s=PHASE_S / 2)
        order = run.run.path / f"order-{VICTIM}.0"
        bench.until(lambda: not order.exists(), "a save")
        bench.together()

    def slowed() -> None:
        """Stopped half of the time, a quarter of the limit at a stretch."""
        ranks = [run.processes[f"trainer-{g}"][0] for g in (0, 1)]
        end = time.monotonic() + patience_s
        while time.monotonic() < end:
            for signum in (signal.SIGSTOP, signal.SIGCONT):
                for rank in ranks:
                    rank.send_signal(signum)
                time.sleep(SILENCE_S / 4)
        bench.together()

    def slow_first_step() -> None:
        run.kill(NAME)
        run.order(VICTIM, "forward_backward", act="sleep", sleep_s=patience_s)
        run.start(NAME)
        order = run.run.path / f"order-{VICTIM}.0"
        bench.until(lambda: not order.exists(), "the first step")
        bench.together()

    yield "trainers at work", lambda: bench.together(20), 2
    yield "waiting for a batch", no_batch, 2
    yield "slow save", slow_save, 2
    yield "trainers slowed 50 %", slowed, 2
    yield "slow first step", slow_first_step, 2


def below_minimum(bench: Bench) -> None:
    """One group alone in a quorum that needs two."""
    time.sleep(2 * max(SILENCE_S, PHASE_S))
    bench.run.start(NAME)
    bench.together()


def trials(repeats: int, rounds: int) -> list[RoleTrial]:
    found: list[RoleTrial] = []
    print("trainers and rollout", flush=True)
    for minimum in (2, 1):
        with tempfile.TemporaryDirectory(prefix="detection-") as folder:
            keys = {**KEYS, "fault_tolerance__min_replica_size": minimum}
            with TrainerRun(Path(folder) / "run", steps=100_000, groups=2, **keys) as run:
                bench = Bench(run, found)
                with watched(run.run):
                    run.start("host", "lighthouse", "trainer-0", host_args=HOST_ARGS)
                    if minimum == 2:
                        bench.until(lambda r=run: _entered(r, "quorum"), "a quorum")
                        bench.innocent("in quorum", lambda b=bench: below_minimum(b), 2)
                        continue
                    run.start(NAME)
                    bench.together()
                    for _ in range(rounds):
                        for case, live, processes in innocents(bench):
                            bench.innocent(case, live, processes)
                    for _ in range(repeats):
                        for hang in HANGS:
                            bench.hang(hang)
                        for act in ("stop", "hold"):
                            bench.rollout_hang(act)
    return found


def _entered(run: TrainerRun, phase: str) -> bool:
    return any(e.get("phase") == phase for e in run.events("phase"))
