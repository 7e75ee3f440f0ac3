"""Which samples each fault cost: lost for good, or trained or rolled out again."""

from __future__ import annotations

from torchtitan_rl_ft.observability.event_data import (
    dropped,
    issued,
    moved_up,
    subject,
    whole,
    wholes,
)
from torchtitan_rl_ft.observability.events import Event, Kind
from torchtitan_rl_ft.observability.outage import Outage

OWN_DROPS = ("filter", "prompt too long")
"""Reasons for which a group is dropped without any fault."""


class Samples:
    """Which samples a fault cost, from what is told of groups and batches."""

    def __init__(self) -> None:
        self._batch: dict[int, int] = {}  # by step
        self._of_batch: dict[int, int] = {}
        self._in_flight: set[int] = set()  # prompt groups
        self._per_group = 0
        self._tip = 0  # the last committed step
        self._refused: set[int] = set()  # batches since the last commit, of no outage yet
        self._charged: set[int] = set()  # batches since then that are trained again for an outage
        self._moved: dict[str, int] = {}  # samples begun again elsewhere, by engine

    def add(self, event: Event, open_: list[Outage]) -> None:
        """`open_`: those that last, in the order in which they began."""
        newest = open_[-1] if open_ else None
        match event.kind:
            case Kind.ISSUE:
                self._in_flight.update(issued(event))
            case Kind.ACCEPT:
                self._in_flight.difference_update(dropped(event))
            case Kind.SEAL:
                self._sealed(event)
            case Kind.COMMIT:
                self._tip = self._tip if event.step is None else event.step
                self._refused.clear()
                self._charged.clear()
            case Kind.REFUSE if (batch := whole(event, "batch")) is not None:
                hit = [o for o in open_ if o.role == "trainer"]
                if hit:
                    self._charge(hit[-1], batch)
                elif batch not in self._charged:
                    self._refused.add(batch)
            case Kind.SUPERSEDE:
                self._supersede(event, newest)
            case Kind.MOVE if not whole(event, "tokens"):
                self._move(subject(event), whole(event, "samples") or 0, open_)
            case Kind.PARTIAL if event.phase == "resume" and whole(event, "tokens"):
                for outage in open_:
                    if outage.role == "rollout":
                        left = outage.samples_replayed - self._per_group
                        outage.samples_replayed = max(0, left)
            case Kind.DROP:
                self._drop(event, newest)
            case _:
                pass

    def hit(self, outage: Outage, step: int | None) -> None:
        """It has just begun. `step`: what a trainer was working on."""
        if outage.role == "rollout":
            outage.samples_replayed += self._per_group * len(self._in_flight)
        elif outage.role == "engine":
            outage.samples_replayed += self._moved.pop(outage.name, 0)
        elif outage.role == "trainer":
            for batch in self._refused:
                self._charge(outage, batch)
            self._refused.clear()
            if step is not None and step > self._tip and step in self._batch:
                self._charge(outage, self._batch[step])

    def serves(self, engine: str) -> None:
        self._moved.pop(engine, None)

    def _charge(self, outage: Outage, batch: int) -> None:
        """The batch is trained again: told once, by its refusals or by the loss of a group."""
        if batch not in self._charged:
            self._charged.add(batch)
            outage.samples_replayed += self._of_batch.get(batch, 0)

    def _supersede(self, event: Event, newest: Outage | None) -> None:
        to_step, from_step = whole(event, "to_step"), whole(event, "from_step")
        if to_step is None or from_step is None:
            return
        self._tip = to_step
        if newest is not None:
            again = (b for s, b in self._batch.items() if to_step < s <= from_step)
            newest.samples_replayed += sum(self._of_batch.get(b, 0) for b in again)

    def _sealed(self, event: Event) -> None:
        samples = whole(event, "samples") or 0
        if (batch := whole(event, "batch")) is not None:
            self._of_batch[batch] = samples
            if event.step is not None:
                self._batch[event.step] = batch
        if groups := wholes(event, "groups"):
            self._per_group = samples // len(groups)

    def _move(self, engine: str, samples: int, open_: list[Outage]) -> None:
        for outage in open_:
            if outage.name == engine:
                outage.samples_replayed += samples
                return
        self._moved[engine] = self._moved.get(engine, 0) + samples

    def _drop(self, event: Event, newest: Outage | None) -> None:
        groups = dropped(event)
        self._in_flight.difference_update(groups)
        if whole(event, "batch") is not None and event.step is not None:
            self._batch = moved_up(self._batch, event.step)
        if newest is not None and not str(event.cause).startswith(OWN_DROPS):
            newest.samples_lost += self._per_group * len(groups)
