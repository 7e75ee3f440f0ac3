"""Duties of the ledger: what one process does for all (publish, save), under a lease.

Who holds a duty and whether it is done is durable (the journal's table); leases and offers are
of this life of the ledger.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torchtitan_rl_ft.journal.members import Members
from torchtitan_rl_ft.journal.protocol import PUBLISH, DutyView, State
from torchtitan_rl_ft.journal.store import Journal

LEASE_S = 60.0
OFFER_AGAIN_S = 5.0  # a duty that was offered cuts the same member's long poll no sooner

DutyKey = tuple[str, State, int]  # kind, state, era


class Lease(NamedTuple):
    holder: str
    until_mono_s: float


class Duties:
    """Holders, leases and offers. Who may hold a duty is decided in protocol.py."""

    def __init__(
        self, journal: Journal, members: Members, *, lease_s: float, mono_s: Callable[[], float]
    ) -> None:
        self._journal, self._members = journal, members
        self._lease_s, self._mono_s = lease_s, mono_s
        self._opened_mono_s = mono_s()
        self._leases: dict[DutyKey, Lease] = {}
        self._offered: dict[tuple[str, State], float] = {}

    def view(self, kind: str, state: State) -> DutyView | None:
        """The duty as the rules see it; None: nobody has held it."""
        key = self._key(kind, state)
        row = self._journal.duty(*key)
        if row is None:
            return None
        holder, done = row
        lease = self._leases.get(key)
        # A holder known from an earlier life of the ledger gets one whole lease.
        until = lease.until_mono_s if lease else self._opened_mono_s + self._lease_s
        return DutyView(holder, self._members.alive(holder), until - self._mono_s(), done)

    def grant(self, kind: str, state: State, uuid: str) -> None:
        """`uuid` holds the duty from now on, for one lease."""
        key = self._key(kind, state)
        known = self._journal.duty(*key)
        if known is None or known[0] != uuid:
            self._journal.grant_duty(*key, uuid)
        now = self._mono_s()
        self._leases = {k: v for k, v in self._leases.items() if v.until_mono_s > now}
        self._leases[key] = Lease(uuid, now + self._lease_s)

    def finish(self, kind: str, state: State, uuid: str) -> None:
        key = self._key(kind, state)
        self._journal.finish_duty(*key, uuid)
        self._leases.pop(key, None)

    def reopen(self, kind: str, state: State) -> None:
        """It is due again, if it was done."""
        if (duty := self.view(kind, state)) is not None and duty.done:
            self._journal.reopen_duty(*self._key(kind, state))

    def renew(self, uuid: str) -> None:
        """A beat of a holder."""
        until = self._mono_s() + self._lease_s
        for key, lease in self._leases.items():
            if lease.holder == uuid:
                self._leases[key] = Lease(uuid, until)

    def offer(self, uuid: str, state: State) -> bool:
        """Whether a duty of `state` may be offered to `uuid` again; from now on it was."""
        now = self._mono_s()
        if now - self._offered.get((uuid, state), -OFFER_AGAIN_S) < OFFER_AGAIN_S:
            return False
        self._offered = {k: t for k, t in self._offered.items() if k[1] == state}
        self._offered[uuid, state] = now
        return True

    def in_hand(self, kind: str) -> set[State]:
        """States for which somebody holds a duty of this kind."""
        return {state for held, state, _ in self._leases if held == kind}

    def _key(self, kind: str, state: State) -> DutyKey:
        """After a rewind the same state is published anew: serving holds a later policy. A
        saved checkpoint stays saved."""
        return kind, state, self._journal.era if kind == PUBLISH else 0
