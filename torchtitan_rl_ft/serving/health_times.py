"""The times by which engines are judged, from the configuration."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torchtitan_rl_ft.config.sections import RolloutSection
from torchtitan_rl_ft.serving.verdict import Limits


@dataclass(frozen=True)
class HealthTimes:
    """What of `[rollout]` a job that takes a session over may change, and serving goes by."""

    health_check_first_wait: float
    health_check_interval: float
    health_check_timeout: float
    health_check_failure_threshold: int

    @classmethod
    def of(cls, rollout: RolloutSection) -> HealthTimes:
        return cls(**{f.name: getattr(rollout, f.name) for f in fields(cls)})


def limits_of(rollout: RolloutSection) -> Limits:
    return Limits(
        first_wait_s=rollout.health_check_first_wait,
        interval_s=rollout.health_check_interval,
        timeout_s=rollout.health_check_timeout,
        failures=rollout.health_check_failure_threshold,
        start_s=rollout.engine_start_timeout_s,
        install_s=rollout.install_timeout_s,
    )
