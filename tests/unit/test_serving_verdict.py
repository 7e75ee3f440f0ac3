"""Health verdicts: every phase has its limit, tokens come before probes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl_ft.serving.states import EngineState
from torchtitan_rl_ft.serving.verdict import (
    BUSY_SHARE,
    PROBED,
    Figures,
    Health,
    Limits,
    Observation,
    computes,
    conclude,
    judge,
)

LIMITS = Limits(first_wait_s=10, interval_s=5, timeout_s=2, start_s=30, install_s=20)
S = EngineState
FOREVER = float("inf")


def seen(state: EngineState = S.SERVING, **fields: Any) -> Observation:
    defaults = {"in_state_s": 1e4, "watched_s": 1e4, "progress_s": 50.0, "checked_s": 1e4}
    return Observation(state=state, **{**defaults, **fields})


@pytest.mark.row("B8")
@pytest.mark.parametrize(
    ("observation", "health", "again_s"),
    [
        # Coming up and installing have limits of their own.
        (seen(S.STARTING, in_state_s=29.0), Health.UNWATCHED, 1.0),
        (seen(S.STARTING, in_state_s=30.0), Health.DEAD, FOREVER),
        # An adopted one that was up has to answer, nothing more.
        (seen(S.STARTING, in_state_s=19.0, was_up=True), Health.UNWATCHED, 1.0),
        (seen(S.STARTING, in_state_s=20.0, was_up=True), Health.DEAD, FOREVER),
        (seen(S.INSTALLING, in_state_s=21.0), Health.UNWATCHED, 1.0),
        (seen(S.INSTALLING, in_state_s=22.0), Health.DEAD, FOREVER),
        # Waiting is no fault: for a version, paused, on the way out.
        (seen(S.STALE), Health.UNWATCHED, FOREVER),
        (seen(S.PAUSED), Health.UNWATCHED, FOREVER),
        (seen(S.DRAINING), Health.UNWATCHED, FOREVER),
        (seen(S.RETIRED), Health.UNWATCHED, FOREVER),
        # First wait after every resume.
        (seen(watched_s=9.0), Health.UNWATCHED, 1.0),
        (seen(S.STANDBY, watched_s=9.0), Health.UNWATCHED, 1.0),
        # First stage: tokens, or a check not long ago.
        (seen(progress_s=4.0), Health.ALIVE, 1.0),
        (seen(checked_s=4.0), Health.ALIVE, 1.0),
        (seen(progress_s=5.0), Health.CHECK, FOREVER),
        (seen(S.STANDBY, progress_s=5.0), Health.CHECK, FOREVER),
        # A suspect is checked again soon, whatever the waits.
        (seen(S.SUSPECT, watched_s=0.0, progress_s=0.0), Health.CHECK, FOREVER),
        (seen(S.SUSPECT, checked_s=0.25), Health.UNWATCHED, 0.75),
    ],
)
def test_between_checks(observation: Observation, health: Health, again_s: float) -> None:
    verdict = judge(observation, LIMITS)
    assert (verdict.health, verdict.again_s) == (health, again_s)
    assert verdict.reason


@given(
    st.sampled_from(S),
    st.floats(0, 1e4),
    st.floats(0, 1e4),
    st.floats(0, 1e4),
    st.floats(0, 1e4),
)
def test_only_a_passed_limit_kills_without_a_probe(
    state: EngineState, in_state_s: float, watched_s: float, progress_s: float, checked_s: float
) -> None:
    verdict = judge(Observation(state, in_state_s, watched_s, progress_s, checked_s), LIMITS)
    if verdict.health is Health.DEAD:
        assert state in (S.STARTING, S.INSTALLING)
    if verdict.health is Health.CHECK:
        assert state in PROBED
    if verdict.health in (Health.UNWATCHED, Health.ALIVE):
        assert verdict.again_s > 0  # no busy loop


@pytest.mark.scenario("D-2")
@pytest.mark.parametrize(
    ("failures", "silent_s", "computing", "health", "reason"),
    [
        (["no answer in 2 s"] * 2, 7.0, "", Health.DEAD, "2 probes failed: no answer in 2 s"),
        (["status 503: x", "status 503: x"], 7.0, "", Health.DEAD, "failed: status 503: x"),
        (["status 404: x"], 7.0, "", Health.DEAD, "no token progress for 7 s, 1 probe failed"),
        (["lost", "status 500: y"], 7.0, "", Health.DEAD, "2 probes failed: lost; status 500: y"),
        (["no answer"], 299.0, "reads", Health.BUSY, "1 probe failed: no answer; reads"),
        (["no answer"], 300.0, "reads", Health.DEAD, "no token progress for 300 s"),
    ],
)
def test_after_a_check(
    failures: list[str], silent_s: float, computing: str, health: Health, reason: str
) -> None:
    verdict = conclude(failures, silent_s, computing, LIMITS)
    assert verdict.health is health
    assert reason in verdict.reason


BEFORE = Figures(published_s=100.0, prefilled_tokens=40, worked_s=5.0, detokenized=70)


@pytest.mark.row("B8")
@pytest.mark.parametrize(
    ("after", "shown"),
    [
        # Inside one forward pass: nothing is published, a core is used.
        (Figures(100.0, 40, 5.0 + 1.0), "inside one forward pass, at work 100% of"),
        (Figures(100.0, 40, 5.0 + 1.01 * BUSY_SHARE), "inside one forward pass, at work 5% of"),
        # Prompts are read, pass after pass; what our probes add does not count.
        (Figures(100.9, 2088, 5.9), "read 2048 prompt tokens in 1 s"),
        (Figures(100.9, 43, None), "read 3 prompt tokens"),
        (Figures(100.9, 42, 5.9), ""),
        # Passes end and become text, too slowly for a message of the stream.
        (Figures(100.9, 40, 5.5, 77), "7 runs of its detokenizer in 1 s"),
        (Figures(100.9, 40, 5.5, 76), ""),
        # Hung, stopped, idle.
        (Figures(100.0, 40, 5.0), ""),
        (Figures(100.0, 40, 5.01), ""),
        (Figures(101.0, 40, 5.0), ""),
        # Passes end but their tokens do not arrive: the detokenizer hangs, or an idle loop polls.
        (Figures(100.9, 40, 6.0, 70), ""),
        (Figures(100.9, 40, 6.0, None), ""),
        # Not on this machine, or the server does not answer either.
        (Figures(100.0, 40, None), ""),
        (None, ""),
    ],
)
def test_what_shows_that_an_engine_computes(after: Figures | None, shown: str) -> None:
    found = computes(BEFORE, after, elapsed_s=1.0, probes=2)
    assert shown in found if shown else found == ""


def test_without_first_figures_nothing_is_shown() -> None:
    assert computes(None, BEFORE, 1.0, 2) == ""
