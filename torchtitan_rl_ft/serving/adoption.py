"""Which engines of an earlier serving role are taken over. Pure, but for a look at processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torchtitan_rl_ft.serving.engine_records import EngineRecord


@dataclass
class Inheritance:
    """`adopted` by slot; `rejected` with the reason: to be ended."""

    adopted: dict[int, EngineRecord] = field(default_factory=dict)
    rejected: list[tuple[EngineRecord, str]] = field(default_factory=list)


def inherit(records: Iterable[EngineRecord], fingerprints: Mapping[int, str]) -> Inheritance:
    """`fingerprints`: of the engine that each slot would start now. A living engine that fits
    keeps its slot."""
    found = Inheritance()
    for record in records:
        reason = _objection(record, fingerprints)
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
    return None
