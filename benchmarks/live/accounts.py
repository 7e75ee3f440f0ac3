"""What a finished arm came to: from its events, its journal and the driver's word. Pure but for
`account`, which reads the files."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.live.arms import LOADS, Arm, config_hash
from benchmarks.live.driver import DISCARDED, Ran, Restart
from benchmarks.live.trace import TraceFault
from benchmarks.report import transport_of
from torchtitan_rl_ft.journal.ledger_report import LedgerReport
from torchtitan_rl_ft.observability.ettr import Ettr, measure
from torchtitan_rl_ft.observability.events import Event, Kind, read_events
from torchtitan_rl_ft.observability.lives import lives
from torchtitan_rl_ft.observability.outage import PHASES, Outage
from torchtitan_rl_ft.run_folder import RunFolder

TOO_OLD = "too old"
"""How the reason of such a drop begins (rollout/sealing.py)."""


def account(arm: Arm, trace: Sequence[TraceFault], ran: Ran) -> dict[str, Any]:
    """The arm's entry in the results. Raises ValueError: it is no run of this arm."""
    folder = RunFolder(ran.folder)
    events = list(read_events(folder.events))
    restarts = arm.strategy == "full_restart"
    found = measure(rewound(events) if restarts else events, whole_run=True)
    if found is None or found.steps != arm.steps:
        raise ValueError(
            f"{folder.path}: {found and found.steps} of {arm.steps} steps in its events"
        )
    struck = sum(e.kind is Kind.CHAOS and e.phase == "inject" for e in events)
    if struck != len(trace):
        raise ValueError(f"{folder.path}: {struck} of {len(trace)} faults struck")
    recoveries = restart_phases(events, ran.restarts) if restarts else outage_phases(found.outages)
    return {
        "key": key_of(arm),
        "config_hash": config_hash(arm, trace),
        **asdict(arm),
        "name": arm.name,
        "mode": LOADS[arm.load].mode,
        "transport": transport_of(events),
        "trace": [fault.to_json() for fault in trace],
        "wall_s": found.wall_s,
        "startup_s": found.startup_s,
        "step_s": found.step_s,
        "ettr": figures(found, "ratio"),
        "ettr_after_startup": figures(found, "after_startup"),
        "ettr_fault_free": figures(found, "fault_free"),
        "lost_slot_s": figures(found, "lost_s"),
        "slot_s": found.slot_s,
        "recovery": {role: medians(each) for role, each in recoveries.items()},
        "recovery_s": {
            role: statistics.median(map(back_s, each)) for role, each in recoveries.items()
        },
        "recoveries": {role: len(each) for role, each in recoveries.items()},
        "restarts_of_the_job": len(ran.restarts),
        "samples": samples(arm, LedgerReport.of(folder.journal)),
    }


def key_of(arm: Arm) -> str:
    return f"{arm.load}/{arm.seed}/{arm.name}"


def figures(found: Ettr, field: str) -> dict[str, Any]:
    return {"strict": getattr(found.strict, field), "paper": getattr(found.paper, field)}


def rewound(events: Sequence[Event]) -> list[Event]:
    """Where a life begins behind the tip of the one before, the steps between are superseded: their
    commits do not count, nor the rollouts of their batches, which are rolled out again."""
    found: list[Event] = []
    for life in lives(events):
        steps = [e.step for e in life.events if e.kind is Kind.COMMIT and e.step is not None]
        if found and steps:
            to_step = steps[0] - 1
            tip = max((e.step or 0 for e in found if e.kind is Kind.COMMIT), default=0)
            found = [e for e in found if e.kind is not Kind.COMMIT or (e.step or 0) <= to_step]
            found.append(life.events[0])
            if tip > to_step:
                found.append(_supersede(life.events[0], tip, to_step))
            found += life.events[1:]
        else:
            found += life.events
    return found


def _supersede(begin: Event, from_step: int, to_step: int) -> Event:
    fields = asdict(begin) | {"kind": Kind.SUPERSEDE, "phase": None, "role": "benchmark"}
    fields |= {"name": "benchmark", "data": {"from_step": from_step, "to_step": to_step}}
    fields |= {"cause": DISCARDED}
    return Event(**fields)


def outage_phases(outages: Sequence[Outage]) -> dict[str, list[dict[str, float]]]:
    """Seconds by phase of each injected fault that was recovered from, by role."""
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for outage in outages:
        if outage.injected is not None and outage.done_s is not None:
            found[outage.role].append(outage.phase_s)
    return dict(found)


def restart_phases(
    events: Sequence[Event], restarts: Sequence[Restart]
) -> dict[str, list[dict[str, float]]]:
    """Of each restart of the whole job, in seconds. detect: from the injection until the exit was
    seen; restart: until the new life rolls out, for which its trainers wait; reconnect: until its
    first batch is sealed; redo: until that is committed. Then catch_up: until what was committed
    before is, too."""
    found = []
    lives_s = [-math.inf, *(r.started_mono_s for r in restarts)]
    for restart, life_s in zip(restarts, lives_s, strict=False):
        before = [e for e in events if e.mono_s <= restart.seen_mono_s]
        # Of an exit that nobody ordered nothing is known from before it was seen.
        after = [e for e in events if e.mono_s > restart.started_mono_s]
        hit_s = max(
            (
                e.mono_s
                for e in before
                if e.kind is Kind.CHAOS and e.phase == "inject" and e.mono_s > life_s
            ),
            default=restart.seen_mono_s,
        )
        tip = max((e.step or 0 for e in before if e.kind is Kind.COMMIT), default=0)
        commits = [e for e in after if e.kind is Kind.COMMIT]
        marks_s = (
            hit_s,
            restart.seen_mono_s,
            next((e.mono_s for e in after if _rolls_out(e)), None),
            _first_s(after, Kind.SEAL),
            _first_s(after, Kind.COMMIT),
            next((e.mono_s for e in commits if (e.step or 0) >= tip), None),
        )
        spans_s = [b - a for a, b in itertools.pairwise(s for s in marks_s if s is not None)]
        if len(spans_s) == len(marks_s) - 1:  # else it was hit again before it had come so far
            found.append(dict(zip((*PHASES, "catch_up"), spans_s, strict=True)))
    return {"job": found} if found else {}


def _rolls_out(event: Event) -> bool:
    told = event.kind is Kind.PHASE and (event.name, event.phase) == ("rollout", "rollout")
    return told or event.kind is Kind.SEAL


def _first_s(events: Sequence[Event], kind: Kind) -> float | None:
    return next((e.mono_s for e in events if e.kind is kind), None)


def back_s(phase_s: dict[str, float]) -> float:
    """Until it works again: of a restarted job until its first commit, before it has caught up."""
    return sum(phase_s.values()) - phase_s.get("catch_up", 0.0)


def medians(phases: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(p[name] for p in phases) for name in phases[0]}


def samples(arm: Arm, journal: LedgerReport) -> dict[str, int]:
    """As `torchtitan report --ledger` has it. trained: in the committed history. too_old: dropped
    for the age of their policy, as without faults. lost: dropped for anything else, or missing.
    Raises ValueError: the accounts do not hold."""
    if journal.audit.problems:
        raise ValueError(f"{journal.folder}: {journal.audit.problems}")
    load = LOADS[arm.load]
    dropped = Counter({TOO_OLD: 0, "": 0})
    for reason, groups in journal.audit.dropped.items():
        dropped[TOO_OLD if reason.startswith(TOO_OLD) else ""] += groups * load.samples
    trained = sum(c.samples for c in journal.audit.history)
    missing = abs(arm.steps * load.prompt_groups * load.samples - trained)
    return {"trained": trained, "lost": dropped[""] + missing, "too_old": dropped[TOO_OLD]}
