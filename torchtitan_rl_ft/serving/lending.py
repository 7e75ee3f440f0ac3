"""The place of an engine becomes a trainer's for a while.

A loan is durable before its engine is touched, and its end before an engine is started there
again: whatever dies in between, no two processes get one place. It ends with the job that has it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan_rl_ft.observability.events import Kind
from torchtitan_rl_ft.serving.duties import TAKES_VERSIONS, Duty
from torchtitan_rl_ft.serving.loans import Loan, Loans
from torchtitan_rl_ft.serving.shared import Shared
from torchtitan_rl_ft.serving.slot import Slot


class NotLent(Exception):
    """No place can be lent; the message says why."""


@dataclass(frozen=True)
class Candidate:
    """A slot, as the choice sees it."""

    index: int
    duty: Duty
    lendable: bool
    """Its engine is ours, answers alone, and takes the policy's versions; the slot is in use, not
    lent, and has the devices that are wanted."""

    live: bool
    """It has an engine that is up."""

    in_flight: int = 0


def choose(candidates: Sequence[Candidate], floor: int) -> int:
    """Whose place to lend: a standby's, then that of an active slot whose engine is not up, then
    the one with the fewest samples in flight; the highest slot among equals. At least `floor`
    engines that are up stay active. Raises NotLent."""
    fit = [c for c in candidates if c.lendable]
    if not fit:
        raise NotLent("no engine of this pool has a place that can be lent")
    up = {c.index for c in candidates if c.live and c.duty in TAKES_VERSIONS}
    spared = [c for c in fit if c.duty is Duty.STANDBY or len(up - {c.index}) >= floor]
    if not spared:
        raise NotLent(f"{len(up)} engines are up, and rollout.min_engines is {floor}")
    chosen = min(spared, key=lambda c: (c.duty is Duty.ACTIVE, c.live, c.in_flight, -c.index))
    return chosen.index


class Lending:
    """The loans of one pool, in its event loop."""

    def __init__(self, slots: Sequence[Slot], shared: Shared, loans: Loans) -> None:
        self._slots, self._shared, self._loans = slots, shared, loans

    async def lend(self, attempt: str, borrower: str, timeout_s: float, devices: int = 0) -> int:
        """The slot whose place, of at least so many `devices` where there are any, is the
        borrower's from now on: its engine has ended. What it was doing for at most `timeout_s`
        more goes on at the others. Raises NotLent, OSError."""
        slot = self._lent_to(attempt, borrower)
        if slot is None:
            slot = self._choose(devices)
            await self._grant(slot, Loan(slot.index, attempt, borrower), timeout_s)
        loan = slot.loan
        await self._shared.changes.wait_until(
            lambda: slot.engine is None or slot.loan is not loan, math.inf
        )
        if slot.loan is not loan:
            raise NotLent(f"{slot.name} was taken back meanwhile")
        return slot.index

    async def _grant(self, slot: Slot, loan: Loan, timeout_s: float) -> None:
        slot.lend(loan)  # nobody else gets it meanwhile
        try:
            await asyncio.to_thread(self._loans.put, loan)
        except OSError:
            slot.take_back()
            raise
        cause = f"its place is lent to {loan}"
        self._shared.events.emit(Kind.LEND, phase="lend", cause=cause, subject=slot.name)
        slot.vacate(cause, timeout_s)

    def _lent_to(self, attempt: str, borrower: str) -> Slot | None:
        """What a repeated request has been granted before."""
        held = (s for s in self._slots if s.loan is not None and borrower)
        return next((s for s in held if s.loan == Loan(s.index, attempt, borrower)), None)

    def _choose(self, devices: int) -> Slot:
        """Raises NotLent."""
        rollout = self._shared.rollout
        if rollout.placement == "colocated":
            raise NotLent('rollout.placement is "colocated": engines share the trainers\' devices')
        candidates = [self._candidate(s, devices) for s in self._slots]
        return self._slots[choose(candidates, rollout.min_engines)]

    def _candidate(self, slot: Slot, devices: int) -> Candidate:
        engine, plan = slot.engine, slot.plan
        usable = slot.duty in (Duty.ACTIVE, Duty.STANDBY) and slot.given_up is None
        alone = plan.takes_versions and plan.group.role == "regular"
        return Candidate(
            slot.index,
            slot.duty,
            usable and alone and slot.loan is None and self._has(slot, devices),
            plan.takes_versions and engine is not None and engine.live,
            engine.in_flight if engine is not None else 0,
        )

    def _has(self, slot: Slot, devices: int) -> bool:
        own = self._shared.launcher.devices(slot.index)
        return not own or len(own) >= devices

    async def give_back(self, index: int, cause: str = "returned") -> None:
        """Have an engine started in the slot again; nothing when it is not lent. Raises NotLent
        when there is no such slot, OSError."""
        if not 0 <= index < len(self._slots):
            raise NotLent(f"there is no slot {index}")
        slot = self._slots[index]
        loan = slot.loan
        if loan is None:
            return
        await asyncio.to_thread(self._loans.remove, loan)
        if slot.loan is not loan:  # somebody else was as quick
            return
        self._shared.events.emit(Kind.LEND, phase="return", cause=cause, subject=slot.name)
        slot.take_back()

    async def reclaim(self, attempt: str) -> None:
        """Take back what another job than `attempt` has. Its trainers have ended."""
        for slot in self._slots:
            if slot.loan is not None and slot.loan.attempt != attempt:
                await self.give_back(slot.index, "the job that had it is gone")
