"""What a run shows of itself, and where it sends it."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from torchtitan_rl_ft.config.profile_steps import parse_steps
from torchtitan_rl_ft.config.rules.job import Job

OTEL_MODULES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def pages(job: Job) -> Iterator[str]:
    yield from job.positive("observability", "ettr_window_s", "ettr_sample_s")
    yield from job.port("observability", "status_port")


def otel(job: Job) -> Iterator[str]:
    yield from job.positive("otel", "export_interval_s")
    endpoint = job.resolved.sections.otel.endpoint
    if not endpoint:
        return
    if not _is_http(endpoint):
        yield job.broken(
            "the endpoint is the base URL of an OTLP/HTTP collector, like http://127.0.0.1:4318",
            "otel.endpoint",
        )
    if not all(job.machine.has_module(name) for name in OTEL_MODULES):
        yield job.broken(
            "OpenTelemetry is not installed: pip install 'torchtitan_rl_ft[otel]'", "otel.endpoint"
        )


def metric_sinks(job: Job) -> Iterator[str]:
    yield from job.positive("metrics", "log_freq")
    for key, module in (("enable_wandb", "wandb"), ("enable_tensorboard", "tensorboard")):
        path = f"metrics.{key}"
        if job.resolved.get(path) and not job.machine.has_module(module):
            yield job.broken(f"{module} is not installed: pip install {module}", path)


def profiles(job: Job) -> Iterator[str]:
    path = "observability.profile_steps"
    try:
        steps = parse_steps(job.resolved.sections.observability.profile_steps)
    except ValueError as e:
        yield job.broken(str(e), path)
        return
    if not steps:
        if job.resolved.sections.observability.profile_engines:
            yield job.broken(
                "which steps are to be profiled? observability.profile_steps is empty",
                "observability.profile_engines",
                path,
            )
        return
    if steps[-1] > job.resolved.get("training.steps"):
        yield job.broken("the job ends before these steps", path, "training.steps")
    if job.resolved.get("profiling.enable_profiling"):
        yield job.broken(
            "a process has one profiler: use one of the two", path, "profiling.enable_profiling"
        )


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # no port
        return False
