"""`[observability]`, `[otel]`: what a run shows of itself, and where."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class ObservabilitySection:
    ettr_window_s: float = 3600.0
    """Length of the sliding window of the effective training time ratio."""

    ettr_sample_s: float = 300.0
    """Between two samples of the ratio."""

    status_page: bool = True
    """Serve the status page, /metrics and /health on loopback while the job runs."""

    status_port: int = 0
    """Port of the status page. 0: a free one, printed at the start and by `torchtitan status`."""

    trace_samples: bool = True
    """Write what each sample went through to the events, for `torchtitan report --trace`."""

    profile_steps: str = ""
    """Steps during which trainers and engines are profiled, like "10-12". Empty: none."""

    profile_engines: bool = False
    """Profile the engines too during profile_steps."""


@dataclass(kw_only=True, slots=True)
class OtelSection:
    endpoint: str = ""
    """OTLP/HTTP endpoint for traces, metrics and logs, like http://127.0.0.1:4318. Empty: no
    export."""

    export_interval_s: float = 5.0
    """Between two exports of metrics and logs."""

    service_name: str = "torchtitan_rl_ft"
    """service.name of everything that is exported."""
