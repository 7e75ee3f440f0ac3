"""Standby trainers, and engines whose places lost groups borrow."""

from __future__ import annotations

from collections.abc import Iterator

from torchtitan_rl_ft.config.debug_mode import DebugMode, debug_mode
from torchtitan_rl_ft.config.groups import engine_groups, policy_engines
from torchtitan_rl_ft.config.rules.job import Job


def standby_trainers(job: Job) -> Iterator[str]:
    recovery, rollout = job.resolved.sections.recovery, job.resolved.sections.rollout
    yield from job.positive("recovery", "standby_groups")
    if recovery.standby == "none":
        return
    mode = debug_mode(rollout)
    if mode is DebugMode.ROLLOUT_ONLY:
        yield job.broken(
            "nobody trains in this mode, so there is nobody to stand by for", "recovery.standby"
        )
    if rollout.placement == "colocated":
        yield job.broken(
            "colocated trainers run on the engines' devices: a standby would hold some of them, "
            "and no engine can be spared",
            "recovery.standby",
            "rollout.placement",
        )
    if recovery.standby == "from_rollout":
        yield from _spare_engine(job, mode)


def _spare_engine(job: Job, mode: DebugMode) -> Iterator[str]:
    rollout = job.resolved.sections.rollout
    if mode is DebugMode.TRAIN_ONLY:
        yield job.broken(
            "there are no engines in this mode whose place could be borrowed", "recovery.standby"
        )
        return
    engines = policy_engines(engine_groups(rollout)) + rollout.standby_engines
    if engines <= rollout.min_engines:
        yield job.broken(
            "an engine's place is lent only while rollout.min_engines others are left",
            "recovery.standby",
            "rollout.engines",
            "rollout.min_engines",
        )
