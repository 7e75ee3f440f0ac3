"""A job's hold on its serving session: found, taken over, released or disposed of."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torchtitan_rl_ft.config.debug_mode import DebugMode, debug_mode, journaling
from torchtitan_rl_ft.config.errors import ConfigError
from torchtitan_rl_ft.config.resolve import Resolved
from torchtitan_rl_ft.config.session_identity import frozen, identify
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.roles.role_spec import RoleSpec
from torchtitan_rl_ft.rpc.client import RoleClient, RoleRefused, RoleUnreachable
from torchtitan_rl_ft.run_folder import ProcessId
from torchtitan_rl_ft.serving.engine_process import end_recorded
from torchtitan_rl_ft.serving.engine_records import EngineRecords, RecordsCorrupt
from torchtitan_rl_ft.serving.health_times import HealthTimes
from torchtitan_rl_ft.serving.ownership import Claim, why_not_attached
from torchtitan_rl_ft.session_folder import (
    Owner,
    ServingAt,
    SessionFolder,
    SessionRecord,
    SessionUnreadable,
)
from torchtitan_rl_ft.weights.holder.leftovers import remove_leftovers

SERVING = "serving"

ATTACH_TIMEOUT_S = 10.0
"""A serving role that does not answer within this time is ended and started again; its engines
go on."""

KILL_TIMEOUT_S = 5.0

STOP_SHARE = 0.5
"""Share of the time for a disposal that serving gets to end its engines by itself."""

_POLL_S = 0.05

_NEVER_KEPT = (ExitCode.DONE, ExitCode.CONFIG, ExitCode.NUMERIC)


def retain_ttl_s(resolved: Resolved) -> float:
    """How long an unowned session is kept; in a debug mode it ends with its job."""
    rollout = resolved.sections.rollout
    return rollout.retain_ttl if debug_mode(rollout) is DebugMode.NONE else 0.0


def claim_of(resolved: Resolved, owner: Owner) -> Claim:
    identity = identify(resolved)
    return Claim(
        owner,
        identity.id,
        identity.rule,
        frozen(resolved),
        retain_ttl_s(resolved),
        HealthTimes.of(resolved.sections.rollout),
    )


def kept_after(exit_code: int, resolved: Resolved) -> bool:
    """Whether serving and engines stay for another job after such an end. Pure."""
    if retain_ttl_s(resolved) <= 0:
        return False
    if exit_code == ExitCode.INTERRUPTED:
        return resolved.sections.rollout.keep_serving
    return exit_code not in _NEVER_KEPT


class Session:
    """The session of one job. `serving` is the role of an earlier job, when it was taken over."""

    def __init__(self, resolved: Resolved) -> None:
        self._resolved = resolved
        self.folder = SessionFolder(identify(resolved).id)
        self.owner = Owner.this_process(secrets.token_hex(8), resolved.run_folder.path)
        self.serving: ServingAt | None = None

    @property
    def outlives_job(self) -> bool:
        return retain_ttl_s(self._resolved) > 0

    def take_over(self) -> None:
        """Attach to what an earlier job has left. A serving role that is dead, or does not
        answer, is left to a new one, which adopts the engines.

        Raises ConfigError: the session is another job's, or does not fit. Nothing has changed then.
        """
        claim = claim_of(self._resolved, self.owner)
        try:
            record = self.folder.read()
        except SessionUnreadable as e:
            raise ConfigError(str(e)) from None
        if record is None:
            return
        if self._ended_with_its_job(record):
            self.folder.remove()
            return
        # The same decision as serving's, which counts: here it also covers a dead serving role.
        if reason := why_not_attached(record, claim):
            raise ConfigError(reason)
        if record.serving.alive() and self._attach(record.serving, claim):
            self.serving = record.serving

    def _ended_with_its_job(self, record: SessionRecord) -> bool:
        """A session of another host that cannot have outlived its job, whose run folder is ours
        now: we hold its lock, so that job is dead."""
        elsewhere = record.serving.alive() is None and not record.by_hand
        ours = record.run_folder == str(self._resolved.run_folder.path)
        return elsewhere and ours and record.retain_ttl_s <= 0

    def transport_in_use(self) -> str | None:
        """Of the living serving role that would be taken over; None when there is none that
        tells."""
        try:
            record = self.folder.read()
        except SessionUnreadable:
            return None
        if record is None or not record.serving.alive():
            return None
        client = client_of(self.folder, record.serving)
        try:
            return client.get("/v1/status", deadline_s=ATTACH_TIMEOUT_S).get("transport")
        except (RoleRefused, RoleUnreachable):
            return None
        finally:
            client.close()

    def forget_dead(self) -> None:
        """Remove what a dead session has left on this machine (shared memory, files)."""
        with contextlib.suppress(SessionUnreadable):
            asyncio.run(end_session(self.folder, self._resolved.sections.rollout.cleanup_timeout))

    def token(self) -> str | None:
        """The secret of the serving role that was taken over."""
        return self.folder.token() if self.serving is not None else None

    def role(self, spec: RoleSpec) -> RoleSpec:
        """`spec` as this session needs it."""
        if spec.name != SERVING:
            return spec
        adopt = None
        if self.serving is not None:
            adopt = (self.serving.id, Path(self.serving.log))
        return replace(spec, outlives_parent=self.outlives_job, adopt=adopt)

    def _attach(self, serving: ServingAt, claim: Claim) -> bool:
        """False when the role did not answer; it has been killed then. Raises ConfigError."""
        client = client_of(self.folder, serving)
        try:
            client.post("/v1/attach", asdict(claim), deadline_s=ATTACH_TIMEOUT_S)
            return True
        except RoleRefused as e:
            raise ConfigError(str(e)) from None
        except RoleUnreachable:
            asyncio.run(process.kill_alone_until_gone(serving.id, KILL_TIMEOUT_S))
            return False
        finally:
            client.close()

    def processes(self) -> set[ProcessId]:
        """What of the session lives, while it is ours: serving, engines, warden, and all below
        them."""
        try:
            record = self.folder.read()
            if record is None or record.last_attempt != self.owner.attempt:
                return set()
            return living_processes(self.folder)
        except SessionUnreadable:
            return set()

    def may_be_kept(self, exit_code: int) -> bool:
        """Whether it is to be kept after such an end, and there is a serving role to keep."""
        if not kept_after(exit_code, self._resolved):
            return False
        with contextlib.suppress(SessionUnreadable):
            record = self.folder.read()
            return (
                record is not None and record.owner == self.owner and bool(record.serving.alive())
            )
        return False

    async def release(self, limit_s: float) -> None:
        """Let the session go, to be kept. A serving role that does not answer is killed.

        Raises RoleRefused, RoleUnreachable.
        """
        record = self.folder.read()
        if record is None:
            return
        client = client_of(self.folder, record.serving)
        body = {"attempt": self.owner.attempt, "outcome": "retain"}
        try:
            await asyncio.to_thread(client.post, "/v1/detach", body, deadline_s=0.9 * limit_s)
        except RoleUnreachable:
            # A new one will adopt the engines; until then the warden looks after them.
            await process.kill_alone_until_gone(record.serving.id, KILL_TIMEOUT_S)
            raise
        finally:
            client.close()

    async def dispose(self, limit_s: float) -> None:
        """End all that is left of the session, if it is ours. Raises SessionUnreadable."""
        record = self.folder.read()
        if record is None or record.last_attempt == self.owner.attempt:
            await end_session(self.folder, limit_s)

    def farewell(self) -> list[str]:
        """What a person should know about a session that is kept."""
        record = self.folder.read()
        if record is None:
            return []
        engines = len(self.folder.engine_holds())
        unreplayed = (
            "rollout.journal = false: the batches and prompts of this run cannot be replayed, the "
            "next job goes on from its newest checkpoint alone"
        )
        return [
            f"serving session {self.folder.id} is kept for {record.retain_ttl_s:g} s "
            f"({engines} engines): run the same command with --recovery.auto_continue_train to go "
            f"on with it, or `torchtitan stop {self.folder.id}` to end it",
            *([] if journaling(self._resolved.sections.rollout) else [unreplayed]),
        ]


def living_processes(folder: SessionFolder) -> set[ProcessId]:
    """Raises SessionUnreadable."""
    record = _of_this_host(folder)
    roots = {p for hold in folder.engine_holds() for p in hold.processes}
    if record is not None:
        roots |= _own_roots(record)
    roots = {p for p in roots if p.alive()}
    below = {p for root in roots for p in process.descendants(root)}
    return roots | below


def _of_this_host(folder: SessionFolder) -> SessionRecord | None:
    """Raises SessionUnreadable for another host's: its pids mean nothing here."""
    record = folder.read()
    if record is not None and record.serving.alive() is None:
        raise SessionUnreadable(
            f"session {folder.id} is on host {record.serving.host}: say that there"
        )
    return record


def _own_roots(record: SessionRecord) -> set[ProcessId]:
    roots = {record.serving.id} if record.serving.alive() else set()
    return roots | ({record.warden} if record.warden is not None else set())


@dataclass(frozen=True)
class Ended:
    """What a disposal found alive, and what it could not end."""

    serving: bool
    engines: int
    left: tuple[ProcessId, ...]


async def end_session(folder: SessionFolder, limit_s: float) -> Ended:
    """End serving, engines and warden, remove what they hold, and forget the session. Again:
    nothing. Only processes with a recorded pid *and* start time are touched. A serving role of
    another host is left alone. Raises SessionUnreadable."""
    end = time.monotonic() + limit_s
    record = _of_this_host(folder)
    records = EngineRecords(folder.engines)
    serving = record is not None and bool(record.serving.alive())
    engines = 0
    try:
        engines = sum(r.alive for r in records.read())
    except RecordsCorrupt:
        if not serving:  # else that one knows its engines: it ends them, and the file with them
            raise
    if serving:
        assert record is not None
        process.kill(record.serving.id, signal.SIGTERM)
        await _gone([record.serving.id], time.monotonic() + STOP_SHARE * limit_s)
    roots = _own_roots(record) if record is not None else set()
    left = await process.kill_until_gone(roots, end)
    for engine in records.read():
        await end_recorded(engine, end)
        left += [m for m in engine.members if m.alive()]
    if not left:
        memory = folder.memory()
        folder.remove()
        if memory is not None:
            remove_leftovers(memory.parent)
    return Ended(serving, engines, tuple(left))


async def _gone(targets: Iterable[ProcessId], deadline_mono_s: float) -> None:
    while any(t.alive() for t in targets) and time.monotonic() < deadline_mono_s:
        await asyncio.sleep(_POLL_S)


def client_of(folder: SessionFolder, serving: ServingAt) -> RoleClient:
    token = folder.token() or ""
    return RoleClient("serving", lambda: serving.url or None, token)
