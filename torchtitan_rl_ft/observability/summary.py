"""What a run came to: derived from its events and metrics, shown when it ends."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

from torchtitan_rl_ft.observability.ettr import Ettr
from torchtitan_rl_ft.observability.ettr_text import ettr_rows, outage_lines
from torchtitan_rl_ft.observability.event_data import number
from torchtitan_rl_ft.observability.events import Event, Kind, first_line
from torchtitan_rl_ft.observability.fault_count import FaultCount
from torchtitan_rl_ft.observability.healing import Recovery, recoveries
from torchtitan_rl_ft.observability.life_accounts import LifeAccounts
from torchtitan_rl_ft.observability.lives import last_life, log_notes
from torchtitan_rl_ft.observability.metric_rows import committed_rows
from torchtitan_rl_ft.observability.outage import Outage
from torchtitan_rl_ft.observability.outages import Outages
from torchtitan_rl_ft.observability.reward_curve import terminal_curve
from torchtitan_rl_ft.observability.save_interval import SaveAdvice, advice_lines, save_advice

FIRST_LAST_STEPS = 5
"""Steps over which the first and the last reward are averaged."""


MAX_FAULT_LINES = 8
"""Kinds of faults that the summary lists."""


MAX_RECOVERIES = 3
"""Heals that the summary lists, the last ones."""


@dataclass(frozen=True)
class Summary:
    outcome: str
    steps: int
    total_steps: int
    wall_s: float
    reward_steps: list[int]
    rewards: list[float]
    eval_reward: float | None
    eval_prompts: int
    phase_s: dict[str, float]  # summed time/* metrics, and start-up
    ettr: Ettr | None
    transport: str
    faults: dict[str, int] = field(default_factory=dict)
    dropped: int = 0
    recoveries: list[Recovery] = field(default_factory=list)
    saving: SaveAdvice | None = None
    """Of all lives of the run."""

    outages: list[Outage] = field(default_factory=list)
    """Of all lives of the run."""

    dumps: list[str] = field(default_factory=list)
    """Files of rollout dumps, in the order of their steps."""

    notes: list[str] = field(default_factory=list)
    """What is wrong with the log that all this was read from."""

    @property
    def first_reward(self) -> float | None:
        head = self.rewards[:FIRST_LAST_STEPS]
        return sum(head) / len(head) if head else None

    @property
    def last_reward(self) -> float | None:
        tail = self.rewards[-FIRST_LAST_STEPS:]
        return sum(tail) / len(tail) if tail else None


ETTR_KEEPS_S = 2 * 3600.0
"""What is older is summed up while a run is read: it may have gone on for weeks."""


def summarise(
    events: Iterable[Event],
    metrics: Iterable[Mapping[str, Any]],
    *,
    outcome: str,
    total_steps: int,
    transport: str,
    unread: Sized = (),
) -> Summary:
    """`transport` is the configured one, empty when nothing is published; what serving reported of
    a policy that was trained goes before. `unread`: the lines that were no event, once `events` is
    at its end.
    """
    outages = Outages()
    kept, accounts = _taken(events, outages)
    life = last_life(kept)
    rows = committed_rows(map(_needed, metrics))
    rewarded = [r for r in rows if isinstance(r.get("reward/mean"), int | float)]
    evals = [e for e in life if e.kind is Kind.EVAL and number(e, "reward") is not None]
    settled = accounts.settled()
    ratio = None if settled is None else settled.ettr()
    dumped = [e for e in life if e.kind is Kind.DUMP and {"path", "reward"} <= e.data.keys()]
    dumps = {e.step: e.data for e in dumped if e.step is not None}
    rewards = {int(r["step"]): float(r["reward/mean"]) for r in rewarded}
    if not rows:  # nobody trained
        rewards = {s: d["reward"] for s, d in sorted(dumps.items()) if d["reward"] is not None}
    trained = [e for e in life if e.kind is Kind.PUBLISH and e.step]  # initial weights are a folder
    used = [e.data["transport"] for e in trained if "transport" in e.data]
    return Summary(
        outcome=outcome,
        steps=max((int(r["step"]) for r in rows), default=0),
        total_steps=total_steps,
        wall_s=life[-1].mono_s - life[0].mono_s if life else 0.0,
        reward_steps=list(rewards),
        rewards=list(rewards.values()),
        eval_reward=float(evals[-1].data["reward"]) if evals else None,
        eval_prompts=int(evals[-1].data.get("prompts", 0)) if evals else 0,
        phase_s=_phases(rows, life, ratio),
        ettr=ratio,
        transport=str(used[-1]) if used else transport,
        faults=dict(_faults(life)),
        dropped=sum(e.kind is Kind.DROP for e in life),
        recoveries=recoveries(life),
        saving=save_advice(kept),
        outages=outages.all(),
        dumps=[dumps[step]["path"] for step in sorted(dumps)],
        notes=log_notes(kept, len(unread)),
    )


def _taken(events: Iterable[Event], outages: Outages) -> tuple[list[Event], LifeAccounts]:
    """Accounts of all events, and the events but those of each prompt group, which are nearly all
    of the memory."""
    accounts = LifeAccounts(ETTR_KEEPS_S, ETTR_KEEPS_S, outages)
    kept, last = list[Event](), None
    for event in events:
        accounts.add(event)
        last = event
        if event.kind is not Kind.ACCEPT:
            kept.append(event)
    accounts.rest()
    if last is not None and last.kind is Kind.ACCEPT:  # when the run was last heard of
        kept.append(last)
    return kept, accounts


def _needed(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a summary has of a step."""
    return {k: v for k, v in row.items() if k in _KEYS or k.startswith("time/")}


_KEYS = frozenset({"step", "reward/mean"})


def _phases(
    rows: Sequence[Mapping[str, Any]], life: Sequence[Event], ratio: Ettr | None
) -> dict[str, float]:
    """Of the steps of the last life. A trainer waits for its first batch while engines start: that
    is start-up, not part of the first step."""
    commits = {e.step: e.mono_s for e in life if e.kind is Kind.COMMIT}
    of_life = [row for row in rows if row["step"] in commits]
    sums: dict[str, float] = defaultdict(float)
    for row in of_life:
        for key, value in row.items():
            if key.startswith("time/") and key.endswith("_s") and isinstance(value, int | float):
                sums[key[len("time/") : -len("_s")]] += value
    if ratio is None:
        return dict(sums)
    if of_life:
        first = of_life[0]
        since_start_s = commits[first["step"]] - life[0].mono_s - ratio.startup_s
        early_s = min(
            max(0.0, (first.get("time/step_s") or 0.0) - since_start_s),
            first.get("time/wait_batch_s") or 0.0,
        )
        for key in ("step", "wait_batch"):
            sums[key] -= early_s
    return {"start-up": ratio.startup_s} | dict(sums)


def _faults(life: Sequence[Event]) -> Counter[str]:
    found: Counter[str] = Counter()
    count = FaultCount()
    for event in life:
        subject = str(event.data.get("subject", event.name))
        if count.begins(event.kind, event.phase, subject, event.cause):
            found[f"{subject}: {first_line(event.cause)}"] += 1
        elif event.kind is Kind.REFUSE:
            found["refused commits"] += 1
        elif event.kind is Kind.CHAOS and event.phase == "inject":
            found[f"injected: {event.cause}"] += 1
    return found


def render(summary: Summary, run_folder: str) -> list[str]:
    """The summary as lines of text."""
    lines = ["", *terminal_curve(summary.rewards), ""]
    unit, done = "steps", summary.steps
    trained: list[tuple[str, str]] = [
        ("time", _time_text(summary.phase_s)),
        *ettr_rows(summary.ettr),
        *_rows("earlier", outage_lines(_earlier(summary))),
    ]
    if summary.dumps and not summary.steps:
        unit, done, trained = "rollouts", len(summary.dumps), []
    rows = [
        ("outcome", summary.outcome),
        (unit, f"{done} of {summary.total_steps} in {summary.wall_s:.0f} s"),
        ("reward", _reward_text(summary)),
        ("held-out", _eval_text(summary)),
        *trained,
        *([("transport", summary.transport)] if summary.transport else []),
        ("dropped", f"{summary.dropped} prompt groups or batches"),
        *([("dumps", _dumps_text(summary.dumps))] if summary.dumps else []),
        *_fault_rows(summary.faults),
        *_rows("healed", _recovery_lines(summary.recoveries)),
        *(_rows("saving", advice_lines(summary.saving)) if summary.saving is not None else []),
        ("run folder", run_folder),
        *_rows("note", summary.notes),
    ]
    return lines + [f"{name:<11}{text}" for name, text in rows]


def _earlier(summary: Summary) -> list[Outage]:
    """Outages of the lives before the last one, and what ended these."""
    told = summary.ettr.outages if summary.ettr is not None else []
    of_life = {(o.name, o.began_s) for o in told}
    return [o for o in summary.outages if (o.name, o.began_s) not in of_life]


def _reward_text(summary: Summary) -> str:
    first, last = summary.first_reward, summary.last_reward
    if first is None or last is None:
        return "none: no step was committed"
    n = min(FIRST_LAST_STEPS, len(summary.rewards))
    unit = "steps" if summary.steps else "rollouts"
    return f"{first:.3f} -> {last:.3f} (means of the first and last {n} {unit})"


def _dumps_text(dumps: Sequence[str]) -> str:
    return dumps[0] if len(dumps) == 1 else f"{len(dumps)} files, {dumps[0]} to {dumps[-1]}"


def _eval_text(summary: Summary) -> str:
    if summary.eval_reward is None:
        return "not evaluated"
    return f"{summary.eval_reward:.3f} greedy on {summary.eval_prompts} prompts"


def _time_text(phase_s: Mapping[str, float]) -> str:
    """Start-up, steps, and in brackets what the steps consist of, the longest first."""
    parts = {k: v for k, v in phase_s.items() if k not in ("start-up", "step") and v >= 0.05}
    inside = ", ".join(f"{k} {v:.1f}" for k, v in sorted(parts.items(), key=lambda p: -p[1]))
    text = ", ".join(f"{k} {phase_s[k]:.1f} s" for k in ("start-up", "step") if k in phase_s)
    return (f"{text} ({inside})" if inside else text) or "none"


def _fault_rows(faults: Mapping[str, int]) -> list[tuple[str, str]]:
    """A line per kind of fault, the label on the first."""
    lines = [text if n == 1 else f"{text} (x{n})" for text, n in faults.items()]
    more = len(lines) - MAX_FAULT_LINES
    if more > 0:
        lines[MAX_FAULT_LINES:] = [f"and {more} more, see events.jsonl"]
    return _rows("faults", lines or ["none"])


def _recovery_lines(found: Sequence[Recovery]) -> list[str]:
    more = len(found) - MAX_RECOVERIES
    lines = [recovery.line() for recovery in found[-MAX_RECOVERIES:]]
    return lines + ([f"and {more} more, see events.jsonl"] if more > 0 else [])


def _rows(label: str, lines: Sequence[str]) -> list[tuple[str, str]]:
    """The label on the first line only."""
    return [(label if i == 0 else "", line) for i, line in enumerate(lines)]
