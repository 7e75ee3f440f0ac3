"""The transport of a job on this machine: NIXL is tried before anything is started."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest

from torchtitan_rl_ft.config.command_line import Override
from torchtitan_rl_ft.config.errors import ConfigError
from torchtitan_rl_ft.config.resolve import Resolved, resolve_overrides
from torchtitan_rl_ft.config.weights import WeightsSection
from torchtitan_rl_ft.models.tiny import make_tiny_model
from torchtitan_rl_ft.roles import transport
from torchtitan_rl_ft.roles.session import Session
from torchtitan_rl_ft.run_folder import ProcessId
from torchtitan_rl_ft.weights.holder.files import HolderFiles
from torchtitan_rl_ft.weights.holder.settings import HolderSettings
from torchtitan_rl_ft.weights.transports.facts import gather, image_bytes
from torchtitan_rl_ft.weights.transports.probe import Probe, probe

NIXL = pytest.importorskip("nixl_cu13", reason="weights over UCX need the extra ucx")


@pytest.fixture(autouse=True)
def private_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def job(tmp_path: Path, **values: object) -> Resolved:
    given = {"job.dump_folder": str(tmp_path / "run")}
    given |= {k.replace("__", "."): v for k, v in values.items()}
    return resolve_overrides([Override(k, v) for k, v in given.items()])


def test_a_push_between_two_processes_comes_through() -> None:
    found = probe(WeightsSection())
    assert found.problem is None
    assert found.ucx


def test_ports_that_are_all_taken_are_one_clear_error() -> None:
    with socket.socket() as s:
        s.bind(("0.0.0.0", 0))
        s.listen()
        port = s.getsockname()[1]
        taken = f"{port}-{port}"
        problem = probe(WeightsSection(ucx_port_range=taken, ucx_tls="tcp")).problem
    assert problem is not None
    assert f"all ports of weights.ucx_port_range = {taken!r} are taken" in problem
    assert "\n" not in problem


def test_auto_is_nixl_here_and_disk_where_it_cannot_be(tmp_path: Path) -> None:
    resolved = job(tmp_path)
    decided, choice = transport.decide(resolved, Session(resolved))
    assert decided.sections.rollout.weight_transport == choice.transport == "nixl"
    assert any("NIXL works here" in note for note in decided.notes)
    assert Session(decided).folder.id == Session(resolved).folder.id, "the same session"

    resolved = job(tmp_path, weights__memory_folder=str(tmp_path / "none"))
    decided, choice = transport.decide(resolved, Session(resolved))
    assert decided.sections.rollout.weight_transport == "disk"
    assert "there is no" in choice.reason and "weights.memory_folder" in choice.reason


def test_nixl_that_cannot_be_is_an_error(tmp_path: Path) -> None:
    resolved = job(
        tmp_path,
        rollout__weight_transport="nixl",
        weights__memory_folder=str(tmp_path / "none"),
    )
    with pytest.raises(ConfigError, match=r"weight_transport = 'nixl' .*there is no"):
        transport.decide(resolved, Session(resolved))


def test_a_model_that_does_not_fit_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_model(tmp_path / "model", seed=0)
    size = image_bytes(model, "float32")
    assert size > 0
    resolved = job(tmp_path, model__hf_assets_path=str(model))
    works = Probe(None)
    copies = gather(resolved, works).copies
    assert copies == 2 * (1 + resolved.sections.fault_tolerance.replica_groups)
    usage = type("Usage", (), {"free": size * copies - 1})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match="has room for"):
        strict = job(tmp_path, model__hf_assets_path=str(model), rollout__weight_transport="nixl")
        transport.decide(strict, Session(strict))


def test_a_session_that_goes_on_keeps_its_transport(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def untried(*_: object) -> None:
        raise AssertionError("nothing is to be tried")

    monkeypatch.setattr(transport, "gather", untried)
    auto, strict = job(tmp_path), job(tmp_path, rollout__weight_transport="nixl")
    disk = job(tmp_path, rollout__weight_transport="disk")
    for in_use in ("disk", "nixl"):
        monkeypatch.setattr(Session, "transport_in_use", lambda _, found=in_use: found)
        decided, choice = transport.decide(auto, Session(auto))
        assert decided.get(transport.KEY) == choice.transport == in_use
        assert "goes on" in choice.reason
        assert transport.decide(disk, Session(disk))[1].transport == "disk", "it takes folders too"
    assert transport.decide(strict, Session(strict))[1].transport == "nixl", "no room is needed"
    monkeypatch.setattr(Session, "transport_in_use", lambda _: "disk")
    with pytest.raises(ConfigError, match=r"weight_transport = 'nixl'.* has no relays"):
        transport.decide(strict, Session(strict))


def test_what_a_killed_run_left_in_memory_keeps_none_from_the_next(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    weights = WeightsSection(memory_folder=str(memory))
    dead = ProcessId(pid=ProcessId.current().pid, start_time=1.0)
    left, used = (
        HolderSettings("relay-0", "relay", f"run-{n}", weights, owner, serving_url="http://x")
        for n, owner in enumerate((dead, ProcessId.current()))
    )
    for settings in (used, left):
        files = HolderFiles(settings)
        files.open()
        os.close(files._lock)  # as its end does
    resolved = job(tmp_path, weights__memory_folder=str(memory))
    transport.decide(resolved, Session(resolved))
    assert (used.folder.exists(), left.folder.exists()) == (True, False)
