"""The gateway's own process: `python -m ...serving.gateway_process PORT METRICS_PORT`.

Started through smg's constructor and not its command line, which cannot set the time for which
a worker that was taken off the list is kept (5 s): an engine is off the list for the milliseconds
of an install, and has to be back on it at once.
"""

from __future__ import annotations

import os
import sys

HOST = "127.0.0.1"
KEY_ENV = "TORCHTITAN_RL_FT_GATEWAY_KEY"
"""The secret that each of its routes but /health asks for."""

LONGEST_REQUEST_S = 24 * 3600
"""Limits are the callers': they hang up, and the gateway then ends the request in the engine."""


def serve(port: int, metrics_port: int, key: str) -> None:
    """Until SIGTERM. Raises RuntimeError when a port is taken."""
    from smg.smg_rs import PolicyType, Router

    Router(
        worker_urls=[],
        host=HOST,
        port=port,
        prometheus_host=HOST,
        prometheus_port=metrics_port,
        api_key=key,
        log_level="warn",
        # Requests with the same key go to one engine, a new key to the one with fewest requests.
        # This policy looks at headers alone: bodies pass unread and unchanged.
        policy=PolicyType.Manual,
        assignment_mode="min_load",
        max_idle_secs=600,
        # Who is alive, what is asked again and how long it may take is decided by serving.
        disable_health_check=True,
        remove_unhealthy_workers=False,
        disable_retries=True,
        disable_circuit_breaker=True,
        disable_load_monitoring=True,
        worker_overload_protection=False,
        worker_stall_secs=0,
        worker_wedge_secs=0,
        worker_stale_secs=0,
        max_concurrent_requests=0,
        request_timeout_secs=LONGEST_REQUEST_S,
        header_read_timeout_secs=0,
        idle_connection_timeout_secs=0,
        stream_body_stall_timeout_secs=0,
        sse_keepalive_secs=0,
        drain_settle_secs=0,
        shutdown_grace_period_secs=1,
        worker_startup_timeout_secs=10,
        worker_startup_check_interval=1,
        disable_tokenizer_autoload=True,
    ).start()


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), os.environ.pop(KEY_ENV))
