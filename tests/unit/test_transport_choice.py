"""The transport of a job: chosen once, with its reason."""

from dataclasses import replace

import pytest

from torchtitan_rl_ft.config.command_line import Override
from torchtitan_rl_ft.config.resolve import Resolved, resolve
from torchtitan_rl_ft.weights.transports.choice import (
    Choice,
    Facts,
    TransportUnavailable,
    choose,
    copies_held,
)

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


def test_the_choice_is_part_of_the_jobs_configuration_and_survives_overrides(tmp_path):
    """Roles read it from the run folder, and have arguments of their own."""
    key = "rollout.weight_transport"
    job = resolve(["--job.dump_folder", str(tmp_path)])
    chosen = job.with_choice(key, "nixl", "NIXL works here")
    assert chosen.get(key) == chosen.sections.rollout.weight_transport == "nixl"
    assert not chosen.given(key) and job.get(key) == "auto"
    assert any("NIXL works here" in note for note in chosen.notes)
    chosen.write()
    read = Resolved.read(tmp_path)
    assert read.with_overrides([Override("fault_tolerance.replica_id", 1)]).get(key) == "nixl"
