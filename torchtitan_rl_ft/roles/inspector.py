"""The inspector role (`recovery.run_workload_inspector_server`): what every rank of this host is
doing now, over HTTP on loopback with the run's token. It only looks; the run goes on without it.

    GET /v1/phases                    where each rank stands, for how long, and its limit
    GET /v1/stacks?rank=trainer-1.0   the stacks of all threads of a rank, also of one that hangs
    GET /v1/events?last=n             the last lines of events.jsonl
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import stat
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import psutil
from aiohttp import web

from torchtitan_rl_ft.config.resolve import Resolved
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.host.phase_file import PhaseRecord, records
from torchtitan_rl_ft.observability.events import EventLog, Kind, read_events
from torchtitan_rl_ft.observability.otel import export_events
from torchtitan_rl_ft.roles.watcher import Lessons, job_limits
from torchtitan_rl_ft.rpc.server import RequestError, make_app, start
from torchtitan_rl_ft.run_folder import ATTEMPT_ENV, RunFolder
from torchtitan_rl_ft.trainer.watch import STACKS_SIGNAL

NAME = "inspector"

STACKS_TIMEOUT_S = 3.0
QUIET_S = 0.2
"""Stacks are whole when nothing was added for this long."""

MAX_EVENTS = 10_000

_STACK_LINES = ("Thread 0x", "Current thread 0x", "  File ", "  ...")


def main(resolved: Resolved) -> int:
    """Serve until SIGTERM or SIGINT."""
    folder = resolved.run_folder
    attempt = int(os.environ.get(ATTEMPT_ENV, "1"))
    events = EventLog(folder.events, run=folder.path.name, role=NAME, name=NAME, attempt=attempt)
    export_events(events, resolved.sections.otel, folder.token())
    try:
        return asyncio.run(_run(resolved, folder, events))
    except OSError as e:
        port = resolved.sections.recovery.workload_inspector_port
        print(
            f"torchtitan: error: {NAME}: port {port} of loopback: {e.strerror or e}: set "
            "recovery.workload_inspector_port to another one, or to 0 for any",
            file=sys.stderr,
        )
        return ExitCode.FAILED
    finally:
        events.close()


async def _run(resolved: Resolved, folder: RunFolder, events: EventLog) -> int:
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    app = make_app(folder.token(), routes(resolved))
    url, runner = await start(app, port=resolved.sections.recovery.workload_inspector_port)
    try:
        folder.register(NAME, url)
        events.emit(Kind.READY, url=url)
        await stop.wait()
    finally:
        folder.unregister(NAME)
        await runner.cleanup()
    return ExitCode.DONE


def routes(resolved: Resolved) -> list[web.RouteDef]:
    folder = resolved.run_folder

    async def phases(request: web.Request) -> web.StreamResponse:
        return web.json_response({"ranks": await asyncio.to_thread(tell_phases, resolved)})

    async def stacks(request: web.Request) -> web.StreamResponse:
        record = _rank(folder, request.query.get("rank", ""))
        text = await asyncio.to_thread(read_stacks, record)
        return web.json_response({"rank": rank_name(record), "pid": record.pid, "stacks": text})

    async def last_events(request: web.Request) -> web.StreamResponse:
        try:
            n = int(request.query.get("last", "50"))
        except ValueError:
            n = 0
        if not 1 <= n <= MAX_EVENTS:
            raise RequestError(400, f"last is a number from 1 to {MAX_EVENTS}")
        found = await asyncio.to_thread(lambda: deque(read_events(folder.events), n))
        return web.json_response({"events": [json.loads(event.to_line()) for event in found]})

    return [
        web.get("/v1/phases", phases),
        web.get("/v1/stacks", stacks),
        web.get("/v1/events", last_events),
    ]


def rank_name(record: PhaseRecord) -> str:
    return f"{record.name}.{record.rank}" if record.rank else record.name


def tell_phases(resolved: Resolved) -> list[dict[str, Any]]:
    """Of all watched processes of this host."""
    limits = job_limits(resolved)
    if resolved.sections.recovery.calc_ft_timeouts:
        limits = dataclasses.replace(limits, learned_s=Lessons.of(resolved).limits_s())
    found = []
    for record in records(resolved.run_folder.phases):
        limit_s, origin = limits.of(record.key)
        found.append(
            {
                "rank": rank_name(record),
                "pid": record.pid,
                "state": _state(record),
                "phase": record.phase,
                "step": record.step,
                "first_step": not record.settled,
                "in_phase_s": round(time.monotonic() - record.since_mono_s, 3),
                "limit_s": limit_s if limit_s != float("inf") else None,
                "limit_of": origin,
                "longest_s": record.longest_s,
            }
        )
    return found


def _state(record: PhaseRecord) -> str:
    """running, sleeping, stopped, ...: the kernel's word, which needs no answer of the rank."""
    try:
        return psutil.Process(record.pid).status()
    except psutil.NoSuchProcess:
        return "gone"


def _rank(folder: RunFolder, name: str) -> PhaseRecord:
    known = {rank_name(r): r for r in records(folder.phases)}
    # Other processes have not registered for the signal: it would end them.
    ranks = {n: r for n, r in known.items() if r.rank.isdigit()}
    if name not in ranks:
        raise RequestError(404, f"rank is one of {', '.join(sorted(ranks)) or 'none that is up'}")
    return ranks[name]


def read_stacks(record: PhaseRecord) -> str:
    """The rank writes them to its log (faulthandler), whatever its interpreter is doing; from there
    they are read. Raises RequestError."""
    if _state(record) == psutil.STATUS_STOPPED:
        raise RequestError(409, f"process {record.pid} is stopped (SIGSTOP): it writes nothing")
    log = _log_of(record)
    begin = log.stat().st_size
    if not process.kill(record.id, STACKS_SIGNAL):
        raise RequestError(409, f"process {record.pid} has just ended")
    end, size, grown_s = time.monotonic() + STACKS_TIMEOUT_S, begin, time.monotonic()
    while (now_s := time.monotonic()) < end:
        if (new := log.stat().st_size) != size:
            size, grown_s = new, now_s
        elif size > begin and now_s - grown_s > QUIET_S:
            break
        time.sleep(0.02)
    with open(log, "rb") as f:
        f.seek(begin)
        lines = f.read().decode(errors="replace").splitlines()
    text = "\n".join(line for line in lines if line.startswith(_STACK_LINES))
    if not text:
        raise RequestError(504, f"process {record.pid} wrote no stacks to {log}")
    return text


def _log_of(record: PhaseRecord) -> Path:
    """Where its stderr goes."""
    path = Path(f"/proc/{record.pid}/fd/2")
    try:
        if stat.S_ISREG(path.stat().st_mode):
            return path.resolve()
    except OSError as e:
        raise RequestError(409, f"the log of process {record.pid} is not to be had: {e}") from e
    raise RequestError(409, f"stderr of process {record.pid} is no file: look there")
