"""Accounts of the last life of a run, of lines in the order of the file, in bounded memory."""

from __future__ import annotations

from torchtitan_rl_ft.observability.ettr import Accounts, Settled
from torchtitan_rl_ft.observability.event_order import InOrder
from torchtitan_rl_ft.observability.events import Event, Kind
from torchtitan_rl_ft.observability.lives import BEGINNINGS
from torchtitan_rl_ft.observability.outages import Outages


class LifeAccounts:
    """Fed event by event; `rest` when no more can come."""

    def __init__(self, keep_s: float, least_s: float, outages: Outages | None = None) -> None:
        """What is older than `keep_s` is summed up, at least `least_s` of it at once: a rewind
        beyond it changes it no more. `outages`: fed as well, with all lives."""
        self._outages = outages
        self._keep_s, self._least_s = keep_s, least_s
        self._order, self._accounts = InOrder(), Accounts()
        self.start_s: float | None = None  # of the life, on the monotonic clock

    def add(self, event: Event) -> None:
        for each in self._order.add(event):
            self._take(each)

    def rest(self) -> None:
        """What was kept back, because older events might have come."""
        for each in self._order.rest():
            self._take(each)

    def settled(self) -> Settled | None:
        """None before the first commit."""
        return self._accounts.settled() if self._accounts.slots.committed_s else None

    def _take(self, event: Event) -> None:
        if self._outages is not None:
            self._outages.add(event)
        if event.kind is Kind.RUN and event.phase in BEGINNINGS:
            self._accounts, self.start_s = Accounts(), event.mono_s
        if self.start_s is None:  # roles that were started by hand
            self.start_s = event.mono_s
        self._accounts.add(event)
        if event.kind is Kind.COMMIT:
            self._accounts.compact(self._keep_s, self._least_s)
