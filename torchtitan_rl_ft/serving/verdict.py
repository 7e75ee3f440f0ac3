"""Whether an engine is alive: decided from what was observed, by a pure function."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from torchtitan_rl_ft.serving.states import EngineState

PROBED = frozenset({EngineState.SERVING, EngineState.SUSPECT})
"""A paused or installing engine cannot answer a probe; a starting one has its own limit."""


@dataclass(frozen=True)
class ProbeLimits:
    """Seconds, except `failures`: failed probes in a row that mean death."""

    first_wait_s: float
    interval_s: float
    timeout_s: float
    failures: int = 2


@dataclass(frozen=True)
class Observation:
    """`probe` is None when none was made, "" when it was answered, else what went wrong."""

    state: EngineState
    watched_s: float  # since it began to serve
    progress_s: float  # since the last finished answer
    failures: int  # failed probes in a row before this one
    probe: str | None = None
    doubt_s: float = 0.0  # since the first probe of the failed row, this one included, began


class Health(StrEnum):
    UNWATCHED = "unwatched"  # not judged in this state, or not yet
    PROBE = "probe"  # nothing proves life: ask it
    ALIVE = "alive"
    DOUBTFUL = "doubtful"  # no requests, ask again at once
    DEAD = "dead"


def judge(seen: Observation, limits: ProbeLimits, *, asked: bool = False) -> tuple[Health, str]:
    """The verdict and its reason. `asked`: somebody wants to know now, whatever the waits.

    First stage: an answer within the last interval proves life. Second stage: the probe.
    """
    if seen.state not in PROBED:
        return Health.UNWATCHED, f"{seen.state} engines are not probed"
    if seen.probe is None:
        if asked or seen.state is EngineState.SUSPECT:
            return Health.PROBE, "asked for"
        if seen.watched_s < limits.first_wait_s:
            return Health.UNWATCHED, f"serves for {seen.watched_s:.3g} s only"
        if seen.progress_s < limits.interval_s:
            return Health.ALIVE, f"finished an answer {seen.progress_s:.3g} s ago"
        return Health.PROBE, f"no answer for {seen.progress_s:.3g} s"
    if seen.probe == "":
        return Health.ALIVE, "probe answered"
    if seen.progress_s < seen.doubt_s:
        return Health.ALIVE, f"probe failed ({seen.probe}), but it finished an answer meanwhile"
    if seen.failures + 1 >= limits.failures:
        return Health.DEAD, f"{seen.failures + 1} probes failed: {seen.probe}"
    return Health.DOUBTFUL, f"probe failed: {seen.probe}"
