"""Which engines of an earlier serving role are taken over. Pure, but for a look at processes."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torchtitan_rl_ft.serving.duties import Duty
from torchtitan_rl_ft.serving.engine_records import EngineRecord, Memory
from torchtitan_rl_ft.serving.groups import SlotPlan

LENT = "its place is lent"


@dataclass
class Inheritance:
    """`adopted` by slot; `rejected` with the reason: to be ended."""

    adopted: dict[int, EngineRecord] = field(default_factory=dict)
    rejected: list[tuple[EngineRecord, str]] = field(default_factory=list)
    memory_lent: bool = False
    """The trainer may have the memory of colocated engines."""


def inherit(
    records: Iterable[EngineRecord],
    fingerprints: Mapping[int, str],
    lent: Container[int] = (),
) -> Inheritance:
    """`fingerprints`: of the engine that each slot would start now. A living engine that fits
    keeps its slot, unless that is `lent`."""
    found = Inheritance()
    for record in records:
        reason = LENT if record.slot in lent else _objection(record, fingerprints)
        found.memory_lent |= record.memory is not Memory.HELD
        if reason is None:
            found.adopted[record.slot] = record
        else:
            found.rejected.append((record, reason))
    return found


def _objection(record: EngineRecord, fingerprints: Mapping[int, str]) -> str | None:
    if not record.alive:
        return "it has ended meanwhile"
    if record.slot not in fingerprints:
        return "there is no such slot any more"
    if record.fingerprint != fingerprints[record.slot]:
        return "it would be started with another command line now"
    if record.memory is Memory.RELEASING:
        return "it was giving its memory up, and whether it has cannot be told"
    return None


def inherited_duties(
    plans: Sequence[SlotPlan], adopted: Mapping[int, EngineRecord]
) -> dict[int, Duty]:
    """The duty of each slot: as many active and standby ones in each group as planned. An adopted
    engine keeps the duty that it had, as far as that goes."""
    found = {p.slot: p.duty for p in plans}
    movable = [p for p in plans if p.duty in (Duty.ACTIVE, Duty.STANDBY)]

    def last_to_stand_by(plan: SlotPlan) -> tuple[int, bool, int]:
        record = adopted.get(plan.slot)
        had = 1 if record is None else 0 if record.duty == Duty.STANDBY else 2
        return had, plan.duty is not Duty.STANDBY, plan.slot

    for group in {p.group.name for p in movable}:
        own = sorted((p for p in movable if p.group.name == group), key=last_to_stand_by)
        standby = sum(p.duty is Duty.STANDBY for p in own)
        found |= {p.slot: Duty.STANDBY if i < standby else Duty.ACTIVE for i, p in enumerate(own)}
    return found
