"""The serving role: engines, policy versions, routing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Protocol

import aiohttp

from torchtitan_rl_ft.config.groups import engine_groups
from torchtitan_rl_ft.config.sections import RolloutSection, Sections
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.observability.events import EventLog, Kind
from torchtitan_rl_ft.rpc import server
from torchtitan_rl_ft.run_folder import ATTEMPT_ENV, RunFolder
from torchtitan_rl_ft.serving.launch import (
    SGLangLauncher,
    check_model_folder,
    has_accelerator,
    interpreter_problem,
)
from torchtitan_rl_ft.serving.pool import PoolFailed
from torchtitan_rl_ft.serving.routes import Routes
from torchtitan_rl_ft.serving.service import ServingService
from torchtitan_rl_ft.serving.versions import VersionsCorrupt
from torchtitan_rl_ft.weights.transports import TransportUnknown, make_transport

NAME = "serving"


class HasSections(Protocol):
    @property
    def sections(self) -> Sections: ...


def main(resolved: HasSections) -> int:
    """Serve until /v1/shutdown, SIGTERM or SIGINT. The caller's exit code."""
    sections = resolved.sections
    folder = RunFolder(sections.job.dump_folder)
    model_path = Path(sections.model.hf_assets_path or folder.model)
    launcher = SGLangLauncher(sections.rollout, model_path, folder, on_cpu=not has_accelerator())
    problem = _problem(sections.rollout, launcher)
    if problem is not None:
        print(f"torchtitan: error: serving: {problem}", file=sys.stderr)
        return ExitCode.CONFIG
    attempt = int(os.environ.get(ATTEMPT_ENV, "1"))
    events = EventLog(folder.events, run=folder.path.name, role=NAME, name=NAME, attempt=attempt)
    try:
        return asyncio.run(_serve(sections, folder, launcher, events))
    except (PoolFailed, VersionsCorrupt, OSError) as e:
        events.emit(Kind.FAULT, cause=str(e), subject=NAME)
        print(f"torchtitan: error: serving: {e}", file=sys.stderr)
        # A new serving role would start the same engines the same way.
        never_up = isinstance(e, PoolFailed) and e.never_up
        return ExitCode.CONFIG if never_up else ExitCode.FAILED
    finally:
        events.close()


def _problem(rollout: RolloutSection, launcher: SGLangLauncher) -> str | None:
    """Why serving cannot start with this configuration, or None."""
    try:
        make_transport(rollout.weight_transport)
    except TransportUnknown as e:
        return str(e)
    for group in engine_groups(rollout):
        if (problem := check_model_folder(launcher.model_path(group))) is not None:
            return f"group {group.name}: {problem}" if rollout.groups else problem
    return interpreter_problem(rollout, os.environ)


async def _serve(
    sections: Sections, folder: RunFolder, launcher: SGLangLauncher, events: EventLog
) -> int:
    """Raises PoolFailed, VersionsCorrupt, OSError."""
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    async with contextlib.AsyncExitStack() as stack:
        connector = aiohttp.TCPConnector(limit=0)
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        service = ServingService(
            sections.rollout,
            folder,
            events,
            launcher,
            http,
            make_transport(sections.rollout.weight_transport),
        )
        stack.push_async_callback(service.close)
        await service.open()
        app = server.make_app(folder.token(), Routes(service, stop.set).table())
        url, runner = await server.start(app)
        stack.push_async_callback(runner.cleanup)
        folder.register(NAME, url)
        stack.callback(folder.unregister, NAME)
        events.emit(Kind.READY, url=url)
        await _until_stopped(service, stop)
    return ExitCode.DONE


async def _until_stopped(service: ServingService, stop: asyncio.Event) -> None:
    """Raises PoolFailed, and whatever broke the service's own code."""
    stopped = asyncio.create_task(stop.wait())
    failed = asyncio.create_task(service.run_until_failed())
    try:
        await asyncio.wait({stopped, failed}, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            failed.result()
    finally:
        stopped.cancel()
        failed.cancel()
