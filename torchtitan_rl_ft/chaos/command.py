"""`torchtitan chaos`: faults into a running job that was not started for them, and the trace of
those that a run has had."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.chaos import disk, trace
from torchtitan_rl_ft.chaos.holds import Holds
from torchtitan_rl_ft.chaos.injector import Injector
from torchtitan_rl_ft.chaos.job_plan import misfit, numbered
from torchtitan_rl_ft.chaos.memory import Memory
from torchtitan_rl_ft.chaos.plan import Fault, FaultInvalid, parse_command
from torchtitan_rl_ft.chaos.role import NAME, status_of, url_of
from torchtitan_rl_ft.chaos.schedule import Schedule, keyed
from torchtitan_rl_ft.chaos.targets import Targets
from torchtitan_rl_ft.config.errors import ConfigError
from torchtitan_rl_ft.config.resolve import Resolved
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.observability.events import EventLog, EventSink, Kind, read_event
from torchtitan_rl_ft.observability.jsonl import JsonlTail
from torchtitan_rl_ft.rpc.client import RoleClient
from torchtitan_rl_ft.run_folder import ProcessId, RunFolder

FILES = "chaos-command-*.json"
"""What each command that is at work holds."""

_OWNER = re.compile(r"chaos-command-(\d+)-(\d+\.\d+)")


class Told:
    """An EventSink that also tells a person what is injected and lifted."""

    def __init__(self, events: EventSink) -> None:
        self._events = events
        self.injected = self.missed = 0

    def emit(self, kind: Kind, **fields: Any) -> None:
        self._events.emit(kind, **fields)
        cause = fields.get("cause")
        if kind is Kind.WARN:
            self.missed += 1
            print(f"torchtitan: error: chaos: {cause}", file=sys.stderr, flush=True)
        elif fields.get("phase") == "inject":
            self.injected += 1
            print(
                f"injected: {cause}: {fields['subject']} (pid {fields['pid']}), "
                f"{fields['late_s']:.3f} s after its moment",
                flush=True,
            )
        elif fields.get("phase") == "lift":
            print(f"lifted: {cause}: {fields['subject']}", flush=True)


def main_inject(path: str, lines: Sequence[str]) -> int:
    """Inject `lines` into the job of a run folder and wait until the last one is over. Raises
    ConfigError, OSError."""
    resolved = _job(path)
    folder = resolved.run_folder
    stop = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stop.set())
    schedule = Schedule(keyed(_faults(lines, resolved)), time.monotonic())
    holds = Holds(folder, lambda name: disk.of(name, resolved))
    me = ProcessId.current()
    memory = Memory(folder, FILES.replace("*", f"{me.pid}-{me.start_time:.2f}"))
    events = EventLog(folder.events, run=folder.path.name, role=NAME, name=NAME, attempt=0)
    told, serving = Told(events), _serving(folder)
    targets = Targets(
        folder,
        numbered(resolved),
        lambda: status_of(serving) if serving is not None else None,
        seed=int.from_bytes(os.urandom(4)),
    )
    injector = Injector(folder, schedule, targets, memory, told, holds)
    try:
        injector.catch_up()
        _refuse_late(schedule)
        for key, held in _held_by_dead(folder):
            holds.undo(held)
            told.emit(Kind.CHAOS, phase="lift", cause=key, subject=held["name"])
        injector.run(stop, over=lambda: injector.done() or not is_up(folder))
    finally:
        memory.forget()
        events.close()
        if serving is not None:
            serving.close()
    if stop.is_set():
        return ExitCode.INTERRUPTED
    if not injector.done():
        message = f"error: the job in {folder.path} has ended before all was injected"
        print(f"torchtitan: {message}", file=sys.stderr)
        return ExitCode.FAILED
    return ExitCode.FAILED if told.missed else ExitCode.DONE


def main_record(path: str, file: str) -> int:
    """Write the trace of a run's faults to `file`. Raises ConfigError, OSError."""
    folder = RunFolder(path)
    events = folder.events if folder.path.is_dir() else Path(path)
    if not events.is_file():
        raise ConfigError(f"{path} is neither a run folder with events.jsonl nor such a file")
    try:
        found = trace.record(JsonlTail(events, parse=read_event).read())
    except (FaultInvalid, KeyError) as e:
        raise ConfigError(f"{events} tells of a fault that this version does not know: {e}") from e
    if not found:
        raise ConfigError(f"nothing was injected into the run of {events}: there is no trace")
    trace.save(Path(file), events.parent.name, found)
    print(f"{len(found)} faults of {events} are in {file}")
    return ExitCode.DONE


def is_up(folder: RunFolder) -> bool:
    """Whether a role of the job lives, serving aside: it may outlive its job."""
    return any(r.alive() for r in folder.roles() if r.name != "serving")


def _job(path: str) -> Resolved:
    """Of the running job in a run folder. Raises ConfigError."""
    folder = RunFolder(path)
    if not folder.resolved_config.exists():
        raise ConfigError(f"{path} is not the run folder of a job")
    if not is_up(folder):
        raise ConfigError(f"no job runs in {folder.path}: it has ended, or never started")
    return Resolved.read(folder.path)


def _faults(lines: Sequence[str], resolved: Resolved) -> list[Fault]:
    """Raises ConfigError that names every line that is wrong."""
    found, problems = [], []
    for line in lines:
        try:
            fault = parse_command(line)
            problem = misfit(fault, resolved)
        except FaultInvalid as e:
            problems.append(f"{line!r}: {e}")
            continue
        found.append(fault)
        if problem is not None:
            problems.append(f"{line!r}: {problem}")
    if problems:
        raise ConfigError(problems)
    return found


def _refuse_late(schedule: Schedule) -> None:
    late = schedule.too_late(time.monotonic())
    if late:
        raise ConfigError([f"{f.line!r}: that moment has passed" for f in late])


def _serving(folder: RunFolder) -> RoleClient | None:
    """None: engines are found by the events alone."""
    try:
        return RoleClient("serving", lambda: url_of(folder), folder.token())
    except FileNotFoundError:  # the job of another user or machine
        return None


def _held_by_dead(folder: RunFolder) -> list[tuple[str, dict[str, Any]]]:
    """What commands that were killed have left held; their files are removed."""
    found = []
    for file in folder.path.glob(FILES):
        owner = _OWNER.fullmatch(file.stem)
        if owner is None or ProcessId(int(owner[1]), float(owner[2])).alive():
            continue
        memory = Memory(folder, file.name)
        found += list(memory.held.items())
        memory.forget()
    return found
