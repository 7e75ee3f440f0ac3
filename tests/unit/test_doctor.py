"""`torchtitan doctor` on machines of all kinds; the trial push is told, not made."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from torchtitan_rl_ft import cli
from torchtitan_rl_ft.config.command_line import Override
from torchtitan_rl_ft.config.resolve import Resolved, resolve_overrides
from torchtitan_rl_ft.config.weights import WeightsSection
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.roles import doctor
from torchtitan_rl_ft.weights.transports.pages import Mount, has_huge_pages
from torchtitan_rl_ft.weights.transports.probe import Probe

WORKS = Probe(None, 0.7, "1.23.0")
FAILS = Probe("no device is found")


def resolved(**values: object) -> Resolved:
    return resolve_overrides([Override(k.replace("__", "."), v) for k, v in values.items()])


def found(name: str, job: Resolved) -> doctor.Finding:
    return next(f for f in doctor.examine(job) if f.name == name)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[Probe]:
    """What the trial push comes to."""
    results = [WORKS]
    monkeypatch.setattr(doctor, "probe", lambda weights: results[-1])
    return results


def test_a_machine_on_which_all_works(
    tried: list[Probe], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--json"]) == ExitCode.DONE
    told = json.loads(capsys.readouterr().out)
    names = [f["name"] for f in told["findings"]]
    for name in (
        "torch",
        "sglang",
        "torchft",
        "disk",
        "nixl",
        "address",
        "ports",
        "memory",
        "ptrace",
    ):
        assert name in names
    nixl = next(f for f in told["findings"] if f["name"] == "nixl")
    assert "UCX 1.23.0" in nixl["text"]
    assert told["ok"]
    assert cli.main(["doctor"]) == ExitCode.DONE
    assert all(line.startswith(("ok ", "note ")) for line in capsys.readouterr().out.splitlines())


def test_nixl_that_does_not_work_is_a_fault_only_where_it_is_asked_for(
    tried: list[Probe], capsys: pytest.CaptureFixture[str]
) -> None:
    tried.append(FAILS)
    assert cli.main(["doctor"]) == ExitCode.DONE
    out = capsys.readouterr().out
    assert "rollout.weight_transport = 'auto' (default) is disk: see nixl" in out
    assert "not usable: no device is found" in out
    assert cli.main(["doctor", "--rollout.weight_transport", "nixl"]) == ExitCode.FAILED
    assert "FAULT  transport" in capsys.readouterr().out


def test_what_cannot_be_in_weights_is_refused_before_anything_is_tried(
    tried: list[Probe], capsys: pytest.CaptureFixture[str]
) -> None:
    tried.clear()
    assert cli.main(["doctor", "--weights.ucx_port_range", "x"]) == ExitCode.CONFIG
    assert "FIRST-LAST" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("installed", "ok", "text"),
    [
        ("2.14.1+cpu", True, "2.14.1+cpu"),
        ("2.13.0", False, "2.13.0"),
        (None, False, "not installed"),
    ],
)
def test_versions_are_those_that_this_package_was_made_for(
    installed: str | None, ok: bool, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name == "sglang" or installed is None:
            raise doctor.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(doctor.metadata, "version", version)
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: ["torch==2.14.1", "rich>=13"])
    findings = {f.name: f for f in doctor.libraries()}
    assert (findings["torch"].ok, findings["torch"].text) == (ok, text)
    assert findings["sglang"].ok is None, "roles are installed on machines of their own"
    assert findings["sglang"].mend == "pip install 'torchtitan_rl_ft[sglang]'"


def test_networks_and_ports() -> None:
    assert doctor.network(WeightsSection()).ok
    assert doctor.network(WeightsSection(ucx_devices="all")).ok is None
    absent = doctor.network(WeightsSection(ucx_devices="lo,nope0"))
    assert absent.ok is False
    assert "there is no nope0" in absent.text
    assert doctor.ports(WeightsSection(ucx_port_range=""), 1).ok is None
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        taken = doctor.ports(WeightsSection(ucx_port_range=f"{port}-{port}"), 1)
    assert taken.ok is False
    assert "has 0 free ports, 6 are needed" in taken.text


def test_the_address_of_holders(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.address(WeightsSection()).ok
    assert doctor.address(WeightsSection(host="localhost")).ok
    elsewhere = doctor.address(WeightsSection(host="192.0.2.1"))  # of nobody (RFC 5737)
    assert elsewhere.ok is False
    assert "weights.host = '192.0.2.1' is no address of this machine" in elsewhere.text
    assert doctor.address(WeightsSection(host="no.such.invalid")).ok is False
    monkeypatch.setattr(doctor, "address_problem", lambda host: None)
    assert doctor.address(WeightsSection(host="192.0.2.1")).ok is None


def test_memory(tmp_path: Path) -> None:
    assert doctor.memory(WeightsSection(memory_folder=str(tmp_path / "no"))).ok is False
    told = doctor.memory(WeightsSection(memory_folder="/proc"))
    assert told.ok is None
    assert "/proc (proc)" in told.text


@pytest.mark.parametrize(
    ("shmem", "options", "huge"),
    [
        ("always [never] deny force", "rw,size=6g", False),
        ("always [never] deny force", "rw,huge=within_size,size=6g", True),
        ("[always] never deny force", "rw,huge=never", False),
        ("always never [deny] force", "rw,huge=always", False),
        ("always never deny [force]", "rw", True),
        (None, "rw,huge=always", False),
    ],
)
def test_whether_memory_has_huge_pages(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shmem: str | None,
    options: str,
    huge: bool,
) -> None:
    setting = tmp_path / "shmem_enabled"
    if shmem is not None:
        setting.write_text(f"{shmem}\n")
    mount = Mount("tmpfs", options)
    assert has_huge_pages(mount, setting) is huge
    monkeypatch.setattr(doctor, "mount_of", lambda folder: mount)
    monkeypatch.setattr(doctor, "has_huge_pages", lambda mount: has_huge_pages(mount, setting))
    told = doctor.pages(WeightsSection(memory_folder=str(tmp_path)))
    assert told.ok is (True if huge else None)
    assert ("huge=within_size" in told.mend) is not huge


def test_only_a_tmpfs_is_asked_for_its_pages(tmp_path: Path) -> None:
    for folder in (tmp_path / "no", Path("/proc")):
        assert doctor.pages(WeightsSection(memory_folder=str(folder))).text.endswith("is no tmpfs")


@pytest.mark.parametrize(
    ("scope", "tried", "ok", "mend"),
    [("0", FAILS, True, ""), ("1", WORKS, None, ""), ("2", FAILS, None, "ucx_tls")],
)
def test_whether_the_kernel_lets_processes_copy(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scope: str,
    tried: Probe,
    ok: bool | None,
    mend: str,
) -> None:
    yama = tmp_path / "ptrace_scope"
    yama.write_text(f"{scope}\n")
    monkeypatch.setattr(doctor, "YAMA", yama)
    told = doctor.copies_between_processes(WeightsSection(), tried)
    assert told.ok is ok
    assert mend in told.mend
