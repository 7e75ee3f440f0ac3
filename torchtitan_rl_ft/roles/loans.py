"""Places of engines that lost trainer groups borrow (`recovery.standby = "from_rollout"`).

The routes are serving's (docs/architecture.md): what can be spared is decided there.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from torchtitan_rl_ft.observability.events import EventSink, Kind
from torchtitan_rl_ft.roles.standby import NoPlace
from torchtitan_rl_ft.rpc.client import RoleClient, RoleRefused, RoleUnreachable

LEND_TIMEOUT_S = 30.0
RETURN_TIMEOUT_S = 60.0
_ANSWER_S = 5.0


@dataclass(frozen=True)
class Loan:
    slot: int
    devices: tuple[int, ...]  # none on a CPU


class BorrowedPlaces:
    """Borrows a place for each group that a standby is to replace, and returns it."""

    def __init__(self, serving: RoleClient, attempt: str, ranks: int, events: EventSink) -> None:
        """`attempt`: the job that owns the session. `ranks` of a group: devices that it needs."""
        self._serving, self._attempt, self._ranks = serving, attempt, ranks
        self._events = events
        self._loans: dict[str, Loan] = {}

    async def take(self, place: str) -> list[int] | None:
        """Raises NoPlace."""
        if place in self._loans:
            await self._give_back(place)
            raise NoPlace("it has lost its borrowed place, its next start is in its own")
        try:
            answer = await self._post(
                "/v1/lend",
                {"timeout_s": LEND_TIMEOUT_S, "borrower": place, "devices": self._ranks},
                LEND_TIMEOUT_S + _ANSWER_S,
            )
        except (RoleRefused, RoleUnreachable) as e:
            raise NoPlace(f"no engine's place to borrow: {e}") from None
        loan = self._loans[place] = Loan(answer["slot"], tuple(answer["devices"]))
        if loan.devices and len(loan.devices) < self._ranks:
            await self._give_back(place)
            raise NoPlace(
                f"engine-{loan.slot} has {len(loan.devices)} devices, a group takes {self._ranks}"
            )
        return list(loan.devices) or None

    async def settle(self, place: str) -> None:
        """A place without devices is needed no longer once the group trains: nothing of the
        slot's is in use. One with devices stays with the process that computes on them."""
        if (loan := self._loans.get(place)) is not None and not loan.devices:
            await self._give_back(place)

    async def forgo(self, place: str) -> None:
        """The standby has died before it came: the engine is to start again."""
        await self._give_back(place)

    async def _give_back(self, place: str) -> None:
        loan = self._loans[place]
        try:
            await self._post("/v1/return", {"slot": loan.slot}, RETURN_TIMEOUT_S)
        except (RoleRefused, RoleUnreachable) as e:
            # Tried again when the group is lost again; it ends with the job in any case.
            cause = f"engine-{loan.slot} is not returned: {e}"
            self._events.emit(Kind.WARN, cause=cause, subject=place)
        else:
            del self._loans[place]

    async def _post(self, path: str, body: dict[str, Any], deadline_s: float) -> Any:
        body = {**body, "attempt": self._attempt}
        return await asyncio.to_thread(self._serving.post, path, body, deadline_s=deadline_s)
