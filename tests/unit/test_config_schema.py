"""The snapshots of TorchTitan's sections and of our registry function, and registered sections."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from importlib.resources import files
from pathlib import Path

import pytest
from config_jobs import job, no_registry

from torchtitan_rl_ft.config import schema as schema_module
from torchtitan_rl_ft.config.errors import ConfigError
from torchtitan_rl_ft.config.help_texts import help_texts
from torchtitan_rl_ft.config.resolve import Resolved, resolve
from torchtitan_rl_ft.config.retired import RETIRED
from torchtitan_rl_ft.config.schema import TITAN_SNAPSHOT, load_schema
from torchtitan_rl_ft.config.sections import FaultToleranceSection

CONFIG = files("torchtitan_rl_ft").joinpath("config")


@pytest.mark.timeout(120)
def test_the_snapshot_is_that_of_the_installed_torchtitan() -> None:
    from torchtitan_rl_ft.config.titan_introspection import introspect, to_text

    assert CONFIG.joinpath(TITAN_SNAPSHOT).read_text() == to_text(introspect()), (
        "write it anew: python -m torchtitan_rl_ft.config.titan_introspection"
    )


@pytest.mark.timeout(120)
def test_the_registry_snapshot_is_that_of_our_base() -> None:
    from torchtitan_rl_ft.config import registry

    found = registry.values_of(registry.call(registry.OWN_MODULE, registry.BASE))
    assert json.loads(CONFIG.joinpath(registry.SNAPSHOT).read_text()) == found, (
        "write it anew: python -m torchtitan_rl_ft.config.registry"
    )


@pytest.mark.row("A6")
@pytest.mark.timeout(120)
def test_fault_tolerance_has_torchtitans_keys_and_defaults() -> None:
    from torchtitan.experiments.torchft.config import FaultTolerance

    ours = FaultToleranceSection()
    theirs = FaultTolerance()
    for field in dataclasses.fields(FaultTolerance):
        assert getattr(ours, field.name) == getattr(theirs, field.name), field.name
    assert (ours.enable, ours.process_group, ours.process_group_timeout_ms) == (
        False,
        "gloo",
        10000,
    )
    assert (ours.replica_id, ours.group_size, ours.min_replica_size) == (0, 0, 1)
    assert ours.semi_sync_method is None


@pytest.mark.timeout(120)
def test_the_trainer_config_has_a_field_for_each_of_our_keys() -> None:
    from torchtitan_rl_ft.replica.group import ReplicaGroup

    theirs = {f.name: f for f in dataclasses.fields(ReplicaGroup.Config)}
    for field in dataclasses.fields(FaultToleranceSection):
        assert schema_module.default_of(theirs[field.name]) == schema_module.default_of(field)


def test_every_key_of_ours_has_a_help_text() -> None:
    for section in load_schema().sections.values():
        if section.dataclass is not None:
            assert set(help_texts(section)) == set(section.keys), section.name


def test_torchtitans_keys_are_explained_by_its_source() -> None:
    sections = load_schema().sections
    for name in ("training", "checkpoint", "optimizer", "activation_checkpoint", "profiling"):
        explained = help_texts(sections[name])
        assert len(explained) == len(sections[name].keys), name


def test_nothing_is_both_known_and_retired() -> None:
    schema = load_schema()
    known = {*schema.sections, *(key.path for key in schema.all_keys())}
    assert known & set(RETIRED) == set()


@dataclass(kw_only=True)
class GreetingSection:
    """What another package could register."""

    words: list[str] = dataclasses.field(default_factory=lambda: ["hello"])
    """Words to say."""

    loud: bool = False
    """Say them loudly."""


NOT_A_SECTION = 5


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Let other packages register sections: register(name, "module:attribute")."""

    def register(name: str, value: str) -> None:
        point = EntryPoint(name, value, schema_module.ENTRY_POINT_GROUP)
        monkeypatch.setattr(schema_module, "entry_points", lambda group: [point])
        load_schema.cache_clear()

    yield register
    monkeypatch.undo()
    load_schema.cache_clear()


def test_a_package_can_register_a_section(register, tmp_path: Path) -> None:
    register("greeting", f"{__name__}:GreetingSection")
    resolved = job(
        tmp_path, '[greeting]\nwords = ["good", "day"]\n', "--greeting.loud", registry=no_registry
    )
    assert resolved.extra["greeting"] == GreetingSection(words=["good", "day"], loud=True)
    assert resolved.origins["greeting.words"].endswith("job.toml:2")
    again = Resolved.read(resolved.with_overrides([]).write(resolved.run_folder).parent)
    assert again.extra == resolved.extra
    with pytest.raises(ConfigError, match="did you mean 'greeting.words'"):
        job(tmp_path, "[greeting]\nword = []\n")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rl", "GreetingSection", r"\[rl\].* already exists"),
        ("greeting", "NOT_A_SECTION", "is not a dataclass"),
    ],
)
def test_a_bad_registration_is_an_error(register, name: str, value: str, message: str) -> None:
    register(name, f"{__name__}:{value}")
    with pytest.raises(ConfigError, match=message):
        resolve([])
