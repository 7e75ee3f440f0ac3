"""Which trainer processes live, and what state each holds."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torchtitan_rl_ft.journal.protocol import MemberView, State
from torchtitan_rl_ft.journal.records import Member
from torchtitan_rl_ft.run_folder import ProcessId

LIVE_TTL_S = 10.0


def process_gone(member: Member) -> bool:
    """True when the member ran on this host and its process is no more."""
    if member.host != socket.gethostname():
        return False
    return not ProcessId(member.pid, member.start_time).alive()


@dataclass
class _Entry:
    member: Member
    seen_mono_s: float
    state: State | None = None
    phase: str = ""


class Members:
    """A member lives while it was heard of within `ttl_s` and its process is not known to be
    gone. Safety never rests on this (tokens fence); it decides who waits for whom."""

    def __init__(
        self,
        known: Sequence[Member] = (),
        *,
        ttl_s: float = LIVE_TTL_S,
        mono_s: Callable[[], float] = time.monotonic,
        gone: Callable[[Member], bool] = process_gone,
    ) -> None:
        """`known`: members of an earlier life of the ledger; they get one `ttl_s` to speak."""
        self._ttl_s, self._mono_s, self._gone = ttl_s, mono_s, gone
        self._entries = {m.uuid: _Entry(m, mono_s()) for m in known}

    def __contains__(self, uuid: str) -> bool:
        return uuid in self._entries

    def holds(self, member: Member, state: State, phase: str = "") -> None:
        """The member says for certain what it holds."""
        self._entries[member.uuid] = _Entry(member, self._mono_s(), state, phase)

    def beats(self, member: Member, state: State, phase: str) -> None:
        """A beat from a side thread. It may arrive late, so it never takes a member back."""
        entry = self._entries.get(member.uuid)
        if entry is None or entry.state is None or state.step > entry.state.step:
            self.holds(member, state, phase)
            return
        entry.seen_mono_s, entry.phase = self._mono_s(), phase

    def alive(self, uuid: str) -> bool:
        entry = self._entries.get(uuid)
        if entry is None or self._mono_s() - entry.seen_mono_s > self._ttl_s:
            return False
        return not self._gone(entry.member)

    def living(self) -> frozenset[str]:
        return frozenset(u for u in self._entries if self.alive(u))

    def replica_of(self, uuid: str) -> int:
        """Raises KeyError."""
        return self._entries[uuid].member.replica_id

    def views(self) -> list[MemberView]:
        return [MemberView(u, self.alive(u), e.state) for u, e in self._entries.items()]

    def succeeded_by(self, member: Member) -> list[str]:
        """Drop the members that its process was before (an in-process restart): what they held is
        gone. Returns their uuids."""
        old = [
            uuid
            for uuid, e in self._entries.items()
            if e.member == replace(member, uuid=uuid) and uuid != member.uuid
        ]
        for uuid in old:
            del self._entries[uuid]
        return old

    def forget_dead(self) -> list[str]:
        """Drop the members that do not live; returns their uuids."""
        dead = [u for u in self._entries if not self.alive(u)]
        for uuid in dead:
            del self._entries[uuid]
        return dead

    def status(self) -> list[dict[str, object]]:
        return [
            {
                "uuid": uuid,
                "replica_id": e.member.replica_id,
                "pid": e.member.pid,
                "host": e.member.host,
                "step": e.state.step if e.state else None,
                "token": e.state.token if e.state else None,
                "phase": e.phase,
                "alive": self.alive(uuid),
            }
            for uuid, e in self._entries.items()
        ]
