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

from torchtitan_rl_ft.chaos import disk, engine_wrapper, failing_reduce
from torchtitan_rl_ft.chaos.holds import Holds
from torchtitan_rl_ft.chaos.injector import Injector
from torchtitan_rl_ft.chaos.job_plan import JobPlan, numbered
from torchtitan_rl_ft.chaos.memory import Memory
from torchtitan_rl_ft.chaos.schedule import Schedule
from torchtitan_rl_ft.chaos.targets import Targets
from torchtitan_rl_ft.config.resolve import Resolved
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
    serving = RoleClient("serving", lambda: url_of(folder), folder.token())
    try:
        plan = JobPlan.of(chaos)
        targets = Targets(folder, numbered(resolved), lambda: status_of(serving), seed=chaos.seed)
        schedule = Schedule(plan.planned(), time.monotonic(), plan.drawn(chaos))
        holds = Holds(folder, lambda name: disk.of(name, resolved))
        injector = Injector(folder, schedule, targets, Memory(folder), events, holds)
        events.emit(Kind.READY, faults=len(plan.faults))
        injector.run(stop)
    except (OSError, ValueError) as e:
        print(f"torchtitan: error: chaos: {e}", file=sys.stderr)
        return ExitCode.FAILED
    finally:
        serving.close()
        events.close()
    return ExitCode.DONE


def made_ready(resolved: Resolved) -> Resolved:
    """The same job with what its faults need from the start: engines behind proxies, and process
    groups that can fail (by this process's environment, which its roles inherit). Raises OSError.
    """
    if not resolved.sections.chaos.enable:
        return resolved
    plan = JobPlan.of(resolved.sections.chaos)
    if plan.failing_sums():
        failing_reduce.put_before(os.environ)
    return _behind_proxies(resolved) if plan.engines_behind_proxy() else resolved


def _behind_proxies(resolved: Resolved) -> Resolved:
    path = resolved.run_folder.path / "chaos" / "engine_python"
    python = resolved.sections.rollout.engine_python
    if python == str(path):  # an earlier start of this run
        return resolved
    script = engine_wrapper.make_interpreter(path, python)
    values = copy.deepcopy(resolved.values)
    values["rollout"]["engine_python"] = str(script)
    why = "chaos: engines behind proxies, for a black hole"
    return Resolved(values, {**resolved.origins, "rollout.engine_python": why})


def url_of(folder: RunFolder) -> str | None:
    address = folder.role("serving")
    return address.url if address is not None else None


def status_of(serving: RoleClient) -> Mapping[str, Any] | None:
    """Bounded: serving may be a victim itself."""
    try:
        return serving.get("/v1/status", deadline_s=STATUS_TIMEOUT_S)
    except (RoleUnreachable, RoleRefused):
        return None
