"""OpenTelemetry: a process's events as logs and spans, a run's metrics as gauges, by OTLP/HTTP.

Imported everywhere, but OpenTelemetry itself only by the side thread of a process whose job has
`[otel] endpoint`. What OTEL_EXPORTER_OTLP_HEADERS, _CERTIFICATE and _COMPRESSION say is heeded by
the exporters.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torchtitan_rl_ft.observability.events import Event, EventLog, Kind
from torchtitan_rl_ft.observability.exporter import Exporter, NotTaken, Point, Record
from torchtitan_rl_ft.observability.jsonl import JsonlTail
from torchtitan_rl_ft.observability.metric_names import exported_name
from torchtitan_rl_ft.observability.metric_rows import read_row
from torchtitan_rl_ft.observability.recovery_spans import RecoverySpans
from torchtitan_rl_ft.observability.spans import Span, SpanFold, span_of_step, trace_of_step

if TYPE_CHECKING:
    from opentelemetry.sdk._logs import ReadableLogRecord
    from opentelemetry.sdk.metrics.export import MetricsData
    from opentelemetry.sdk.trace import ReadableSpan

TORCHFT_STREAMS = ("torchft_quorums", "torchft_commits", "torchft_errors")
"""Loggers of torchft; what they tell is in the `extra` of a record without text."""

REQUEST_TIMEOUT_S = 5.0

HIDDEN = "(hidden)"
_SECRET_NAMES = ("TOKEN", "SECRET", "PASSWORD", "API_KEY", "ACCESS_KEY", "CREDENTIALS", "HEADERS")
_SECRET_LENGTH = 8
_PLAIN_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}
_ERRORS = (Kind.FAULT, Kind.ESCALATE)
_WARNINGS = (Kind.WARN, Kind.ANOMALY, Kind.REFUSE, Kind.DROP, Kind.SUPERSEDE, Kind.CHAOS)


class Settings(Protocol):
    """The section [otel]."""

    endpoint: str
    export_interval_s: float
    service_name: str


def export_events(
    events: EventLog,
    settings: Settings,
    token: str,
    *,
    metrics: Path | None = None,
    all_events: Path | None = None,
) -> Exporter | None:
    """Export the events of this process from now on until they are closed, what is appended to
    `metrics`, and the faults that the `all_events` of a run tell of. Nothing without an endpoint.
    `token`: the run's secret, which is hidden."""
    if not settings.endpoint:
        return None
    resource = {
        "service.name": settings.service_name,
        "service.instance.id": f"{events.about['run']}/{events.about['name']}/{os.getpid()}",
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
        **{f"rl_ft.{k}": v for k, v in events.about.items()},
    }
    hidden = Hidden(secrets_of(os.environ, token))
    points = MetricPoints(metrics)
    recoveries = RecoverySpans(all_events, events.about["run"]) if all_events is not None else None

    def read_more(fold: SpanFold) -> Iterator[Point | Span]:
        yield from points.read(fold)
        if recoveries is not None:
            yield from recoveries.read()

    exporter = Exporter(
        events,
        lambda: OtlpSender(settings.endpoint, resource, hidden),
        receiver=f"the OpenTelemetry collector at {settings.endpoint}",
        interval_s=settings.export_interval_s,
        read_more=read_more,
    )
    events.listen(exporter)
    exporter.start()
    return exporter


def forward_torchft(exporter: Exporter) -> None:
    """Export torchft's own streams too: quorums, commits, errors."""
    for name in TORCHFT_STREAMS:
        stream = logging.getLogger(name)
        stream.setLevel(logging.INFO)
        stream.propagate = False  # the records have no text to print
        stream.addHandler(_Forward(exporter))


class _Forward(logging.Handler):
    def __init__(self, exporter: Exporter) -> None:
        super().__init__()
        self._exporter = exporter

    def emit(self, record: logging.LogRecord) -> None:
        extra = {k: v for k, v in record.__dict__.items() if k not in _PLAIN_FIELDS}
        if text := record.getMessage():
            extra["message"] = text
        self._exporter.take(Record(record.created, record.name, extra))


def secrets_of(environment: Mapping[str, str], token: str) -> list[str]:
    """What must not leave this process: the run's token, and what the environment names so."""
    named = [v for k, v in environment.items() if k.upper().endswith(_SECRET_NAMES)]
    return [v for v in {token, *named} if len(v) >= _SECRET_LENGTH]


class Hidden:
    """Takes secrets out of texts."""

    def __init__(self, secrets: Sequence[str]) -> None:
        self._secrets = sorted(secrets, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        # A file's name may hold what is no character.
        return text.encode(errors="replace").decode()

    def attributes(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Fit for OpenTelemetry: numbers, flags and texts; anything else as JSON."""
        return {
            k: v if _is_number(v) else self(_text(v)) for k, v in values.items() if v is not None
        }


def _is_number(value: Any) -> bool:
    """Or a flag. A whole number of OpenTelemetry has 64 bits."""
    return isinstance(value, float) or (isinstance(value, int) and -(2**63) <= value < 2**63)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


class MetricPoints:
    """What is appended to `metrics.jsonl` from now on, each number of a line a point at the time of
    its commit."""

    def __init__(self, path: Path | None) -> None:
        self._tail = (
            JsonlTail(path, may_begin_anew=True, from_end=True, parse=read_row) if path else None
        )

    def read(self, fold: SpanFold) -> Iterable[Point]:
        for line in self._tail.read() if self._tail is not None else ():
            step = line.get("step")
            wall_s = fold.committed_s.get(step, time.time())
            for key, value in line.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    yield Point(exported_name(key), float(value), wall_s, step)


class OtlpSender:
    """The exporters of OpenTelemetry, which tell only in their log why something was not taken:
    that is read here, and goes no further."""

    def __init__(self, endpoint: str, resource: Mapping[str, Any], hidden: Hidden) -> None:
        from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        base, limit_s = endpoint.rstrip("/"), REQUEST_TIMEOUT_S
        self._logs = OTLPLogExporter(f"{base}/v1/logs", timeout=limit_s)
        self._spans = OTLPSpanExporter(f"{base}/v1/traces", timeout=limit_s)
        self._metrics = OTLPMetricExporter(f"{base}/v1/metrics", timeout=limit_s)
        self._resource = Resource.create(dict(resource))
        self._scope = InstrumentationScope("torchtitan_rl_ft")
        self._scope_of = InstrumentationScope
        self._hidden = hidden
        self._complaints = _Complaints()
        log = logging.getLogger("opentelemetry.exporter")
        log.addHandler(self._complaints)
        log.propagate = False
        # Their filter leaves out what was told a moment ago, and with it why nothing was taken.
        logging.getLogger(OTLPLogExporter.__module__).filters.clear()

    def send(self, sort: str, items: list[Any]) -> NotTaken | None:
        self._complaints.clear()
        if sort == "logs":
            result = self._logs.export([self._log(item) for item in items])
        elif sort == "traces":
            result = self._spans.export([self._span(item) for item in items])
        else:
            result = self._metrics.export(self._metric_data(items))
        return None if result.name == "SUCCESS" else self._complaints.not_taken()

    def _log(self, item: Event | Record) -> ReadableLogRecord:
        from opentelemetry._logs import LogRecord, SeverityNumber
        from opentelemetry.sdk._logs import ReadableLogRecord

        if isinstance(item, Record):
            record = LogRecord(
                timestamp=_nanoseconds(item.wall_s),
                severity_text="INFO",
                severity_number=SeverityNumber.INFO,
                body=item.attributes.get("message", item.stream),
                attributes=self._hidden.attributes(item.attributes),
                event_name=item.stream,
            )
            return ReadableLogRecord(record, self._resource, self._scope_of(item.stream))
        severity = severity_of(item)
        told = {"kind": str(item.kind), "phase": item.phase, "cause": item.cause}
        told |= {"step": item.step, "version": item.version, **item.data}
        record = LogRecord(
            timestamp=_nanoseconds(item.wall_s),
            severity_text=severity,
            severity_number=SeverityNumber[severity],
            body=self._hidden(" ".join(filter(None, (item.kind, item.phase, item.cause)))),
            attributes=self._hidden.attributes(told),
            event_name=f"rl_ft.{item.kind}",
            context=self._in_step(item) if item.step else None,
        )
        return ReadableLogRecord(record, self._resource, self._scope)

    def _in_step(self, event: Event) -> Any:
        from opentelemetry.context import Context
        from opentelemetry.trace import NonRecordingSpan, set_span_in_context

        assert event.step is not None
        ids = trace_of_step(event.run, event.step), span_of_step(event.run, event.step)
        return set_span_in_context(NonRecordingSpan(self._span_context(*ids)), Context())

    @staticmethod
    def _span_context(trace_id: int, span_id: int) -> Any:
        from opentelemetry.trace import SpanContext, TraceFlags

        return SpanContext(trace_id, span_id, False, TraceFlags(TraceFlags.SAMPLED))

    def _span(self, span: Span) -> ReadableSpan:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import Status, StatusCode

        parent = span.parent_id
        status = Status(StatusCode.UNSET)
        if span.error is not None:
            status = Status(StatusCode.ERROR, self._hidden(span.error))
        return ReadableSpan(
            span.name,
            context=self._span_context(span.trace_id, span.span_id),
            parent=None if parent is None else self._span_context(span.trace_id, parent),
            resource=self._resource,
            attributes=self._hidden.attributes(span.attributes),
            status=status,
            start_time=_nanoseconds(span.began_s),
            end_time=_nanoseconds(span.ended_s),
            instrumentation_scope=self._scope,
        )

    def _metric_data(self, points: list[Point]) -> MetricsData:
        from opentelemetry.sdk.metrics.export import (
            Gauge,
            Metric,
            MetricsData,
            NumberDataPoint,
            ResourceMetrics,
            ScopeMetrics,
        )

        by_name: dict[str, list[NumberDataPoint]] = {}
        for p in points:
            about = {} if p.step is None else {"step": p.step}
            at_ns = _nanoseconds(p.wall_s)
            by_name.setdefault(p.name, []).append(NumberDataPoint(about, at_ns, at_ns, p.value))
        metrics = [Metric(name, "", "", Gauge(found)) for name, found in by_name.items()]
        scope = ScopeMetrics(self._scope, metrics, "")
        return MetricsData([ResourceMetrics(self._resource, [scope], "")])


_OF_A_REQUEST = ("Failed to export", "Transient error")
"""How the exporters begin to tell of a request; of others (records that cannot be encoded, or are
too large) none was made."""


class _Complaints(logging.Handler):
    """What the exporters log of a request, in place of their log lines."""

    def __init__(self) -> None:
        super().__init__()
        self._records: list[logging.LogRecord] = []

    def clear(self) -> None:
        self._records.clear()

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(record)

    def not_taken(self) -> NotTaken:
        texts = [r.getMessage() for r in self._records]
        code = next((a for r in self._records for a in r.args or () if isinstance(a, int)), None)
        # The first one names the cause, a later one that time was up.
        wrong = next((a for r in self._records for a in r.args or () if _is_error(a)), None)
        cause = texts[0] if texts else "no reason given"
        asked = not texts or any(t.startswith(_OF_A_REQUEST) for t in texts)
        return NotTaken(_root(wrong) or cause, final=not asked or _is_final(code))


def _is_error(value: object) -> bool:
    return isinstance(value, BaseException)


def _root(error: Any) -> str:
    """What lies beneath the exceptions of the libraries that have wrapped it."""
    while beneath := getattr(error, "__cause__", None) or getattr(error, "__context__", None):
        error = beneath
    return "" if error is None else str(error) or type(error).__name__


def _is_final(code: int | None) -> bool:
    """A request that another try does not mend, but 429 (too many) and 408 (too slow)."""
    return code is not None and 400 <= code < 500 and code not in (408, 429)


def severity_of(event: Event) -> str:
    """OpenTelemetry's name of how grave an event is."""
    if event.kind in _ERRORS or (event.kind is Kind.EXIT and event.phase == "fault"):
        return "ERROR"
    if event.kind in _WARNINGS:
        return "WARN"
    return "DEBUG" if event.kind is Kind.PHASE else "INFO"


def _nanoseconds(wall_s: float) -> int:
    return int(wall_s * 1e9)
