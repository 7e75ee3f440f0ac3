"""How a healing group fetches the state of a living one.

torchft's HTTP transport listens on all interfaces, asks for no credentials and unpickles what it
receives. This one binds one host, wants the run's token, and loads tensors and plain values only.
The donor copies its state before it serves it, so a joiner that freezes in the middle of a
transfer never holds the donor up.
"""

from __future__ import annotations

import hmac
import logging
import threading
import urllib.request
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch.distributed._serialization import _streaming_load, _streaming_save
from torch.utils._pytree import tree_map
from torchft.checkpointing.transport import CheckpointTransport

logger = logging.getLogger(__name__)


class StateTransport(CheckpointTransport[Any]):
    """Serves the state of one step at `http://host:port/state/<step>`."""

    def __init__(self, host: str, token: str, timeout: timedelta) -> None:
        self._token = token
        self._staged: tuple[int, Any] | None = None
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

        self._server = ThreadingHTTPServer((host, 0), Handler)
        self._server.daemon_threads = True
        self._address = f"http://{host}:{self._server.server_address[1]}/state/"
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
        """The step is over. A reader in the middle keeps its copy."""
        with self._changed:
            self._staged = None

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Raises OSError (unreachable, refused, too slow) or torch's unpickling error."""
        request = urllib.request.Request(
            f"{metadata}{step}", headers={"Authorization": f"Bearer {self._token}"}
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=timeout.total_seconds()) as body:
            return _streaming_load(body, weights_only=True)

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
            self._changed.wait_for(lambda: self._staged is not None, self._timeout_s)
            staged = self._staged
        if staged is None or step != str(staged[0]):
            have = "nothing" if staged is None else f"step {staged[0]}"
            request.send_error(409, f"asked for step {step}, offering {have}")
            return
        request.send_response(200)
        request.send_header("Content-Type", "application/octet-stream")
        request.end_headers()
        _streaming_save(staged[1], request.wfile)


def _to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return value
