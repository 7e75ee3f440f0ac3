"""The gateway in front of the engines, and engines that somebody else owns."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from torchtitan_rl_ft.config.groups import engine_groups
from torchtitan_rl_ft.config.rules.job import Job

EXTERNALS = "rollout.external_urls"

OWN_ENGINE_KEYS = (
    "engine_args",
    "engine_python",
    "engine_start_timeout_s",
    "engine_max_restarts",
    "engine_restart_window_s",
    "refill_start",
)
"""Keys of [rollout] about engines that the job starts."""


def router(job: Job) -> Iterator[str]:
    rollout = job.resolved.sections.rollout
    if rollout.router != "smg":
        return
    if not job.machine.has_module("smg"):
        yield job.broken(
            "smg is not installed: pip install smg==1.13.0 (or the extra torchtitan_rl_ft[smg])",
            "rollout.router",
        )
    if any(g.role in ("prefill", "decode") for g in engine_groups(rollout)):
        yield job.broken(
            "the gateway does not join prefill and decode engines: use router own",
            "rollout.router",
            "rollout.groups",
        )


def external_engines(job: Job) -> Iterator[str]:
    rollout = job.resolved.sections.rollout
    seen: set[tuple[str | None, int | None]] = set()
    for url in rollout.external_urls:
        problem = url_problem(url)
        if problem is None:
            parts = urlsplit(url)
            address = (parts.hostname, parts.port)
            problem = "is named twice" if address in seen else None
            seen.add(address)
        if problem is not None:
            yield f"{url!r} {problem}: {EXTERNALS} ({job.resolved.origins[EXTERNALS]})"
    if rollout.external_urls and not any(g.role == "regular" for g in engine_groups(rollout)):
        yield job.broken(
            "external engines join the first regular group: there is none",
            EXTERNALS,
            "rollout.groups",
        )
    if not rollout.external_urls and not rollout.groups and rollout.engines == 0:
        yield job.broken(
            "a job without engines of its own needs external ones", "rollout.engines", EXTERNALS
        )


def url_problem(url: str) -> str | None:
    """What is wrong with the address of an engine, or None."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as e:
        return f"is no URL ({e})"
    if parts.scheme not in ("http", "https") or not parts.hostname or port is None:
        return "is no address of an engine: http://host:port"
    if parts.username is not None or parts.password is not None:
        return "holds a user or password: no secret belongs into a configuration"
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        return "has a path: http://host:port is all of it"
    return None


def idle_keys(job: Job) -> Iterator[str]:
    """Keys about engines that are started, in a job that starts none: ignored, with a note."""
    rollout = job.resolved.sections.rollout
    if rollout.engines or rollout.groups or not rollout.external_urls:
        return
    for key in OWN_ENGINE_KEYS:
        path = f"rollout.{key}"
        if job.resolved.given(path):
            yield job.broken(
                "engines that somebody else owns are never started: ignored", path, EXTERNALS
            )
