"""Ports chosen for programs that bind them later."""

from __future__ import annotations

import socket
from pathlib import Path

from torchtitan_rl_ft.host import ports
from torchtitan_rl_ft.host.ports import LOWEST_PORT, free_of, free_port, free_ports


def test_free_ports_differ() -> None:
    assert len(set(free_ports(50))) == 50


def test_free_ports_are_none_that_a_connection_gets(tmp_path: Path, monkeypatch) -> None:
    local = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(ports, "LOCAL_PORTS", local)
    local.write_text("32768\t60999\n")
    assert all(LOWEST_PORT <= port < 32768 for port in (free_port(), *free_ports(50)))
    local.write_text("1024\t65535\n")
    assert len(set(free_ports(50))) == 50


def test_a_port_is_not_free_while_it_or_what_was_accepted_on_it_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert free_of([port]) == 0
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            accepted.close()  # the first to close: its side lingers
            assert not client.recv(1)
    assert free_of([port]) == 0
    assert free_of(free_ports(3)) == 3
