"""Health times of a job that takes a session over are those by which engines are judged."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from torchtitan_rl_ft.config.sections import RolloutSection
from torchtitan_rl_ft.config.session_identity import MUTABLE_KEYS
from torchtitan_rl_ft.serving.health_times import HealthTimes, limits_of


@pytest.mark.row("A4")
def test_they_may_change_and_do_something():
    mine = RolloutSection(health_check_interval=600.0, install_timeout_s=7.0)
    theirs = HealthTimes.of(
        RolloutSection(
            health_check_first_wait=1.0,
            health_check_interval=2.0,
            health_check_timeout=3.0,
            health_check_failure_threshold=4,
        )
    )
    assert {f"rollout.{name}" for name in asdict(theirs)} <= MUTABLE_KEYS
    limits = limits_of(replace(mine, **asdict(theirs)))
    assert (limits.first_wait_s, limits.interval_s, limits.timeout_s, limits.failures) == (
        1,
        2,
        3,
        4,
    )
    assert limits.install_s == 7.0
