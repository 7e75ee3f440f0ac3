"""Whether an engine is alive: decided from what was observed, by pure functions.

Every phase of an engine's life has its own limit:

| phase | limit | why |
|---|---|---|
| STARTING | `start_s` | imports and weights take their time, an exit is noticed elsewhere |
| STARTING, was up before | `install_s` | adopted: it has to answer, nothing more |
| STALE | none | waits for a version that nobody has published yet |
| INSTALLING | `install_s` each try | the installer's own limit; here only what it missed |
| PAUSED, DRAINING | none | cannot generate, by our own wish |
| SERVING, STANDBY | `first_wait_s`, `interval_s`, `timeout_s` | two stages, below |
| SUSPECT | `timeout_s` | checked again soon, until it is cleared or dead |

First stage: a token within the last interval proves life. Second stage: a check, `failures` probes
that start one after the other and share one deadline, `timeout_s` after the first. One answer, or
one token of any request, proves life. When all have failed, the engine is dead, unless its own
figures show that it computes (`computes`): then it has `busy_s` without a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from torchtitan_rl_ft.serving.states import EngineState

PROBED = frozenset({EngineState.SERVING, EngineState.STANDBY, EngineState.SUSPECT})
"""A paused or installing engine cannot answer a probe; a starting one has its own limit."""

BACKSTOP_S = 2.0
"""What the installer may take beyond its own limit before it is taken for stuck."""

SUSPECT_DELAY_S = 1.0
"""From a check of a suspect to the next."""

LONGEST_PASS_S = 300.0
"""SGLang's own limit for one forward pass (--watchdog-timeout): longer silence is no computing."""

BUSY_SHARE = 0.05
"""Share of the time that a scheduler at work is on a CPU, or waits for one, at least. Stopped half
of the time it is 0.5, however busy the machine; hung, stopped or idle it is below 0.01."""

OWN_RUNS = 3
"""Runs of the detokenizer that one probe may cause."""


@dataclass(frozen=True)
class Limits:
    """Seconds, except `failures`: probes that have to fail."""

    first_wait_s: float
    interval_s: float
    timeout_s: float
    failures: int = 2
    start_s: float = 300.0
    install_s: float = 120.0
    busy_s: float = LONGEST_PASS_S

    @property
    def share_s(self) -> float:
        """From one probe of a check to the next."""
        return self.timeout_s / self.failures


@dataclass(frozen=True)
class Figures:
    """What an engine shows of itself without generating anything. SGLang's scheduler publishes
    load figures after each forward pass and about once a second while it is idle."""

    published_s: float  # Unix time of the scheduler's last load figures
    prefilled_tokens: int  # of prompts, since the start
    worked_s: float | None  # its schedulers were on a CPU or waiting for one; None: not known
    detokenized: int | None = None  # how often its detokenizer was at work; None: not known


@dataclass(frozen=True)
class Observation:
    """An engine between checks."""

    state: EngineState
    in_state_s: float  # since its last move
    watched_s: float  # since it came up, or was resumed
    progress_s: float  # since the last token, or answered probe
    checked_s: float  # since the last check ended
    was_up: bool = False  # adopted, and had come up before


class Health(StrEnum):
    UNWATCHED = "unwatched"  # not judged in this state, or not yet
    CHECK = "check"  # nothing proves life: probe it
    ALIVE = "alive"
    BUSY = "busy"  # silent, but computing
    DEAD = "dead"


@dataclass(frozen=True)
class Verdict:
    """`again_s`: when to look again if nothing changes before."""

    health: Health
    reason: str
    again_s: float = float("inf")


def judge(seen: Observation, limits: Limits) -> Verdict:
    """First stage, and the limits of phases that are not probed."""
    match seen.state:
        case EngineState.STARTING if seen.was_up:
            limit_s = min(limits.start_s, limits.install_s)
            why = f"was up, and did not answer within {limit_s:g} s (install_timeout_s)"
            return _within(seen.in_state_s, limit_s, why)
        case EngineState.STARTING:
            why = f"did not come up within {limits.start_s:g} s (engine_start_timeout_s)"
            return _within(seen.in_state_s, limits.start_s, why)
        case EngineState.INSTALLING:
            why = f"an install did not end within {limits.install_s:g} s (install_timeout_s)"
            return _within(seen.in_state_s, limits.install_s + BACKSTOP_S, why)
        case EngineState.SUSPECT:
            if seen.checked_s < SUSPECT_DELAY_S:
                again_s = SUSPECT_DELAY_S - seen.checked_s
                return Verdict(Health.UNWATCHED, "checked just now", again_s)
            return Verdict(Health.CHECK, "suspect")
        case EngineState.SERVING | EngineState.STANDBY:
            return _first_stage(seen, limits)
        case _:
            return Verdict(Health.UNWATCHED, f"{seen.state} engines are not probed")


def _within(spent_s: float, limit_s: float, why: str) -> Verdict:
    if spent_s >= limit_s:
        return Verdict(Health.DEAD, why)
    return Verdict(Health.UNWATCHED, "within its limit", limit_s - spent_s)


def _first_stage(seen: Observation, limits: Limits) -> Verdict:
    first_s = limits.first_wait_s - seen.watched_s
    if first_s > 0:
        return Verdict(Health.UNWATCHED, f"up for {seen.watched_s:.3g} s only", first_s)
    due_s = limits.interval_s - min(seen.progress_s, seen.checked_s)
    if due_s > 0:
        return Verdict(Health.ALIVE, f"a sign of life {seen.progress_s:.3g} s ago", due_s)
    return Verdict(Health.CHECK, f"no token progress for {seen.progress_s:.3g} s")


def conclude(failures: Sequence[str], silent_s: float, computing: str, limits: Limits) -> Verdict:
    """After a check whose probes all failed, without a token meanwhile. `silent_s`: since the
    last token or answered probe; `computing`: what `computes` said."""
    plural = "s" if len(failures) != 1 else ""
    counted = f"{len(failures)} probe{plural} failed: {'; '.join(dict.fromkeys(failures))}"
    if computing and silent_s < limits.busy_s:
        return Verdict(Health.BUSY, f"{counted}; {computing}")
    return Verdict(Health.DEAD, f"no token progress for {silent_s:.3g} s, {counted}")


def computes(before: Figures | None, after: Figures | None, elapsed_s: float, probes: int) -> str:
    """How the engine's own figures, `elapsed_s` apart, show that it computes; empty when they do
    not. `probes`: prompt tokens that our probes may have added.

    Either prompts are being read, pass after pass; or its scheduler is at work inside one pass; or
    passes end and their tokens are made text, too few yet for a message of the stream. Work alone
    is no proof: a scheduler whose detokenizer hangs goes on generating tokens that never arrive,
    and one without --sleep-on-idle polls; both finish passes.
    """
    if before is None or after is None:
        return ""
    prefilled = after.prefilled_tokens - before.prefilled_tokens
    if prefilled > probes:
        return f"read {prefilled} prompt tokens in {elapsed_s:.3g} s"
    if before.worked_s is None or after.worked_s is None:
        return ""
    share = (after.worked_s - before.worked_s) / elapsed_s
    if share < BUSY_SHARE:
        return ""
    if after.published_s == before.published_s:
        return f"its scheduler is inside one forward pass, at work {share:.0%} of the time"
    detokenized = (after.detokenized or 0) - (before.detokenized or 0)
    if detokenized > OWN_RUNS * probes:
        return f"it generates slowly: {detokenized} runs of its detokenizer in {elapsed_s:.3g} s"
    return ""
