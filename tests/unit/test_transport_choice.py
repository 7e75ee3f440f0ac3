"""The transport of a job: chosen once, with its reason."""

import socket
from dataclasses import replace
from importlib.util import find_spec

import pytest

from torchtitan_rl_ft.config.command_line import Override
from torchtitan_rl_ft.config.errors import ConfigError
from torchtitan_rl_ft.config.resolve import Resolved, resolve
from torchtitan_rl_ft.config.session_identity import CHOSEN_KEY, frozen, identify
from torchtitan_rl_ft.config.weights import WeightsSection
from torchtitan_rl_ft.models.tiny import make_tiny_model
from torchtitan_rl_ft.roles.transport import as_written, with_transport
from torchtitan_rl_ft.run_folder import ProcessId
from torchtitan_rl_ft.session_folder import ServingAt, SessionFolder, SessionRecord
from torchtitan_rl_ft.weights.transports import facts
from torchtitan_rl_ft.weights.transports.choice import (
    Choice,
    Facts,
    TransportUnavailable,
    choose,
    copies_held,
)
from torchtitan_rl_ft.weights.transports.facts import observe

WORKS = Facts(
    nixl_problem=None, image_bytes=1000, copies=6, free_bytes=6000, memory_folder="/dev/shm"
)
CANNOT = {
    "not installed": replace(WORKS, nixl_problem="nixl-cu13 is not installed"),
    "external_urls": replace(WORKS, external_engines=True),
    "/dev/shm has room for": replace(WORKS, free_bytes=5999),
}


def test_where_nixl_works_auto_is_nixl():
    assert choose("auto", WORKS) == Choice("nixl", "NIXL works here")
    assert choose("nixl", WORKS).transport == "nixl"
    assert choose("disk", WORKS) == Choice("disk", "as configured")


@pytest.mark.parametrize("why", CANNOT)
def test_where_it_does_not_auto_falls_back_and_says_why_and_nixl_is_an_error(why):
    found = choose("auto", CANNOT[why])
    assert found.transport == "disk" and why in found.reason
    with pytest.raises(TransportUnavailable, match=why):
        choose("nixl", CANNOT[why])
    assert choose("disk", CANNOT[why]).transport == "disk"


def test_a_debug_mode_moves_nothing_and_so_refuses_nothing():
    for found in (WORKS, *CANNOT.values()):
        idle = replace(found, policies_travel=False)
        assert choose("nixl", idle).transport == choose("auto", idle).transport == "disk"


def test_every_relay_and_every_group_holds_two_versions():
    assert copies_held(holders=1, groups=2) == 6


def test_a_model_of_unknown_size_is_no_reason_against_it():
    assert choose("auto", replace(WORKS, image_bytes=0, free_bytes=0)).transport == "nixl"


# Of a job --------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def job(home, *argv):
    return resolve(["--job.dump_folder", str(home / "run"), *argv])


def test_the_choice_is_part_of_the_jobs_configuration_and_survives_overrides(home, capsys):
    chosen = with_transport(job(home), lambda _: WORKS)
    assert chosen.get(CHOSEN_KEY) == "nixl" and not chosen.given(CHOSEN_KEY)
    assert "weights travel by nixl: NIXL works here" in capsys.readouterr().err
    assert any("NIXL works here" in note for note in chosen.notes)
    chosen.write()
    read = Resolved.read(chosen.run_folder.path)
    again = read.with_overrides([Override("fault_tolerance.replica_id", 1)])
    assert again.get(CHOSEN_KEY) == "nixl"
    by_hand = as_written(job(home), chosen.run_folder)
    assert by_hand.get(CHOSEN_KEY) == "nixl"
    disk = job(home, "--rollout.weight_transport", "disk")
    assert with_transport(disk, lambda _: WORKS) is disk
    assert as_written(disk, chosen.run_folder) is disk


def test_the_choice_is_no_part_of_the_sessions_name(home):
    for argv in ((), ("--checkpoint.no-enable",)):
        before = job(home, *argv)
        after = before.with_choice(CHOSEN_KEY, "nixl", "it works")
        assert identify(before) == identify(after)
        assert frozen(before) != frozen(after)


def test_a_living_session_keeps_its_transport(home):
    resolved = job(home)
    me = ProcessId.current()
    at = ServingAt(me.pid, me.start_time, socket.gethostname(), "http://127.0.0.1:9", "")
    folder = SessionFolder(identify(resolved).id)
    folder.write(SessionRecord(folder.id, "a rule", at, frozen={CHOSEN_KEY: "disk"}))
    found = with_transport(resolved, lambda _: WORKS)
    assert found.get(CHOSEN_KEY) == "disk" and "session" in found.origins[CHOSEN_KEY]


def test_nixl_that_cannot_be_refuses_the_start_and_says_why(home):
    wanted = job(home, "--rollout.weight_transport", "nixl")
    with pytest.raises(ConfigError, match=r"rollout\.weight_transport = 'nixl'.*not installed"):
        with_transport(wanted, lambda _: CANNOT["not installed"])


def test_what_is_asked_of_this_machine(home, monkeypatch):
    make_tiny_model(home / "run" / "model", 0)
    monkeypatch.setattr(facts, "nixl_problem", lambda weights: None)
    found = observe(job(home, "--weights.memory_folder", str(home)))
    size = (home / "run" / "model" / "model.safetensors").stat().st_size
    assert 0.9 * size < found.image_bytes <= size  # float32 there and here
    assert found.copies == copies_held(1, 1) and found.free_bytes > 0
    assert found.policies_travel and not found.external_engines
    nowhere = observe(job(home, "--weights.memory_folder", str(home / "none")))
    assert "weights.memory_folder" in (nowhere.nixl_problem or "")
    external = ("--rollout.external_urls", "http://h:1", "--rollout.engines", "0")
    assert observe(job(home, *external)).external_engines
    assert not observe(job(home, "--rollout.debug_mode", "rollout_only")).policies_travel


def test_nixl_is_tried_in_a_process_of_its_own(monkeypatch):
    weights = WeightsSection()
    if find_spec("nixl_cu13") is not None:
        assert facts.nixl_problem(weights) is None
        assert "NIXL" in (facts.nixl_problem(replace(weights, ucx_tls="nothing")) or "")
    monkeypatch.setattr(facts.nixl_check, "__name__", "no_such_module")
    assert "(1)" in (facts.nixl_problem(weights) or "")
