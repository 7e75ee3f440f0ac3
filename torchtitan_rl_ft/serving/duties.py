"""What each place of a pool is for, and when a replacement may join. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Duty(StrEnum):
    ACTIVE = "active"  # its engine takes versions and requests
    STANDBY = "standby"  # its engine is kept up and idle
    QUARANTINED = "quarantined"  # given up; another slot has taken its place
    EXTERNAL = "external"  # somebody else's engine: never started or ended


TAKES_VERSIONS = frozenset({Duty.ACTIVE, Duty.EXTERNAL})


@dataclass(frozen=True)
class Place:
    """A slot, as the assignment of duties sees it."""

    index: int
    duty: Duty
    lost: bool = False  # had an engine, or should have had one from the start, and has none up
    ready: bool = False  # its engine is up and idle
    usable: bool = True  # not given up
    group: str = "policy"


@dataclass(frozen=True)
class Promotion:
    """The standby slot `promoted` becomes active for `replaced`."""

    replaced: int
    promoted: int


def promotions(places: Sequence[Place]) -> list[Promotion]:
    """Which standby slots take over now: one that is ready for each active slot that lost its
    engine, the lowest first; for a slot that is given up one that still starts will do."""
    standby = [p for p in places if p.duty is Duty.STANDBY and p.usable]
    found = []
    for place in places:
        if place.duty is not Duty.ACTIVE or not (place.lost or not place.usable):
            continue
        fit = [s for s in standby if s.group == place.group and (s.ready or not place.usable)]
        if fit:
            chosen = min(fit, key=lambda s: (not s.ready, s.index))
            standby.remove(chosen)
            found.append(Promotion(place.index, chosen.index))
    return found


@dataclass(frozen=True)
class Boundary:
    """When the replacement of an engine that was lost at version `lost_at` may start and take
    requests (`rollout.refill_start`). `others` counts the active engines that are up, `floor` is
    `rollout.min_engines`: below it nobody waits, or the next version would never come."""

    refill_start: str
    lost_at: int

    def may_start(self, version: int, others: int, floor: int) -> bool:
        return self.refill_start != "before_update" or self._passed(version, others, floor)

    def may_join(self, version: int, others: int, floor: int) -> bool:
        return self.refill_start == "at_once" or self._passed(version, others, floor)

    def _passed(self, version: int, others: int, floor: int) -> bool:
        return version > self.lost_at or others < floor
