"""The chaos role: one more process of a job whose `[chaos]` section asks for it."""

from __future__ import annotations

import copy
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from torchtitan_rl_ft.chaos import engine_wrapper, plan
from torchtitan_rl_ft.chaos.injector import Injector
from torchtitan_rl_ft.chaos.memory import Memory
from torchtitan_rl_ft.chaos.schedule import Schedule, keyed
from torchtitan_rl_ft.chaos.targets import Targets
from torchtitan_rl_ft.config.resolve import Resolved
from torchtitan_rl_ft.config.sections import Sections
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.observability.events import EventLog, Kind
from torchtitan_rl_ft.observability.otel import export_events
from torchtitan_rl_ft.rpc.client import RoleClient, RoleRefused, RoleUnreachable
from torchtitan_rl_ft.run_folder import ATTEMPT_ENV, RunFolder

NAME = "chaos"
STATUS_TIMEOUT_S = 1.0


def main(resolved: Resolved) -> int:
    """Inject the plan of `resolved`, until SIGTERM or SIGINT."""
    folder, chaos = resolved.run_folder, resolved.sections.chaos
    stop = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stop.set())
    attempt = int(os.environ.get(ATTEMPT_ENV, "1"))
    events = EventLog(folder.events, run=folder.path.name, role=NAME, name=NAME, attempt=attempt)
    export_events(events, resolved.sections.otel, folder.token())
    serving = RoleClient("serving", lambda: _url(folder), folder.token())
    try:
        targets = Targets(
            folder, _names(resolved.sections), lambda: _status(serving), seed=chaos.seed
        )
        schedule = Schedule(keyed([plan.parse(f) for f in chaos.faults]), time.monotonic())
        injector = Injector(folder, schedule, targets, Memory(folder), events)
        events.emit(Kind.READY, faults=len(chaos.faults))
        injector.run(stop)
    except (OSError, ValueError) as e:
        print(f"torchtitan: error: chaos: {e}", file=sys.stderr)
        return ExitCode.FAILED
    finally:
        serving.close()
        events.close()
    return ExitCode.DONE


def with_proxies(resolved: Resolved) -> Resolved:
    """The same job with its engines behind proxies, when a fault needs that. Raises OSError."""
    faults = [plan.parse(line) for line in resolved.sections.chaos.faults]
    if not (resolved.sections.chaos.enable and plan.behind_proxy(faults)):
        return resolved
    path = resolved.run_folder.path / "chaos" / "engine_python"
    python = resolved.sections.rollout.engine_python
    if python == str(path):  # an earlier start of this run
        return resolved
    script = engine_wrapper.make_interpreter(path, python)
    values = copy.deepcopy(resolved.values)
    values["rollout"]["engine_python"] = str(script)
    why = "chaos.faults: engines behind proxies, for a black hole"
    return Resolved(values, {**resolved.origins, "rollout.engine_python": why})


def _names(sections: Sections) -> list[str]:
    """Engines that take requests, and trainers: what `any` may mean."""
    rollout = sections.rollout
    engines = sum(g.engines for g in rollout.groups) or rollout.engines
    groups = sections.fault_tolerance.replica_groups
    return [f"engine-{i}" for i in range(engines)] + [f"trainer-{g}" for g in range(groups)]


def _url(folder: RunFolder) -> str | None:
    address = folder.role("serving")
    return address.url if address is not None else None


def _status(serving: RoleClient) -> Mapping[str, Any] | None:
    """Bounded: serving may be a victim itself."""
    try:
        return serving.get("/v1/status", deadline_s=STATUS_TIMEOUT_S)
    except (RoleUnreachable, RoleRefused):
        return None
