"""The serving role: engines, policy versions, routing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp

from torchtitan_rl_ft.config.groups import engine_groups
from torchtitan_rl_ft.config.sections import RolloutSection
from torchtitan_rl_ft.config.session_identity import identify
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.observability.events import EventLog, EventSink, Kind
from torchtitan_rl_ft.observability.otel import export_events
from torchtitan_rl_ft.roles.session import claim_of
from torchtitan_rl_ft.rpc import server
from torchtitan_rl_ft.run_folder import ATTEMPT_ENV, TOKEN_ENV, ProcessId, RunFolder
from torchtitan_rl_ft.serving import warden as warden_file
from torchtitan_rl_ft.serving.engine_records import RecordsCorrupt
from torchtitan_rl_ft.serving.holder_routes import HolderRoutes
from torchtitan_rl_ft.serving.kept_child import ChildFailed
from torchtitan_rl_ft.serving.launch import (
    SGLangLauncher,
    check_model_folder,
    has_accelerator,
    interpreter_problem,
)
from torchtitan_rl_ft.serving.lending_routes import LendingRoutes
from torchtitan_rl_ft.serving.ownership import Claim, NotOwner, Ownership
from torchtitan_rl_ft.serving.pool import PoolFailed
from torchtitan_rl_ft.serving.profile_routes import ProfileRoutes
from torchtitan_rl_ft.serving.profiles import EngineProfiles
from torchtitan_rl_ft.serving.relays import RelaySetup
from torchtitan_rl_ft.serving.routes import Routes
from torchtitan_rl_ft.serving.service import ServingService
from torchtitan_rl_ft.serving.session_routes import SessionRoutes
from torchtitan_rl_ft.serving.versions import VersionsCorrupt
from torchtitan_rl_ft.session_folder import (
    Owner,
    ServingAt,
    SessionBusy,
    SessionFolder,
    SessionUnreadable,
)
from torchtitan_rl_ft.weights.holder.settings import run_memory
from torchtitan_rl_ft.weights.transports.disk import DiskTransport

if TYPE_CHECKING:
    from torchtitan_rl_ft.config.resolve import Resolved

NAME = "serving"

WARDEN_ENDS_S = 15.0
WARDEN_PAUSE_S = 1.0
WARDEN_PAUSE_MAX_S = 60.0
GRACE_S = 0.2

SESSION_ERRORS = (NotOwner, SessionBusy, SessionUnreadable)
"""Another job has the session: a restart meets it again."""


def main(resolved: Resolved) -> int:
    """Serve until /v1/shutdown, SIGTERM, SIGINT or the end of the retention. The caller's exit
    code."""
    sections, folder = resolved.sections, resolved.run_folder
    model_path = Path(sections.model.hf_assets_path or folder.model)
    launcher = SGLangLauncher(sections.rollout, model_path, folder, on_cpu=not has_accelerator())
    problem = _problem(sections.rollout, launcher)
    if problem is not None:
        print(f"torchtitan: error: serving: {problem}", file=sys.stderr)
        return ExitCode.CONFIG
    attempt = int(os.environ.get(ATTEMPT_ENV, "1"))
    events = EventLog(folder.events, run=folder.path.name, role=NAME, name=NAME, attempt=attempt)
    export_events(events, resolved.sections.otel, folder.token())
    try:
        return asyncio.run(_serve(resolved, launcher, events))
    except (
        PoolFailed,
        ChildFailed,
        VersionsCorrupt,
        RecordsCorrupt,
        *SESSION_ERRORS,
        OSError,
    ) as e:
        events.emit(Kind.FAULT, cause=str(e), subject=NAME)
        print(f"torchtitan: error: serving: {e}", file=sys.stderr)
        # A new serving role would start the same engines the same way.
        in_vain = (
            isinstance(e, SESSION_ERRORS)
            or (isinstance(e, PoolFailed) and e.never_up)
            or (isinstance(e, ChildFailed) and e.in_vain)
        )
        return ExitCode.CONFIG if in_vain else ExitCode.FAILED
    finally:
        events.close()


def _problem(rollout: RolloutSection, launcher: SGLangLauncher) -> str | None:
    """Why serving cannot start with this configuration, or None."""
    for group in engine_groups(rollout):
        if (problem := check_model_folder(launcher.model_path(group))) is not None:
            return f"group {group.name}: {problem}" if rollout.groups else problem
    return interpreter_problem(rollout, os.environ)


async def _serve(resolved: Resolved, launcher: SGLangLauncher, events: EventLog) -> int:
    """Raises PoolFailed, ChildFailed, VersionsCorrupt, RecordsCorrupt, NotOwner,
    SessionBusy, SessionUnreadable, OSError."""
    sections, folder = resolved.sections, resolved.run_folder
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    session = SessionFolder(identify(resolved).id)
    async with contextlib.AsyncExitStack() as stack:
        await _take(session, stack)
        owner = Owner.from_environment()
        if owner is not None and owner.alive() is False:
            # The next job, which may be starting, found no session: it must not meet one now.
            print(f"torchtitan: serving: {owner} has died: nothing is started", file=sys.stderr)
            return ExitCode.FAILED
        connector = aiohttp.TCPConnector(limit=0)
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        setup = relay_setup(resolved, session)
        service = ServingService(
            sections.rollout,
            folder,
            events,
            launcher,
            http,
            DiskTransport(),
            engines_file=session.engines,
            relays=setup,
        )
        ownership = Ownership(session, events, service.admission)
        earlier = await ownership.open(claim(resolved), _this_process(folder), by_hand=_by_hand())
        # A job's role that fails is started again and finds the session; one that is stopped, or
        # that nobody restarts, ends it.
        stack.callback(lambda: ownership.dispose() if stop.is_set() or _by_hand() else None)
        service.continue_above(RunFolder(earlier))
        session.write_token(folder.token())
        hold_memory(setup, session)
        await guard(ownership)
        stack.push_async_callback(service.close)
        await service.open(ownership.attempt)
        ownership.on_handover = service.lending.reclaim

        async def restore() -> None:
            if session.record_file.exists():
                return
            stack.enter_context(session.serving_lock())  # the one that is held has no name now
            session.write_token(folder.token())
            hold_memory(setup, session)
            await service.save_records()
            await ownership.save()

        async def serve(claim: Claim) -> None:
            run = RunFolder(claim.owner.run_folder)
            await service.move(run)
            service.judge_by(claim.health)
            events.move(run.events, run.path.name)
            run.register(NAME, url)

        async def dispose() -> None:
            await service.close()
            asyncio.get_running_loop().call_soon(stop.set)

        routes = Routes(service, stop.set, ownership).table()
        routes += LendingRoutes(service, ownership).table()
        if service.relays is not None:
            routes += HolderRoutes(service.relays.book).table()
        routes += ProfileRoutes(EngineProfiles(lambda: service.pool.engines, events)).table()
        routes += SessionRoutes(
            ownership,
            lambda: len(list(service.pool.engines)),
            lambda: service.version,
            serve,
            dispose,
        ).table()
        app = server.make_app(folder.token(), routes)
        # A long poll outlives its caller: the last one would hold up every end of a job.
        url, runner = await server.start(app, grace_s=GRACE_S)
        stack.push_async_callback(runner.cleanup)
        await ownership.ready(url)
        folder.register(NAME, url)
        stack.callback(lambda: RunFolder(ownership.record.run_folder).unregister(NAME))
        events.emit(Kind.READY, url=url)
        service.open_relays(url)
        if reason := await _until_stopped(
            service, ownership, stop, keep_guarded(ownership, restore, events)
        ):
            events.emit(Kind.SESSION, phase="expire", cause=reason, session=session.id)
            stop.set()
    return ExitCode.DONE


async def _take(session: SessionFolder, stack: contextlib.AsyncExitStack) -> None:
    """Hold the session while `stack` is open. The warden may be ending what an earlier role has
    left: that is waited for. Raises SessionBusy, SessionUnreadable."""
    end = time.monotonic() + WARDEN_ENDS_S
    while True:
        try:
            stack.enter_context(session.serving_lock())
            return
        except SessionBusy:
            record = session.read()
            served = record is not None and record.serving.alive() is not False
            if served or time.monotonic() >= end:
                raise
        await asyncio.sleep(0.1)


def relay_setup(resolved: Resolved, session: SessionFolder) -> RelaySetup | None:
    """None: policies come over the file system alone."""
    if resolved.sections.rollout.weight_transport != "nixl":
        return None
    token = resolved.run_folder.token()
    return RelaySetup(resolved.sections.weights, session.id, token, lambda: _guardian(session))


def _guardian(session: SessionFolder) -> ProcessId:
    """With whom the memory of relays ends: the session's warden, which outlives this role."""
    with contextlib.suppress(SessionUnreadable):
        record = session.read()
        if record is not None and record.warden is not None and record.warden.alive():
            return record.warden
    return ProcessId.current()


def hold_memory(setup: RelaySetup | None, session: SessionFolder) -> None:
    """Have it removed with the session."""
    if setup is not None:
        session.hold_memory(run_memory(setup.weights.memory_folder, setup.run_id))


def _by_hand() -> bool:
    return Owner.from_environment() is None


def claim(resolved: Resolved) -> Claim:
    """What the job of this role asks of its session; without a job, this role itself."""
    owner = Owner.from_environment() or Owner.this_process(
        secrets.token_hex(8), resolved.run_folder.path
    )
    return claim_of(resolved, owner)


def _this_process(folder: RunFolder) -> ServingAt:
    me = ProcessId.current()
    log = folder.log_file(NAME, int(os.environ.get(ATTEMPT_ENV, "1")))
    return ServingAt(me.pid, me.start_time, socket.gethostname(), "", str(log))


async def guard(ownership: Ownership) -> None:
    """Have a warden: it ends the engines after the retention when this role cannot."""
    warden = ownership.record.warden
    if warden is not None and warden.alive():
        return
    folder = ownership.folder
    command = [sys.executable, "-I", "-S", warden_file.__file__, str(folder.path)]
    env = {k: v for k, v in os.environ.items() if k != TOKEN_ENV}
    child = process.spawn(command, log=folder.path / "warden.log", env=env, outlives_parent=True)
    await ownership.guarded_by(child.id)


async def keep_guarded(
    ownership: Ownership, restore: Callable[[], Awaitable[None]], events: EventSink
) -> None:
    """Start another warden when it has died: at most one a second, after those that die young
    one a minute. It ends when somebody has removed the session's folder: `restore` has that
    written again, so that the engines are not forgotten."""
    pause_s, said = WARDEN_PAUSE_S, ""
    while True:
        began_s = time.monotonic()
        if (warden := ownership.record.warden) is not None:
            await process.wait_gone(warden)
        if time.monotonic() - began_s > WARDEN_PAUSE_MAX_S:
            pause_s = WARDEN_PAUSE_S
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, WARDEN_PAUSE_MAX_S)
        cause = "the session's warden has died: another one is started"
        try:
            await restore()
            await guard(ownership)
        except OSError as e:  # a full disk: the engines serve on
            cause = f"the session's warden has died, and no other can be started: {e}"
        if cause != said:
            events.emit(Kind.WARN, cause=cause)
        said = cause


async def _until_stopped(
    service: ServingService,
    ownership: Ownership,
    stop: asyncio.Event,
    guarding: Coroutine[None, None, None],
) -> str | None:
    """Returns why the retention is over, or None when the role was told to stop. Raises
    PoolFailed, ChildFailed, and whatever broke the service's own code."""
    stopped = asyncio.create_task(stop.wait())
    failed = asyncio.create_task(service.run_until_failed())
    over = asyncio.create_task(ownership.watch())
    guarded = asyncio.create_task(guarding)
    try:
        await asyncio.wait({stopped, failed, over, guarded}, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            failed.result()
        if guarded.done():
            guarded.result()
        return over.result() if over.done() else None
    finally:
        for task in (stopped, failed, over, guarded):
            task.cancel()
