"""Ports for what is started later.

What is started with a port binds it seconds, an engine tens of seconds, after it was chosen. So
these are none that the kernel gives meanwhile to an outgoing connection or to a server that asked
for any port.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

HOST = "127.0.0.1"
LOCAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""From where the kernel takes the ports of outgoing connections."""
LOWEST_PORT = 15000
PORT_TRIES = 64
LAST_PORT = 65535


def free_port() -> int:
    """A loopback port that is free now."""
    return free_ports(1)[0]


def free_ports(n: int) -> list[int]:
    """Loopback ports that are free now and differ from one another."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for s in sockets:
            _bind(s)
        return [s.getsockname()[1] for s in sockets]


def free_of(numbers: Iterable[int], enough: int = LAST_PORT) -> int:
    """How many of these ports a server could listen on now, at any address of this machine; no
    more than `enough` are looked for. One from which a connection was closed a moment ago is not
    among them, unless the server says SO_REUSEADDR."""
    free = 0
    for port in numbers:
        if free >= enough:
            break
        free += _is_free(port)
    return free


def _is_free(port: int) -> bool:
    with socket.socket() as s:
        try:
            s.bind(("", port))
        except OSError:
            return False
        return True


def _bind(s: socket.socket) -> None:
    lowest = int(LOCAL_PORTS.read_text().split()[0])
    if lowest - LOWEST_PORT >= PORT_TRIES:
        for _ in range(PORT_TRIES):
            with suppress(OSError):
                s.bind((HOST, secrets.randbelow(lowest - LOWEST_PORT) + LOWEST_PORT))
                return
    s.bind((HOST, 0))
