"""Listens at the address of a dead engine and keeps what comes."""

from __future__ import annotations

import socket
import threading


class Tombstone:
    """`visits`: the first bytes of each connection."""

    def __init__(self, url: str) -> None:
        """Raises OSError while the engine itself is there."""
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        host, port = url.removeprefix("http://").split(":")
        self._socket.bind((host, int(port)))
        self._socket.listen()
        self.visits: list[bytes] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                visitor, _ = self._socket.accept()
            except OSError:
                return
            with visitor:
                self.visits.append(visitor.recv(4096))

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()
