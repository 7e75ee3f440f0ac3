"""How soon a lost trainer group commits again, by how it is replaced.

    python benchmarks/trainer_recovery.py [--repeats 3] [--quick] [--arms ARM ...] [--verify]
                                          [--out FILE]

Real jobs of the debug configuration, with real SGLang. One group of two is killed with SIGKILL;
clocked from the signal until its replacement reports its first commit. Arms:

    spare         a warm standby takes its place (recovery.standby = "spare")
    from_rollout  the same in the place of an engine, which is drained and lent
    inprocess     its step fails instead (by an order to a probe of it): it starts again inside its
                  process (recovery.inprocess_restart), clocked from the failure
    cold          the supervisor starts the group anew, alone
    job_kept      the whole job is killed and started again; its engines were kept (a session)
    job           the whole job is killed, engines too, and started again, all roles at once

All in one run, on the same machine, with the same files in its caches; a job that is started again
reads the checkpoint that it saves every other step. A restarted job is clocked until any group
commits. Phases are read from the run's events and the group's log. --quick: one repeat. Aims: a
spare at least 5 times faster than a restart of the whole job, and in less than half of the time of
a cold start.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from report import Aim, finish, transport_of

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "integration")]
PROBED_JOB = str(ROOT / "tests" / "fakes" / "probed_job.py")
from job_run import SUPERVISOR, Job  # noqa: E402

from torchtitan_rl_ft.host import process  # noqa: E402
from torchtitan_rl_ft.observability.events import Event, Kind, read_events  # noqa: E402
from torchtitan_rl_ft.run_folder import RunFolder, write_atomic  # noqa: E402

GROUP = "trainer-1"
LIMIT_S = 180.0
SETTLE_STEPS = 5
"""Commits of both groups between two kills."""

JOB = (
    *("--training.steps", "100000", "--recovery.role_max_restarts", "1000"),
    *("--checkpoint.keep_latest_k", "2"),
)
LOG_TIME = re.compile(r"\[titan\] (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3})")

Figures = dict[str, float]


@contextmanager
def running(folder: Path, *overrides: str, script: str = "") -> Iterator[Job]:
    """A job whose groups both train; `script`: what starts it, else `torchtitan run`."""
    folder.mkdir(parents=True)
    with Job(folder / "run") as job:
        if script:
            keys = ("--job.dump_folder", str(job.folder.path), *JOB, *overrides)
            job.spawn(SUPERVISOR, sys.executable, script, *keys)
        else:
            job.start(*JOB, *overrides)
        both_train(job)
        yield job
        job.interrupt()
        job.end()


def both_train(job: Job) -> None:
    def committed() -> bool:
        rows = job.metrics()[-SETTLE_STEPS:]
        return len(rows) == SETTLE_STEPS and all(r["participants"] == 2 for r in rows)

    # What was committed before counts no longer.
    job.wait_step(job.step() + SETTLE_STEPS, LIMIT_S)
    job.wait_for(committed, "both groups to train", LIMIT_S)


def first(job: Job, since_mono_s: float, matches: Callable[[Event], bool]) -> Event | None:
    return next((e for e in job.events() if e.mono_s > since_mono_s and matches(e)), None)


def wait_first(job: Job, since_mono_s: float, matches: Callable[[Event], bool], what: str) -> Event:
    job.wait_for(lambda: first(job, since_mono_s, matches), what, LIMIT_S)
    found = first(job, since_mono_s, matches)
    assert found is not None
    return found


def phase_of(name: str, phase: str) -> Callable[[Event], bool]:
    return lambda e: e.kind is Kind.PHASE and e.name == name and e.phase == phase


def of_subject(kind: Kind, subject: str) -> Callable[[Event], bool]:
    return lambda e: e.kind is kind and e.data.get("subject") == subject


def kill_group(job: Job) -> tuple[float, Figures]:
    """Seconds to the first commit of the replacement, and its phases in seconds."""
    target = job.process_of(GROUP)
    killed = time.monotonic()
    os.kill(target.pid, signal.SIGKILL)
    replaced = {"detect": of_subject(Kind.EXIT, GROUP), "replace": of_subject(Kind.SPAWN, GROUP)}
    took_s, phases = recovery(job, killed, replaced)
    if imported := first_log_line(job, killed):
        spawned = first(job, killed, of_subject(Kind.SPAWN, GROUP))
        assert spawned is not None
        phases["of that, import"] = imported - spawned.wall_s
    return took_s, phases


def fail_group(job: Job) -> tuple[float, Figures]:
    """As `kill_group`, of a step that fails in the living process."""
    ordered = time.monotonic()
    order = json.dumps({"act": "fail", "point": "reduce", "step": 0})
    write_atomic(job.folder.path / "order-1.0", order.encode())
    failed = wait_first(
        job,
        ordered,
        lambda e: e.kind is Kind.RESTART and e.phase == "in_process",
        "the ordered failure",
    )
    return recovery(job, failed.mono_s, {})


def recovery(
    job: Job, since_mono_s: float, marks: dict[str, Callable[[Event], bool]]
) -> tuple[float, Figures]:
    """Seconds until the group reports a commit, by phase; `marks` end those before it builds."""
    done = wait_first(job, since_mono_s, phase_of(GROUP, "report"), f"{GROUP} to commit again")
    marks = {
        **marks,
        "import and build": phase_of(GROUP, "attach"),
        "attach": phase_of(GROUP, "waiting_for_batch"),
        "wait for a batch": phase_of(GROUP, "quorum"),
        "quorum and heal": phase_of(GROUP, "forward_backward"),
    }
    phases, before = {}, since_mono_s
    for name, matches in marks.items():
        mark = first(job, since_mono_s, matches)
        assert mark is not None, name
        phases[name], before = mark.mono_s - before, mark.mono_s
    phases["first step"] = done.mono_s - before
    return done.mono_s - since_mono_s, phases


def first_log_line(job: Job, since_mono_s: float) -> float | None:
    """When a new process had imported everything: TorchTitan's first line; Unix time."""
    spawned = first(job, since_mono_s, of_subject(Kind.SPAWN, GROUP))
    if spawned is None or spawned.phase == "promoted":
        return None
    found = LOG_TIME.search(Path(spawned.data["log"]).read_text())
    return datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S,%f").timestamp() if found else None


def kills(
    job: Job,
    repeats: int,
    between: Callable[[], None] = lambda: None,
    strike: Callable[[Job], tuple[float, Figures]] = kill_group,
) -> tuple[list[float], list[Figures]]:
    seconds, phases = [], []
    for _ in range(repeats):
        between()
        both_train(job)
        took_s, its = strike(job)
        seconds.append(took_s)
        phases.append(its)
    return seconds, phases


def with_standby(folder: Path, form: str, repeats: int) -> tuple[list[float], list[Figures]]:
    with running(folder, "--recovery.standby", form) as job:

        def ready() -> None:
            def up() -> bool:
                role = job.folder.role("standby-0")
                lent = job.events(Kind.LEND)
                returned = not lent or lent[-1].phase == "return"
                return role is not None and role.alive() and returned and engines_serve(job)

            job.wait_for(up, "a standby and all engines", LIMIT_S)

        return kills(job, repeats, ready)


def engines_serve(job: Job) -> bool:
    """Both engines are up; on their way from one version to the next they are, too."""
    states = {e.data["subject"]: e.data["new"] for e in job.events(Kind.TRANSITION)}
    busy = {"serving", "stale", "installing", "paused"}
    return sum(s in busy for n, s in states.items() if n.startswith("engine-")) == 2


def without(folder: Path, repeats: int) -> tuple[list[float], list[Figures]]:
    with running(folder) as job:
        return kills(job, repeats)


def in_process(folder: Path, repeats: int) -> tuple[list[float], list[Figures]]:
    keys = ("--recovery.inprocess_restart", "--recovery.inprocess_max_restarts", "1000")
    with running(folder, *keys, script=PROBED_JOB) as job:
        return kills(job, repeats, strike=fail_group)


def restart(job: Job, *, engines: bool) -> float:
    """Kill the job, with its engines or without, start it again, and wait for a commit."""
    kept = set() if engines else job.session_processes()
    supervisor = job.processes[SUPERVISOR]
    killed = time.monotonic()
    # The supervisor first: it would start again what else dies.
    supervisor.kill()
    supervisor.wait()
    for member in set(job.alive()) - kept:
        process.kill(member)
    job.start(*JOB, "--recovery.auto_continue_train")
    done = wait_first(job, killed, lambda e: e.kind is Kind.COMMIT, "the job to commit again")
    return done.mono_s - killed


def restarts(folder: Path, repeats: int, *, engines: bool) -> list[float]:
    ttl = "0" if engines else "600"
    with running(folder, "--rollout.retain_ttl", ttl) as job:
        seconds = []
        for _ in range(repeats):
            both_train(job)
            seconds.append(restart(job, engines=engines))
        return seconds


def measure(arms: list[str], repeats: int) -> tuple[dict[str, Any], dict[str, Aim]]:
    seconds: dict[str, list[float]] = {}
    phases: dict[str, list[Figures]] = {}
    transports: set[str] = set()
    with tempfile.TemporaryDirectory() as temp:
        for arm in arms:
            folder = Path(temp) / arm
            if arm in ("spare", "from_rollout"):
                seconds[arm], phases[arm] = with_standby(folder, arm, repeats)
            elif arm == "inprocess":
                seconds[arm], phases[arm] = in_process(folder, repeats)
            elif arm == "cold":
                seconds[arm], phases[arm] = without(folder, repeats)
            else:
                seconds[arm] = restarts(folder, repeats, engines=arm == "job")
            transports.add(transport_of(read_events(RunFolder(folder / "run").events)))
            print(f"{arm:13}" + " ".join(f"{s:7.2f} s" for s in seconds[arm]), flush=True)
    medians = {arm: statistics.median(s) for arm, s in seconds.items()}
    show_phases(phases)
    figures = {
        "seconds": seconds,
        "medians_s": medians,
        "phases_s": {arm: median_phases(p) for arm, p in phases.items()},
        "repeats": repeats,
        "transport": ", ".join(sorted(transports)),
    }
    aims = {}
    if {"spare", "job"} <= medians.keys():
        aims["job_to_spare"] = Aim(medians["job"] / medians["spare"], 5.0, at_most=False)
    if {"spare", "cold"} <= medians.keys():
        aims["spare_to_cold"] = Aim(medians["spare"] / medians["cold"], 0.5)
    if {"from_rollout", "cold"} <= medians.keys():
        figures["from_rollout_to_cold"] = medians["from_rollout"] / medians["cold"]
    return figures, aims


def median_phases(of: list[Figures]) -> Figures:
    return {n: round(statistics.median([p[n] for p in of if n in p]), 3) for n in of[0]}


def show_phases(phases: dict[str, list[Figures]]) -> None:
    medians = {arm: median_phases(p) for arm, p in phases.items() if p}
    names = list(dict.fromkeys(n for m in medians.values() for n in m))
    print(f"{'median s':18}" + "".join(f"{arm:>14}" for arm in medians))
    for name in names:
        cells = "".join(f"{m[name]:14.3f}" if name in m else f"{'':14}" for m in medians.values())
        print(f"{name:18}{cells}")


ARMS = ("spare", "from_rollout", "inprocess", "cold", "job_kept", "job")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    figures, aims = measure(args.arms, 1 if args.quick else args.repeats)
    if args.out is not None:
        shown = {n: {"value": a.value, "aim": a.aim, "met": a.met} for n, a in aims.items()}
        args.out.write_text(json.dumps({"figures": figures, "aims": shown}, indent=1) + "\n")
    return finish("trainer_recovery", figures, aims, verify=args.verify)


if __name__ == "__main__":
    sys.exit(main())
