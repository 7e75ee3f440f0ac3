"""Whose the session is: attach, detach, admission, orphans, time to live.

One job owns a session at a time. It is decided here alone, one request after another, by the
process that serves the session; session.json is the durable form of what was decided.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torchtitan_rl_ft.config.session_identity import differences
from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.observability.events import EventSink, Kind
from torchtitan_rl_ft.run_folder import ProcessId
from torchtitan_rl_ft.serving.admission import Admission
from torchtitan_rl_ft.serving.changes import Changes
from torchtitan_rl_ft.serving.health_times import HealthTimes
from torchtitan_rl_ft.session_folder import (
    HostProcess,
    Owner,
    ServingAt,
    SessionFolder,
    SessionRecord,
    Trainer,
    boot_s,
)

FIRST_PUBLISH = "the trainer of the job has not published its policy yet"
NO_OWNER = "the session belongs to no job"
ORPHANS_END_S = 5.0

Liveness = Callable[[HostProcess], bool | None]


class NotOwner(Exception):
    """The session is not the caller's, or cannot become it; the message says why."""


@dataclass(frozen=True)
class Claim:
    """A job that asks for a session."""

    owner: Owner
    session: str
    rule: str
    frozen: Mapping[str, Any]
    """config/session_identity.py: frozen."""

    retain_ttl_s: float
    health: HealthTimes

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Claim:
        """Raises KeyError, TypeError, ValueError."""
        return cls(
            Owner(**body["owner"]),
            str(body["session"]),
            str(body["rule"]),
            dict(body["frozen"]),
            float(body["retain_ttl_s"]),
            HealthTimes(**body["health"]),
        )


def is_alive(of: HostProcess) -> bool | None:
    return of.alive()


def why_not_attached(
    record: SessionRecord | None, claim: Claim, alive: Liveness = is_alive
) -> str | None:
    """Why `claim` must not have the session, or None: it is free and fits. Pure but for `alive`.

    An owner that lives, or of which nobody can tell, keeps it; and so does another host: what
    engines hold there cannot be taken over, nor ended, from here.
    """
    if record is None:
        return None
    if record.id != claim.session:
        return f"this is session {record.id}, not {claim.session}"
    end = f"`torchtitan stop {record.id}`"
    if record.by_hand and alive(record.serving) is not False:
        return (
            f"session {record.id} is served by a role that was started by hand (process "
            f"{record.serving.pid} on {record.serving.host}): end it first, {end}"
        )
    owner = record.owner
    if owner is not None and owner.attempt != claim.owner.attempt:
        living = alive(owner)
        if living is None:
            return (
                f"session {record.id} belongs to {owner}, and whether that lives cannot be told "
                f"from here: end it there, {end}, or set rollout.session_id to another name"
            )
        if living:
            return (
                f"session {record.id} belongs to {owner}, which is alive: wait for its end, end "
                f"it with {end}, or set rollout.session_id to another name"
            )
    if alive(record.serving) is None:
        return (
            f"session {record.id} was served on {record.serving.host}, and whether its engines "
            f"live cannot be told from here: end it there, {end}, or set rollout.session_id to "
            "another name"
        )
    if changed := differences(record.frozen, claim.frozen):
        return (
            f"session {record.id} was started with another configuration: {'; '.join(changed)}. "
            f"Change it back to go on with the living engines, or end them with {end}"
        )
    return None


class Ownership:
    """The session's state, in one event loop. `me` is the serving process, by its id."""

    def __init__(
        self,
        folder: SessionFolder,
        events: EventSink,
        admission: Admission,
        *,
        alive: Liveness = is_alive,
        clock_boot_s: Callable[[], float] = boot_s,
    ) -> None:
        self.folder, self._events, self._admission = folder, events, admission
        self._alive, self._clock_boot_s = alive, clock_boot_s
        self._lock = asyncio.Lock()
        self._changes = Changes()
        self._record: SessionRecord | None = None
        self.on_handover: Callable[[str], Awaitable[None]] | None = None
        """Told `attempt` of each new owner ("": none) once the trainers of the one before have
        ended."""

    @property
    def record(self) -> SessionRecord:
        assert self._record is not None, "not opened"
        return self._record

    # Start ------------------------------------------------------------------------------

    async def open(self, claim: Claim, serving: ServingAt, *, by_hand: bool) -> str:
        """Take the session up, with the session's lock held: anew, or after a serving process
        that has died. `by_hand`: no job has started us. Returns the run folder that the session
        was in. Raises NotOwner, SessionUnreadable."""
        async with self._lock:
            before = self.folder.read()
            asked = claim
            if by_hand and before is not None:  # a person may; engines that do not fit are ended
                asked = replace(claim, frozen=before.frozen)
            if reason := why_not_attached(before, asked, self._alive):
                raise NotOwner(reason)
            record = before or SessionRecord(claim.session, claim.rule, serving)
            record = replace(record, serving=serving, by_hand=by_hand)
            await self._give(record, None if by_hand else claim.owner, claim)
            return before.run_folder if before is not None else claim.owner.run_folder

    async def ready(self, url: str) -> None:
        async with self._lock:
            await self._put(replace(self.record, serving=replace(self.record.serving, url=url)))

    async def guarded_by(self, warden: ProcessId) -> None:
        async with self._lock:
            await self._put(replace(self.record, warden=warden))

    async def save(self) -> None:
        """Write the record again: somebody has removed it."""
        async with self._lock:
            await self._put(self.record)

    # Jobs -------------------------------------------------------------------------------

    async def attach(self, claim: Claim) -> None:
        """Give the session to `claim`'s job. Again for its owner: nothing. Raises NotOwner."""
        async with self._lock:
            if reason := why_not_attached(self.record, claim, self._alive):
                raise NotOwner(reason)
            if self.record.owner == claim.owner:
                return
            await self._give(self.record, claim.owner, claim)

    async def _give(self, record: SessionRecord, owner: Owner | None, claim: Claim) -> None:
        again = record.owner is not None and owner is not None and record.owner == owner
        orphans = [t for t in record.trainers if owner is None or t.attempt != owner.attempt]
        await self._put(
            replace(
                record,
                owner=owner,
                last_attempt=claim.owner.attempt,
                run_folder=claim.owner.run_folder,
                published=again and record.published,
                frozen=dict(claim.frozen),
                retain_ttl_s=claim.retain_ttl_s,
                unowned_since_boot_s=None,
                trainers=tuple(t for t in record.trainers if t not in orphans),
            )
        )
        await self._end(orphans)
        if not again:
            await self._handed_over()
            self._events.emit(
                Kind.SESSION, phase="attach", cause=f"owned by {claim.owner}", session=record.id
            )

    async def detach(self, attempt: str) -> None:
        """The job lets the session go, to be kept. Again: nothing. Raises NotOwner."""
        async with self._lock:
            self.check_own(attempt)
            if self.record.owner is not None:
                await self._let_go("its job has let it go")

    def check_own(self, attempt: str) -> None:
        """Raises NotOwner unless `attempt` is the owner, or was the last one."""
        if attempt != self.record.last_attempt:
            owner = self.record.owner
            raise NotOwner(f"session {self.record.id} belongs to {owner or 'another, later job'}")

    async def _let_go(self, cause: str) -> None:
        trainers = self.record.trainers
        now = self._clock_boot_s()
        await self._put(
            replace(self.record, owner=None, published=False, unowned_since_boot_s=now, trainers=())
        )
        await self._end(trainers)
        await self._handed_over()
        self._events.emit(
            Kind.SESSION,
            phase="detach",
            cause=cause,
            session=self.record.id,
            retain_ttl_s=self.record.retain_ttl_s,
        )

    async def _handed_over(self) -> None:
        if self.on_handover is not None:
            await self.on_handover(self.attempt)

    @property
    def attempt(self) -> str:
        """That of the owner; empty when there is none."""
        owner = self.record.owner
        return owner.attempt if owner is not None else ""

    def borrower(self, attempt: str | None) -> str:
        """The attempt whose an engine's place becomes that `attempt` (None: not told) borrows.
        Raises NotOwner when it is not the owner's, or there is no owner."""
        self.check_publisher(attempt)
        if self.record.owner is None and not self.record.by_hand:
            raise NotOwner(f"session {self.record.id} belongs to no job")
        return self.attempt

    # Trainers ---------------------------------------------------------------------------

    async def register(self, trainer: Trainer) -> None:
        """Raises NotOwner when its job does not own the session."""
        async with self._lock:
            self.check_publisher(trainer.attempt)
            living = [t for t in self.record.trainers if self._alive(t) is not False]
            if trainer not in living:
                await self._put(replace(self.record, trainers=(*living, trainer)))

    async def _end(self, orphans: tuple[Trainer, ...] | list[Trainer]) -> None:
        """End trainers that their job has left behind on this host."""
        found = [t for t in orphans if self._alive(t)]
        await process.kill_until_gone([t.id for t in found], time.monotonic() + ORPHANS_END_S)
        for trainer in found:
            cause = f"ended {trainer.name} (process {trainer.pid}): its job is gone"
            self._events.emit(Kind.WARN, cause=cause)

    # Publishing -------------------------------------------------------------------------

    def check_publisher(self, attempt: str | None) -> None:
        """Raises NotOwner when `attempt` (None: not told) is not the owner's."""
        owner = self.record.owner
        if attempt is not None and (owner is None or attempt != owner.attempt):
            raise NotOwner(
                f"session {self.record.id} belongs to {owner or 'no job'}, not to the sender's job"
            )

    async def published(self, attempt: str | None) -> None:
        """A policy of `attempt` (None: not told) has been published: admission opens, if that one
        is the owner. It may have lost the session while engines took its policy."""
        async with self._lock:
            owner = self.record.owner
            if owner is None or attempt not in (None, owner.attempt) or self.record.published:
                return
            await self._put(replace(self.record, published=True))

    @property
    def awaits_publish(self) -> str | None:
        """The attempt whose first publish admission waits for."""
        owner = self.record.owner
        return owner.attempt if owner is not None and not self.record.published else None

    # The course of time -----------------------------------------------------------------

    async def watch(self) -> str:
        """Notice the owner's death and the end of the retention; returns why the session is to
        be disposed of."""
        while True:
            record = self.record
            if record.by_hand:
                await self._changes.wait_until(lambda r=record: self.record is not r, 3600.0)
            elif record.owner is not None:
                await self._watch_owner(record, record.owner)
            else:
                assert record.unowned_since_boot_s is not None
                over_s = record.unowned_since_boot_s + record.retain_ttl_s - self._clock_boot_s()
                if over_s <= 0:
                    return f"no job came back within {record.retain_ttl_s:g} s (retain_ttl)"
                await self._changes.wait_until(lambda r=record: self.record is not r, over_s)

    async def _watch_owner(self, record: SessionRecord, owner: Owner) -> None:
        if self._alive(owner) is None:  # not of this host: it has to detach
            await self._changes.wait_until(lambda: self.record is not record, 3600.0)
            return
        gone = asyncio.create_task(process.wait_gone(owner.id))
        other = asyncio.create_task(
            self._changes.wait_until(lambda: self.record.owner != owner, 3600.0)
        )
        try:
            await asyncio.wait({gone, other}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            other.cancel()
        async with self._lock:
            if self.record.owner == owner and not self._alive(owner):
                await self._let_go(f"{owner} has died")

    def dispose(self) -> None:
        """Forget the session once its engines have ended; else that is left to the warden."""
        left = [p for hold in self.folder.engine_holds() for p in hold.processes if p.alive()]
        if not left:
            if self.record.warden is not None:
                process.kill(self.record.warden)
            self.folder.remove()

    # Durable form -----------------------------------------------------------------------

    async def _put(self, record: SessionRecord) -> None:
        """Durable first, then in force."""
        await asyncio.to_thread(self.folder.write, record)
        self._record = record
        if record.by_hand or record.published:
            self._admission.open()
        else:
            self._admission.close(FIRST_PUBLISH if record.owner is not None else NO_OWNER)
        self._changes.notify()

    def status(self) -> dict[str, Any]:
        record = self.record
        left_s = None
        if record.unowned_since_boot_s is not None:
            gone_s = self._clock_boot_s() - record.unowned_since_boot_s
            left_s = round(max(0.0, record.retain_ttl_s - gone_s), 1)
        return {
            "session": record.id,
            "rule": record.rule,
            "owner": None
            if record.owner is None
            else {
                "attempt": record.owner.attempt,
                "pid": record.owner.pid,
                "host": record.owner.host,
                "run_folder": record.owner.run_folder,
                "alive": self._alive(record.owner),
            },
            "by_hand": record.by_hand,
            "admission": self._admission.closed or "open",
            "retain_ttl_s": record.retain_ttl_s,
            "ttl_left_s": left_s,
            "trainers": [{"name": t.name, "pid": t.pid} for t in record.trainers],
        }
