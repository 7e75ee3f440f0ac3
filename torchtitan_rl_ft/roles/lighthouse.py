"""The lighthouse role: torchft's quorum server, on loopback, with the run's timings."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from torchtitan_rl_ft.config.sections import FaultToleranceSection
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.observability.events import EventLog, Kind
from torchtitan_rl_ft.observability.otel import export_events
from torchtitan_rl_ft.run_folder import ATTEMPT_ENV, RunFolder

if TYPE_CHECKING:
    from torchtitan_rl_ft.config.resolve import Resolved

HOST = "127.0.0.1"
_REBIND_TIMEOUT_S = 10.0


def load_extension() -> Any:
    """torchft's extension module alone: its servers and clients.

    `import torchft` pulls in torch and OpenTelemetry, seconds before a quorum can form; the
    extension needs neither. Raises ModuleNotFoundError when torchft is not installed.
    """
    package = importlib.util.find_spec("torchft")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError(
            "torchft is not installed: pip install -r requirements-torchft.txt", name="torchft"
        )
    folder = Path(package.submodule_search_locations[0])
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = folder / f"_torchft{suffix}"
        if path.exists():
            spec = importlib.util.spec_from_file_location("torchft._torchft", path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    raise ModuleNotFoundError(f"no _torchft extension module in {folder}", name="torchft")


def start_server(section: FaultToleranceSection, port: int) -> tuple[Any, str]:
    """A running server and its url. `port` 0 takes a free one.

    Raises RuntimeError when the port is in use.
    """
    server = load_extension().LighthouseServer(
        bind=f"{HOST}:{port}",
        min_replicas=section.lighthouse_min_replicas or section.min_replica_size,
        join_timeout_ms=section.join_timeout_ms,
        quorum_tick_ms=section.quorum_tick_ms,
        heartbeat_timeout_ms=section.heartbeat_timeout_ms,
    )
    # Its own address names the host, which need not resolve to the loopback it is bound to.
    return server, f"http://{HOST}:{urlsplit(server.address()).port}"


def former_port(folder: RunFolder) -> int:
    """Port of this run's previous lighthouse, 0 when there was none. Living trainers keep the
    address they were started with, so a restarted lighthouse has to come back at it."""
    former = folder.role("lighthouse")
    return (urlsplit(former.url).port or 0) if former is not None else 0


def start_at_former_port(section: FaultToleranceSection, port: int) -> tuple[Any, str]:
    """`start_server`, waiting a bounded time for a dead predecessor's port to be free."""
    deadline = time.monotonic() + _REBIND_TIMEOUT_S
    while True:
        try:
            return start_server(section, port)
        except RuntimeError as e:
            if time.monotonic() >= deadline:
                raise RuntimeError(
                    f"lighthouse: cannot bind {HOST}:{port}, where the trainers look for it: {e}"
                ) from e
        time.sleep(0.2)


def main(resolved: Resolved) -> int:
    """Serve until SIGTERM. The caller's exit code."""
    stop = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stop.set())
    folder = RunFolder(resolved.sections.job.dump_folder)
    attempt = int(os.environ.get(ATTEMPT_ENV, "1"))
    events = EventLog(
        folder.events, run=folder.path.name, role="lighthouse", name="lighthouse", attempt=attempt
    )
    export_events(events, resolved.sections.otel, folder.token())
    try:
        server, url = start_at_former_port(resolved.sections.fault_tolerance, former_port(folder))
    except (ModuleNotFoundError, RuntimeError) as e:
        print(f"torchtitan: error: {e}", file=sys.stderr)
        return ExitCode.CONFIG if isinstance(e, ModuleNotFoundError) else ExitCode.FAILED
    folder.register("lighthouse", url)
    events.emit(Kind.READY, url=url)
    stop.wait()
    server.shutdown()
    return ExitCode.DONE
