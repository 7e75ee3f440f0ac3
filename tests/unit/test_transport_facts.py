"""What the machine says of a transport, before NIXL is tried."""

import os
import socket
from contextlib import ExitStack

import pytest

from torchtitan_rl_ft.config.command_line import Override
from torchtitan_rl_ft.config.resolve import resolve_overrides
from torchtitan_rl_ft.config.weights import WeightsSection
from torchtitan_rl_ft.host.ports import free_of, free_port
from torchtitan_rl_ft.weights.transports import facts
from torchtitan_rl_ft.weights.transports.facts import (
    address_problem,
    gather,
    memory_problem,
    port_problem,
)


def test_holders_answer_at_addresses_of_this_machine():
    assert address_problem("127.0.0.1") is None
    for host in ("192.0.2.1", "no.such.invalid"):
        problem = address_problem(host)
        assert problem is not None
        assert problem.startswith(f"weights.host = {host!r} is no address of this machine: ")


def test_every_relay_and_every_rank_needs_ports():
    first = next(n for n in iter(free_port, None) if free_of(range(n, n + 10)) == 10)
    weights = WeightsSection(ucx_port_range=f"{first}-{first + 9}")
    assert port_problem(weights, ranks=3) is None
    assert port_problem(WeightsSection(ucx_port_range=""), ranks=100) is None
    with ExitStack() as taken:
        for port in (first, first + 5):
            taken.enter_context(socket.create_server(("127.0.0.1", port)))
        assert port_problem(weights, ranks=2) is None
        problem = port_problem(weights, ranks=3)
    assert problem == (
        f"weights.ucx_port_range = '{first}-{first + 9}' has 8 free ports, 10 are needed: 4 for "
        "each relay, 2 for each rank of a group"
    )


def test_versions_need_a_folder_that_can_be_written_to(tmp_path, monkeypatch):
    assert memory_problem(str(tmp_path)) is None
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write nearly anywhere
    assert memory_problem(str(tmp_path)) == (
        f"{tmp_path} (weights.memory_folder) is read-only, or not for this user to write to"
    )


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("weights.host", "192.0.2.1", "weights.host = '192.0.2.1' is no address"),
        ("weights.ucx_port_range", "46000-46002", "free ports, 6 are needed"),
        ("weights.memory_folder", "/nowhere", "there is no /nowhere"),
    ],
)
def test_nothing_is_tried_where_it_cannot_work(monkeypatch, key, value, told):
    def tried(weights):
        raise AssertionError("nothing is to be tried")

    monkeypatch.setattr(facts, "probe", tried)
    problem = gather(resolve_overrides([Override(key, value)])).nixl_problem
    assert problem is not None and told in problem
