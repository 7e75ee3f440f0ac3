"""A collector on loopback that keeps what it is sent by OTLP/HTTP, decoded."""

from __future__ import annotations

import gzip
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

REQUESTS = {
    "/v1/logs": ExportLogsServiceRequest,
    "/v1/traces": ExportTraceServiceRequest,
    "/v1/metrics": ExportMetricsServiceRequest,
}


@dataclass
class Got:
    """One log record, span or data point, as its sender named itself."""

    name: str
    resource: dict[str, Any]
    attributes: dict[str, Any]
    raw: Any


def _values(pairs: Any) -> dict[str, Any]:
    return {p.key: getattr(p.value, p.value.WhichOneof("value")) for p in pairs}


class OtlpReceiver:
    """Use as a context manager. `status` and `delay_s`: how it answers; of other `routes` it knows
    nothing."""

    def __init__(self) -> None:
        self.status, self.delay_s = 200, 0.0
        self.routes = tuple(REQUESTS)
        self.requests: list[str] = []
        self.bodies: list[bytes] = []
        self.logs: list[Got] = []
        self.spans: list[Got] = []
        self.points: list[Got] = []
        self._lock = threading.Lock()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                time.sleep(receiver.delay_s)
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                status = receiver.status if self.path in receiver.routes else 404
                receiver._take(self.path, body, status)
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> OtlpReceiver:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _take(self, path: str, body: bytes, status: int) -> None:
        with self._lock:
            self.requests.append(path)
            if status != 200:
                return
            self.bodies.append(body)
            message = REQUESTS[path].FromString(body)
            if path == "/v1/logs":
                for resource, records in _scoped(message.resource_logs, "scope_logs"):
                    for r in [r for s in records for r in s.log_records]:
                        self.logs.append(Got(r.event_name, resource, _values(r.attributes), r))
            elif path == "/v1/traces":
                for resource, scopes in _scoped(message.resource_spans, "scope_spans"):
                    for s in [s for scope in scopes for s in scope.spans]:
                        self.spans.append(Got(s.name, resource, _values(s.attributes), s))
            else:
                for resource, scopes in _scoped(message.resource_metrics, "scope_metrics"):
                    for m in [m for scope in scopes for m in scope.metrics]:
                        for p in m.gauge.data_points:
                            self.points.append(Got(m.name, resource, _values(p.attributes), p))


def _scoped(resources: Any, scopes: str) -> list[tuple[dict[str, Any], Any]]:
    return [(_values(r.resource.attributes), getattr(r, scopes)) for r in resources]
