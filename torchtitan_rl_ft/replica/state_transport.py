"""How a healing group fetches the state of a living one.

torchft's HTTP transport listens on all interfaces, asks for no credentials and unpickles what it
receives. This one binds one host, wants the run's token, and loads tensors and plain values only.
The donor copies its state before it serves it, so a joiner that freezes in the middle of a
transfer never holds the donor up.
"""

from __future__ import annotations

import hmac
import io
import logging
import threading
import time
import urllib.request
from dataclasses import dataclass
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch.distributed._serialization import _streaming_load, _streaming_save
from torch.utils._pytree import tree_map
from torchft.checkpointing.transport import CheckpointTransport

logger = logging.getLogger(__name__)

BUFFER_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Transfer:
    """One fetched state. Times are of the monotonic clock."""

    source: str
    n_bytes: int
    started_s: float
    seconds: float


class StateTransport(CheckpointTransport[Any]):
    """Serves the state of one step at `http://host:port/state/<step>`.

    `advertised`: host or host:port at which other groups reach this server, where that is not
    where it listens. Fixed ports are those of the job's first rank, this one's are `place` higher.
    `timeout` bounds a whole transfer, not only its silences.
    """

    def __init__(
        self,
        host: str,
        token: str,
        timeout: timedelta,
        *,
        advertised: str = "",
        port: int = 0,
        place: int = 0,
    ) -> None:
        """Raises OSError when the port is taken."""
        self.transfer: Transfer | None = None  # the last state that was fetched
        self._token = token
        self._staged: tuple[int, Any] | None = None
        self._attempts = 0  # of the donor that are over
        self._changed = threading.Condition()
        self._timeout_s = timeout.total_seconds()
        transport = self
        limit_s = max(1, int(timeout.total_seconds()))

        class Handler(BaseHTTPRequestHandler):
            timeout = limit_s

            def do_GET(self) -> None:
                transport._serve(self)

            def log_message(self, format: str, *args: Any) -> None:
                logger.debug(format, *args)

        self._server = ThreadingHTTPServer((host, port and port + place), Handler)
        self._server.daemon_threads = True
        listening = self._server.server_address[1]
        name, _, first = advertised.partition(":")
        reached = int(first) + place if first else listening
        self._address = f"http://{name or host}:{reached}/state/"
        logger.info(
            "other groups fetch this group's state at %s (listening on %s:%d)",
            self._address,
            host,
            listening,
        )
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True
        )
        self._thread.start()

    def metadata(self) -> str:
        return self._address

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta
    ) -> None:
        copy = tree_map(_to_host, state_dict)
        with self._changed:
            self._staged = (step, copy)
            self._changed.notify_all()

    def disallow_checkpoint(self) -> None:
        """The step is over. A reader in the middle keeps its copy; one that waits for an offer is
        told that there is none: the donor's attempt has failed before, and while the reader waits
        no quorum forms."""
        with self._changed:
            self._staged = None
            self._attempts += 1
            self._changed.notify_all()

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Raises OSError (unreachable, refused, too slow) or torch's unpickling error."""
        started_s, limit_s = time.monotonic(), timeout.total_seconds()
        request = urllib.request.Request(
            f"{metadata}{step}", headers={"Authorization": f"Bearer {self._token}"}
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=limit_s) as body:
            reader = BoundedReader(body, started_s + limit_s)
            state = _streaming_load(io.BufferedReader(reader, BUFFER_BYTES), weights_only=True)
        seconds = time.monotonic() - started_s
        self.transfer = Transfer(metadata, reader.n_bytes, started_s, seconds)
        return state

    def shutdown(self, wait: bool = True) -> None:
        self._server.shutdown()
        self._server.server_close()
        if wait:
            self._thread.join()

    def _serve(self, request: BaseHTTPRequestHandler) -> None:
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            request.send_error(401, "missing or wrong token")
            return
        step = request.path.removeprefix("/state/")
        with self._changed:
            # The joiner may know of the quorum before this donor has copied its state.
            now = self._attempts
            self._changed.wait_for(
                lambda: self._staged is not None or self._attempts != now, self._timeout_s
            )
            staged = self._staged
        if staged is None or step != str(staged[0]):
            have = "nothing" if staged is None else f"step {staged[0]}"
            request.send_error(409, f"asked for step {step}, offering {have}")
            return
        request.send_response(200)
        request.send_header("Content-Type", "application/octet-stream")
        request.end_headers()
        _streaming_save(staged[1], request.wfile)


class BoundedReader(io.RawIOBase):
    """Reads `body` until a time of the monotonic clock: a sender that trickles is no slower to be
    given up than a silent one."""

    def __init__(self, body: Any, end_s: float) -> None:
        self._body, self._end_s = body, end_s
        self.n_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Raises TimeoutError after the end."""
        if time.monotonic() > self._end_s:
            raise TimeoutError(f"state incomplete at its time limit, after {self.n_bytes} bytes")
        # What has arrived, not all that is asked for: a large tensor takes its time.
        data = self._body.read1(len(buffer))
        buffer[: len(data)] = data
        self.n_bytes += len(data)
        return len(data)


def _to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return value
