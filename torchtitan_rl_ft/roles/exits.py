"""Early ends of a job: what the configuration says, and what SIGTERM means to the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable

from torchtitan_rl_ft.config.resolve import Resolved
from torchtitan_rl_ft.journal.exits import AUTORESUME_FILE, ExitNote, ExitRules, Exits, RequestFile
from torchtitan_rl_ft.rpc.client import RoleClient, RoleRefused, RoleUnreachable
from torchtitan_rl_ft.run_folder import ProcessId, RunFolder
from torchtitan_rl_ft.session_folder import Owner, boot_s

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 5.0
ASK_AGAIN_S = 1.0

HURRY_SHARE = 0.5
"""Share of rollout.cleanup_timeout that a save still gets after a second SIGTERM."""

SAME_SIGNAL_S = 2.0
"""SIGTERM again so soon is the same one: schedulers signal a process and also its group."""


class GracefulExit:
    """Asks the ledger on behalf of the supervisor, until the run ends or the time is over."""

    def __init__(
        self,
        ask: Callable[[str, float], object],
        *,
        limit_s: float,
        hurry_limit_s: float,
        mono_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ask(reason, timeout_s)` blocks; it raises RoleUnreachable, RoleRefused. `limit_s`: how
        long the way to a step boundary and the save may take; `hurry_limit_s`: after a second
        SIGTERM."""
        self._ask = ask
        self._limit_s, self._hurry_limit_s, self._mono_s = limit_s, hurry_limit_s, mono_s
        self._asked_mono_s: float | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def asked(self) -> bool:
        return self._asked_mono_s is not None

    def on_sigterm(self, give_up: Callable[[str], None]) -> None:
        """The first one asks, a second one hurries; `give_up(why)` when the time is over."""
        loop, now_s = asyncio.get_running_loop(), self._mono_s()
        if self._asked_mono_s is None:
            self._asked_mono_s = now_s
            self._task = loop.create_task(self._keep_asking())
            self._set_timer(self._limit_s, "no step boundary within", give_up)
        elif now_s - self._asked_mono_s > SAME_SIGNAL_S:
            self._set_timer(self._hurry_limit_s, "SIGTERM again, and not saved within", give_up)

    def _set_timer(self, limit_s: float, why: str, give_up: Callable[[str], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(limit_s, give_up, f"{why} {limit_s:g} s")

    async def _keep_asking(self) -> None:
        """A ledger that is restarted has forgotten."""
        while True:
            try:
                await asyncio.to_thread(self._ask, "SIGTERM to the supervisor", ASK_TIMEOUT_S)
            except (RoleUnreachable, RoleRefused) as e:
                logger.warning("the ledger does not hear that the run is to stop: %s", e)
            await asyncio.sleep(ASK_AGAIN_S)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task


def graceful_exit(resolved: Resolved, token: str) -> GracefulExit | None:
    """None without `recovery.exit_signal_handler`: SIGTERM is the end at once."""
    sections, folder = resolved.sections, resolved.run_folder
    if not sections.recovery.exit_signal_handler:
        return None

    def url() -> str | None:
        role = folder.role("rollout")
        return role.url if role is not None and role.alive() else None

    client = RoleClient("rollout", url, token)
    return GracefulExit(
        lambda reason, timeout_s: client.post(
            "/v1/ledger/exit", {"reason": reason}, deadline_s=timeout_s
        ),
        limit_s=sections.recovery.batch_wait_timeout_s,
        hurry_limit_s=HURRY_SHARE * sections.rollout.cleanup_timeout,
    )


def note_of(folder: RunFolder, owner: Owner | None, name: str = "exit.json") -> ExitNote | None:
    """Where the ledger's decision is kept; None for a ledger that no job has started."""
    return None if owner is None else ExitNote(folder.path / name, owner.attempt)


def exits_of(resolved: Resolved) -> Exits:
    """For the ledger of this process. Time counts from the start of the job's supervisor or, in a
    role that was started by hand, of this process."""
    sections, folder = resolved.sections, resolved.run_folder
    owner = Owner.from_environment()
    here = owner is not None and owner.host == socket.gethostname()
    started_s = owner.start_time if owner is not None and here else ProcessId.current().start_time
    request = None
    if sections.recovery.adlr_autoresume:
        request = RequestFile(folder.path / (sections.recovery.autoresume_file or AUTORESUME_FILE))
    return Exits(
        ExitRules.of(sections.recovery, sections.fault_tolerance.min_replica_size),
        elapsed_s=lambda: boot_s() - started_s,
        request=request,
        note=note_of(folder, owner),
    )


def reason_of(folder: RunFolder, owner: Owner) -> str | None:
    """Why and where the ledger has stopped this job."""
    note = note_of(folder, owner)
    found = note.read() if note is not None else None
    return None if found is None else f"stopped after step {found[0]} ({found[1]}): start it again"
