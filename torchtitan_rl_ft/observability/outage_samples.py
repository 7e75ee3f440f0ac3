"""Which samples each fault cost: lost for good, or trained or rolled out again."""

from __future__ import annotations

from torchtitan_rl_ft.observability.event_data import dropped, issued, subject, whole, wholes
from torchtitan_rl_ft.observability.events import Event, Kind
from torchtitan_rl_ft.observability.outage import Outage

OWN_DROPS = ("filter", "prompt too long")
"""Reasons for which a group is dropped without any fault."""


class Samples:
    """Which samples a fault cost, from what is told of groups and batches."""

    def __init__(self) -> None:
        self._of_step: dict[int, int] = {}  # samples of its batch
        self._of_batch: dict[int, int] = {}
        self._in_flight: set[int] = set()  # prompt groups
        self._per_group = 0
        self._refused: set[int] = set()  # batches, since the last commit
        self._moved: dict[str, int] = {}  # samples begun again elsewhere, by engine

    def add(self, event: Event, open_: list[Outage]) -> None:
        newest = max(open_, key=lambda o: o.began_s, default=None)
        match event.kind:
            case Kind.ISSUE:
                self._in_flight.update(issued(event))
            case Kind.ACCEPT:
                self._in_flight.difference_update(dropped(event))
            case Kind.SEAL:
                self._sealed(event)
            case Kind.COMMIT:
                self._refused.clear()
            case Kind.REFUSE if (batch := whole(event, "batch")) is not None:
                hit = [o for o in open_ if o.role == "trainer"]
                if batch not in self._refused and hit:
                    hit[-1].samples_replayed += self._of_batch.get(batch, 0)
                self._refused.add(batch)
            case Kind.SUPERSEDE if newest is not None:
                to_step, from_step = whole(event, "to_step"), whole(event, "from_step")
                redone = range((to_step or 0) + 1, (from_step or 0) + 1)
                newest.samples_replayed += sum(self._of_step.get(s, 0) for s in redone)
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
            outage.samples_replayed += sum(self._of_batch.get(b, 0) for b in self._refused)
            if step is not None and not self._refused:
                outage.samples_replayed += self._of_step.get(step, 0)

    def serves(self, engine: str) -> None:
        self._moved.pop(engine, None)

    def _sealed(self, event: Event) -> None:
        samples = whole(event, "samples") or 0
        if (batch := whole(event, "batch")) is not None:
            self._of_batch[batch] = samples
        if event.step is not None:
            self._of_step[event.step] = samples
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
        if newest is not None and not str(event.cause).startswith(OWN_DROPS):
            newest.samples_lost += self._per_group * len(groups)
