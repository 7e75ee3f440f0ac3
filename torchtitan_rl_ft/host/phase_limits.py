"""How long a process may be in a phase, and whether one is over that. Pure decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchtitan_rl_ft.host.phase_file import FIRST, ONCE, PhaseRecord

LEARNED_FACTOR = 5.0
"""A learned limit is this many times the longest that was observed."""

LEARNED_FLOOR_S = 10.0
"""No learned limit is shorter: what takes milliseconds is held up by a busy machine for seconds."""

LEARNED_SAMPLES = 5
"""Observations before a phase's limit is learned (of a first step: one)."""

WAIT_MARGIN_S = 60.0
"""Beyond the time in which a waiting process gives up by itself."""

UNLIMITED = float("inf")


@dataclass(frozen=True)
class Limits:
    """Seconds by phase. What a person configured goes before what was learned, that before the
    limits of phases in which waiting is legal, those before `default_s`."""

    default_s: float
    silence_s: float  # without any sign of life, whatever the phase
    waiting_s: Mapping[str, float] = field(default_factory=dict)
    configured_s: Mapping[str, float] = field(default_factory=dict)
    learned_s: Mapping[str, float] = field(default_factory=dict)

    def of(self, key: str) -> tuple[float, str]:
        """(limit of `key`, where it comes from)."""
        for source, name in ((self.configured_s, "configured"), (self.learned_s, "learned")):
            if key in source:
                return source[key], name
        phase = key.removeprefix(FIRST)
        if phase in self.waiting_s:
            return self.waiting_s[phase], "of a wait"
        return self.default_s, "recovery.phase_timeout_s"


def waiting_limits(
    *, batch_wait_timeout_s: float, quorum_timeout_s: float, manager_timeout_s: float
) -> dict[str, float]:
    """Of the phases in which a trainer waits for others and gives up by itself."""
    return {
        "waiting_for_batch": batch_wait_timeout_s + WAIT_MARGIN_S,
        # A heal is part of it, on the manager's own time.
        "quorum": quorum_timeout_s + 2 * manager_timeout_s + WAIT_MARGIN_S,
        "standby": UNLIMITED,
    }


def parse_phase_timeouts(entries: Sequence[str]) -> dict[str, float]:
    """`["reduce=20", "first_forward_backward=120"]`. Raises ValueError that names the entry."""
    found: dict[str, float] = {}
    for entry in entries:
        phase, _, text = entry.partition("=")
        try:
            seconds = float(text)
        except ValueError:
            seconds = 0.0
        if not phase.isidentifier() or not 0 < seconds < UNLIMITED:
            raise ValueError(f"{entry!r} is not PHASE=SECONDS, as in reduce=20")
        found[phase] = seconds
    return found


def calculate(
    longest_s: Mapping[str, float],
    counts: Mapping[str, int],
    *,
    waiting: Mapping[str, float],
    stretch: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Limits learned from what was observed: the longest of each phase times `LEARNED_FACTOR`,
    and `stretch` of it (a limit that has ended a process may have been too short), at least
    `LEARNED_FLOOR_S`. None of a phase in which waiting is legal, however short the waits were, and
    none of a phase that was seen too rarely."""
    found = {}
    for key, seconds in longest_s.items():
        phase = key.removeprefix(FIRST)
        needed = 1 if key.startswith(FIRST) or key in ONCE else LEARNED_SAMPLES
        if phase in waiting or counts.get(key, 0) < needed:
            continue
        factor = LEARNED_FACTOR * (stretch or {}).get(key, 1.0)
        found[key] = round(max(LEARNED_FLOOR_S, seconds * factor), 1)
    return found


@dataclass(frozen=True)
class Observed:
    """What a watcher has seen of one process: its counters, and the seconds in which they did not
    move. Counted by the watcher's own looks, so that a clock that is set, or a watcher that was
    itself held up, accuses nobody."""

    record: PhaseRecord
    still_s: float = 0.0
    silent_s: float = 0.0

    def seen(self, record: PhaseRecord, passed_s: float) -> Observed:
        """After another look, `passed_s` later."""
        moved = record.marks != self.record.marks
        alive = moved or record.beats != self.record.beats
        return Observed(
            record,
            still_s=0.0 if moved else self.still_s + passed_s,
            silent_s=0.0 if alive else self.silent_s + passed_s,
        )


@dataclass(frozen=True)
class Overdue:
    """A process that has to be ended, and why."""

    key: str
    limit_s: float
    origin: str
    reason: str


def judge(observed: Observed, limits: Limits) -> Overdue | None:
    record = observed.record
    if observed.silent_s > limits.silence_s:
        reason = (
            f"no sign of life for {observed.silent_s:.1f} s in phase {record.phase} (limit "
            f"{limits.silence_s:g} s): stopped, or its interpreter is held"
        )
        return Overdue("silence", limits.silence_s, "recovery.rank_silence_timeout_s", reason)
    limit_s, origin = limits.of(record.key)
    if observed.still_s > limit_s:
        reason = (
            f"{observed.still_s:.1f} s in phase {record.phase} without coming forward (limit "
            f"{limit_s:g} s, {origin})"
        )
        return Overdue(record.key, limit_s, origin, reason)
    return None
