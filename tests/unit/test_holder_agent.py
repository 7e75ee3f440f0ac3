"""How the library is found, and what it is told before it is imported."""

import contextlib
import socket
from importlib import metadata

import pytest

from torchtitan_rl_ft.config.weights import WeightsSection
from torchtitan_rl_ft.host.ports import free_of, free_port
from torchtitan_rl_ft.weights.holder import agent
from torchtitan_rl_ft.weights.holder.agent import Agent, NixlError, NixlUnavailable


def test_devices_transports_and_ports_are_pinned():
    env = agent.ucx_environment(WeightsSection())
    assert env["UCX_NET_DEVICES"] == "lo"
    assert env["UCX_TCP_PORT_RANGE"] == "46000-46999"
    assert env["UCX_MODULES"] == "^ib"
    assert "UCX_TLS" not in env
    assert agent.ucx_environment(WeightsSection(ucx_tls="tcp"))["UCX_TLS"] == "tcp"


def test_ucx_tries_no_protocols_that_holders_do_not_use():
    """It would, for each connection, and look at the network devices for each of them."""
    protocols = agent.ucx_environment(WeightsSection())["UCX_PROTOS"].split(",")
    assert {"put/offload/*", "put/am/bcopy"} <= set(protocols)
    assert not any(p.startswith(("rndv", "tag", "get", "amo", "*")) for p in protocols)


def test_infiniband_is_loaded_where_it_may_be_used():
    for devices in ("mlx5_0:1", "eth0,mlx5_0:1", "all"):
        assert "UCX_MODULES" not in agent.ucx_environment(WeightsSection(ucx_devices=devices))
    assert "UCX_NET_DEVICES" not in agent.ucx_environment(WeightsSection(ucx_devices="all"))


def test_a_library_that_is_absent_is_one_clear_error(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    for find in (agent.nixl_version, lambda: agent.load(WeightsSection())):
        with pytest.raises(NixlUnavailable, match=r"pip install 'torchtitan_rl_ft\[ucx\]', or set"):
            find()


class Library:
    """As much of NIXL as an agent without its UCX plugin has."""

    class nixl_thread_sync_t:
        NIXL_THREAD_SYNC_STRICT = 1

    @staticmethod
    def nixl_agent_config(**fields):
        return fields

    class nixl_agent:
        def __init__(self, name, config):
            self.name, self.config, self.backends = name, config, {}


def test_a_library_without_ucx_is_an_error():
    with pytest.raises(NixlError, match="no UCX plugin"):
        Agent(Library, "relay-0")


@pytest.mark.parametrize("taken", [True, False])
def test_ports_that_are_used_up_are_named(taken):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1] if taken else free_port()
        weights = WeightsSection(ucx_port_range=f"{port}-{port}")
        with pytest.raises(NixlError, match="no UCX plugin") as told:
            agent.make(Library, "relay-0", weights)
    named = f"all ports of weights.ucx_port_range = '{port}-{port}' are taken"
    assert (named in str(told.value)) == taken


def test_a_range_that_is_used_up_is_never_given_to_the_library():
    """UCX would look for a free port in it for ever."""
    with contextlib.ExitStack() as taken:
        first = next(n for n in iter(free_port, None) if free_of(range(n, n + 4)) == 4)
        weights = WeightsSection(ucx_port_range=f"{first}-{first + 3}")
        for port in (first, first + 2, first + 3):
            taken.enter_context(socket.create_server(("127.0.0.1", port)))
        with pytest.raises(NixlError) as told:
            agent.make(None, "relay-0", weights)
    assert str(told.value) == (
        f"making a NIXL agent: all ports but 1 of weights.ucx_port_range = "
        f"'{first}-{first + 3}' are taken"
    )


def test_no_two_agents_have_one_name(monkeypatch):
    monkeypatch.setattr(agent, "BACKEND", "mine")
    made = []

    class WithBackend(Library):
        class nixl_agent(Library.nixl_agent):
            def __init__(self, name, config):
                super().__init__(name, config)
                self.backends = {"mine": 1}
                made.append((name, config))

    for _ in range(3):
        Agent(WithBackend, "relay-0")
    names = {name for name, _ in made}
    assert len(names) == 3 and all(n.startswith("relay-0-") for n in names)
    assert all(not c["enable_prog_thread"] and c["sync_mode"] == 1 for _, c in made)
