"""Jobs that stop early, saved, to be started again."""

from __future__ import annotations

from collections.abc import Iterator

from torchtitan_rl_ft.config.debug_mode import DebugMode, debug_mode
from torchtitan_rl_ft.config.rules.job import Job

LIMITS = ("recovery.exit_duration_in_mins", "recovery.exit_interval")
SWITCHES = ("recovery.exit_signal_handler", "recovery.adlr_autoresume")


def stops_early(job: Job) -> list[str]:
    """The keys that make the job stop before its last step."""
    get = job.resolved.get
    return [p for p in SWITCHES if get(p)] + [p for p in LIMITS if get(p) is not None]


def exits(job: Job) -> Iterator[str]:
    get = job.resolved.get
    for path in LIMITS:
        if (value := get(path)) is not None and not value > 0:
            yield job.broken(f"{path} must be positive, or none", path)
    yield from job.positive("recovery", "adlr_autoresume_interval")
    if get("recovery.autoresume_file") and not get("recovery.adlr_autoresume"):
        yield job.broken(
            "nobody looks for the file", "recovery.autoresume_file", "recovery.adlr_autoresume"
        )
    for path in stops_early(job):
        if debug_mode(job.resolved.sections.rollout) is not DebugMode.NONE:
            yield job.broken(
                "a debug mode goes on with nothing, so it cannot stop to be started again",
                path,
                "rollout.debug_mode",
            )
        for key, wanted in (("checkpoint.enable", True), ("checkpoint.load_only", False)):
            if get(key) is not wanted:
                yield job.broken("a job that stops early saves its state", path, key)


def cannot_go_on(job: Job) -> Iterator[tuple[str, str]]:
    """(key that stops the job, key that keeps it from being started again). Only worth a warning:
    the next start may set it."""
    if not job.resolved.sections.recovery.auto_continue_train:
        for path in stops_early(job):
            yield path, "recovery.auto_continue_train"
