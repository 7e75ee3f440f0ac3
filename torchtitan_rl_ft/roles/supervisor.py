"""The supervisor role, `torchtitan run`: keeps the roles of a job up, shows progress, sums up.

It holds nothing that the run folder cannot rebuild.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torchtitan_rl_ft.config import start_state
from torchtitan_rl_ft.config.placement import slot_ranks
from torchtitan_rl_ft.config.resolve import Resolved
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.host.unread_output import while_read
from torchtitan_rl_ft.observability.events import EventLog, Kind
from torchtitan_rl_ft.observability.otel import export_events
from torchtitan_rl_ft.observability.reward_curve import save_png
from torchtitan_rl_ft.observability.summary import Summary, render
from torchtitan_rl_ft.roles import exits, job, transport, watcher
from torchtitan_rl_ft.roles.keeper import RoleKeeper
from torchtitan_rl_ft.roles.lifecycle import RestartLimits
from torchtitan_rl_ft.roles.loans import BorrowedPlaces
from torchtitan_rl_ft.roles.outcome import Outcome
from torchtitan_rl_ft.roles.report import SUPERVISOR as NAME
from torchtitan_rl_ft.roles.report import summary_of
from torchtitan_rl_ft.roles.role_spec import RoleSpec
from torchtitan_rl_ft.roles.session import Session
from torchtitan_rl_ft.roles.showing import show
from torchtitan_rl_ft.roles.standby import Places, Standbys
from torchtitan_rl_ft.rpc.client import RoleClient
from torchtitan_rl_ft.run_folder import TOKEN_ENV, RunFolder
from torchtitan_rl_ft.trainer.source import remove_memory

logger = logging.getLogger(__name__)


def main(resolved: Resolved) -> int:
    """Run the job to its end; returns the exit code.

    Raises ConfigError when the run folder does not allow a start; nothing has been started then.
    """
    folder = resolved.run_folder
    try:
        with job.exclusive(folder):
            session = Session(resolved)
            resolved = _with_transport(resolved, session)
            start = job.prepare(resolved, session)
            specs = [session.role(s) for s in job.role_specs(resolved.sections, folder)]
            try:
                return run_job(resolved, start, specs, session)
            finally:
                remove_memory(folder, resolved.sections.weights)
    except OSError as e:
        _say(f"error: run folder {folder.path}: {e.strerror or e}: {e.filename or ''}")
        return ExitCode.FAILED


def _with_transport(resolved: Resolved, session: Session) -> Resolved:
    """Says what was chosen for the user, and why. Raises ConfigError."""
    decided, choice = transport.decide(resolved, session)
    if resolved.sections.rollout.weight_transport != choice.transport:
        with while_read():
            print(f"weights travel by {choice.transport}: {choice.reason}", flush=True)
    return decided


def run_job(
    resolved: Resolved, start: start_state.Start, specs: Sequence[RoleSpec], session: Session
) -> int:
    """Keep `specs` up in the prepared run folder until the job ends, then sum up."""
    folder = resolved.run_folder
    attempt = folder.next_attempt(NAME)
    log = _log_to(folder.log_file(NAME, attempt))
    events = EventLog(folder.events, run=folder.path.name, role=NAME, name=NAME, attempt=attempt)
    try:
        token = session.token() or folder.token(create=True)
        export_events(events, resolved.sections.otel, token, all_events=folder.events)
        process.adopt_orphans()
        folder.register(NAME, "", attempt)
        phase = "start" if start is start_state.Start.FRESH else start.value
        ranks = slot_ranks(resolved.sections.fault_tolerance, resolved.sections.rollout)
        events.emit(Kind.RUN, phase=phase, roles=[s.name for s in specs], ranks=ranks)
        outcome = asyncio.run(_supervise(resolved, specs, session, events))
        try:
            events.emit(Kind.RUN, phase="end", cause=outcome.cause, exit_code=outcome.exit_code)
        except OSError as e:  # a full disk: the outcome is told all the same
            _say(f"warning: {e}")
    finally:
        folder.unregister(NAME)
        folder.forget_token()
        events.close()
        logging.getLogger().removeHandler(log)
        log.close()
    _report(resolved, outcome)
    if outcome.kept:
        for line in session.farewell():
            _say(line)
    return outcome.exit_code


async def _supervise(
    resolved: Resolved, specs: Sequence[RoleSpec], session: Session, events: EventLog
) -> Outcome:
    sections, folder = resolved.sections, resolved.run_folder
    recovery = sections.recovery
    env = job.role_env(folder, dict(os.environ), session)
    keeper = RoleKeeper(
        folder,
        specs,
        events,
        env=env,
        limits=RestartLimits(recovery.role_max_restarts, recovery.role_restart_window_s),
        cleanup_timeout_s=sections.rollout.cleanup_timeout,
        worker_end_timeout_s=recovery.batch_wait_timeout_s,
        session=session,
        graceful=exits.graceful_exit(resolved, env[TOKEN_ENV]),
        standbys=Standbys(folder, events, _places(resolved, session, events)),
    )
    lessons = watcher.Lessons.of(resolved) if recovery.calc_ft_timeouts else None
    watch = watcher.Watcher(folder, events, watcher.job_limits(resolved), lessons=lessons)
    shown = asyncio.create_task(show(resolved, events))
    watching = asyncio.create_task(watch.run())
    try:
        outcome = await keeper.run()
        if outcome.exit_code == ExitCode.REQUEUE:
            reason = exits.reason_of(folder, session.owner)
            outcome = replace(outcome, cause=reason or outcome.cause)
        return outcome
    finally:
        for task in (shown, watching):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def _places(resolved: Resolved, session: Session, events: EventLog) -> Places | None:
    """Where promoted standbys train; None: where they have waited."""
    if resolved.sections.recovery.standby != "from_rollout":
        return None
    folder = resolved.run_folder
    serving = RoleClient("serving", lambda: _url(folder, "serving"), folder.token())
    ranks = resolved.sections.fault_tolerance.ranks_per_group
    return BorrowedPlaces(serving, session.owner.attempt, ranks, events)


def _url(folder: RunFolder, role: str) -> str | None:
    address = folder.role(role)
    return address.url if address is not None else None


def _report(resolved: Resolved, outcome: Outcome) -> None:
    folder = resolved.run_folder
    summary = summary_of(resolved, f"{outcome.cause} (exit code {outcome.exit_code:d})")
    if summary.steps or outcome.exit_code == ExitCode.DONE:
        with while_read():
            for line in render(summary, str(folder.path)):
                print(line)
        _save_curve(folder, summary)
    if outcome.exit_code != ExitCode.DONE:
        _say(f"error: {outcome.cause}")
        for line in outcome.detail:
            print(f"    {line}", file=sys.stderr, flush=True)


def _save_curve(folder: RunFolder, summary: Summary) -> None:
    if summary.rewards:
        path = folder.path / "reward.png"
        try:
            save_png(path, summary.reward_steps, summary.rewards, folder.path.name)
        except OSError as e:
            _say(f"warning: no curve: {e}")
            return
        with while_read():
            print(f"{'curve':<11}{path}", flush=True)


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """A full disk: the line is lost, and nothing of it comes to the terminal."""


def _log_to(path: Path) -> logging.Handler:
    """Send this process's log records to a file: the terminal is for progress."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    return handler


def _say(line: str) -> None:
    print(f"torchtitan: {line}", file=sys.stderr, flush=True)
