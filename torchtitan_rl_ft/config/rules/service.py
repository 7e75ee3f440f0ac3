"""Engines, their health times, and recovery."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from torchtitan_rl_ft.config.errors import near_miss
from torchtitan_rl_ft.config.rules.job import Job
from torchtitan_rl_ft.host.phase_file import FIRST, ONCE, TRAINER_PHASES
from torchtitan_rl_ft.host.phase_limits import parse_phase_timeouts

SESSION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def serving(job: Job) -> Iterator[str]:
    rollout = job.resolved.sections.rollout
    yield from job.positive(
        "rollout",
        "engine_start_timeout_s",
        "engine_restart_window_s",
        "request_timeout_s",
        "install_timeout_s",
        "publish_buffer_mb",
        "max_concurrent_groups",
        "stream_interval_tokens",
    )
    yield from job.not_negative("rollout", "engines", "engine_max_restarts", "temperature")
    if not 0 < rollout.top_p <= 1:
        yield job.broken("top_p must be above 0 and at most 1", "rollout.top_p")
    if not (rollout.top_k == -1 or rollout.top_k >= 1):
        yield job.broken("top_k must be -1 (all) or at least 1", "rollout.top_k")
    if rollout.engine_python and not job.machine.find_program(rollout.engine_python):
        yield job.broken("there is no such interpreter", "rollout.engine_python")


def session(job: Job) -> Iterator[str]:
    yield from job.not_negative("rollout", "retain_ttl")
    name = job.resolved.sections.rollout.session_id
    if name and not SESSION_ID.fullmatch(name):
        yield job.broken(
            "the name of a session is 1 to 100 letters, digits, '.', '_', '-', and begins with a "
            "letter or digit",
            "rollout.session_id",
        )
    if job.resolved.sections.rollout.keep_serving and not job.resolved.get("rollout.retain_ttl"):
        yield job.broken(
            "nothing is kept for 0 seconds", "rollout.keep_serving", "rollout.retain_ttl"
        )


def health_times(job: Job) -> Iterator[str]:
    yield from job.not_negative("rollout", "health_check_first_wait")
    yield from job.positive(
        "rollout",
        "health_check_interval",
        "health_check_timeout",
        "health_check_failure_threshold",
        "cleanup_timeout",
    )


def recovery(job: Job) -> Iterator[str]:
    recovery = job.resolved.sections.recovery
    yield from job.not_negative("recovery", "role_max_restarts")
    yield from job.positive(
        "recovery", "role_restart_window_s", "batch_wait_timeout_s", "max_numeric_refusals"
    )
    if recovery.exit_on_missing_checkpoint and not recovery.auto_continue_train:
        yield job.broken(
            "exit_on_missing_checkpoint is about resuming, which is off",
            "recovery.exit_on_missing_checkpoint",
            "recovery.auto_continue_train",
        )


def watching(job: Job) -> Iterator[str]:
    recovery = job.resolved.sections.recovery
    yield from job.positive("recovery", "phase_timeout_s", "rank_silence_timeout_s")
    yield from job.not_negative("recovery", "inprocess_max_restarts")
    yield from job.port("recovery", "workload_inspector_port")
    try:
        timeouts_s = parse_phase_timeouts(recovery.phase_timeouts)
    except ValueError as e:
        yield job.broken(str(e), "recovery.phase_timeouts")
        timeouts_s = {}
    for key in timeouts_s:
        phase = key.removeprefix(FIRST)
        if phase not in TRAINER_PHASES or (phase in ONCE and phase != key):
            yield job.broken(
                f"{key!r} is no phase of a trainer{near_miss(key, TRAINER_PHASES)} (phases: "
                f"{', '.join(TRAINER_PHASES)}; first_ before all but {' and '.join(sorted(ONCE))})",
                "recovery.phase_timeouts",
            )
    for key in ("phase_timeouts", "calc_ft_timeouts"):
        if getattr(recovery, key) and not recovery.enable_ft_package:
            yield job.broken(
                f"{key} is about limits of single phases, which are off",
                f"recovery.{key}",
                "recovery.enable_ft_package",
            )


def chaos(job: Job) -> Iterator[str]:
    """The faults themselves are checked by the command, which alone knows their language."""
    section = job.resolved.sections.chaos
    yield from job.not_negative("chaos", "mtbf_s")
    if section.enable and not (section.faults or section.mtbf_s or section.replay):
        yield job.broken(
            "there is nothing to inject: name faults, faults to be drawn or a trace to be "
            "replayed, or leave chaos.enable out",
            *(f"chaos.{key}" for key in ("enable", "faults", "mtbf_s", "replay")),
        )
    if section.mtbf_s > 0 and not section.mtbf_faults:
        yield job.broken("there is nothing to draw from", "chaos.mtbf_s", "chaos.mtbf_faults")


def secrets(job: Job) -> Iterator[str]:
    """The resolved values are written to a file; the messages do not repeat the secret either."""
    for argument in job.resolved.sections.rollout.engine_args:
        name = argument.partition("=")[0]
        if name in ("--api-key", "--admin-api-key"):
            yield (
                f"rollout.engine_args holds {name}: no secret belongs into a configuration; "
                "engines take the run's token by themselves"
            )
    if "@" in urlsplit(job.resolved.sections.otel.endpoint).netloc:
        yield (
            "otel.endpoint holds a user or password: no secret belongs into a configuration; "
            "set OTEL_EXPORTER_OTLP_HEADERS in the environment"
        )
