"""Every section and key that a job may set: TorchTitan's own from a snapshot, ours from their
dataclasses, other packages' through an entry point. No torch here."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from importlib.resources import files
from typing import Any

from torchtitan_rl_ft.config.errors import ConfigError, near_miss
from torchtitan_rl_ft.config.sections import Sections
from torchtitan_rl_ft.config.value_types import ValueType

ENTRY_POINT_GROUP = "torchtitan_rl_ft.sections"
"""`name = "module:Dataclass"` entries of this group add sections."""

TITAN_SNAPSHOT = "titan_schema.json"


@dataclass(frozen=True)
class Key:
    """One `section.key`."""

    section: str
    name: str
    type: ValueType
    default: Any

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}"


@dataclass(frozen=True)
class Section:
    name: str
    keys: dict[str, Key]
    dataclass: type | None
    """None for TorchTitan's sections, which are overlaid on its own config instead."""

    sources: tuple[tuple[str, str], ...] = ()
    """(module, class) of TorchTitan's config classes, bases first."""


@dataclass(frozen=True)
class Schema:
    sections: dict[str, Section]

    def find(self, path: str) -> Key:
        """The key at `section.key`. Raises ConfigError naming a near miss."""
        section, _, name = path.partition(".")
        if section not in self.sections:
            hint = near_miss(section, self.sections)
            raise ConfigError(f"unknown section [{section}]{hint}")
        keys = self.sections[section].keys
        if name not in keys:
            raise ConfigError(f"unknown key {path}{self._hint(section, name)}")
        return keys[name]

    def _hint(self, section: str, name: str) -> str:
        if hint := near_miss(name, self.sections[section].keys):
            return hint.replace("mean '", f"mean '{section}.")
        others = [s for s, found in self.sections.items() if name in found.keys]
        return f"; did you mean '{others[0]}.{name}'?" if len(others) == 1 else ""

    def all_keys(self) -> Iterable[Key]:
        for section in self.sections.values():
            yield from section.keys.values()


@cache
def load_schema() -> Schema:
    """TorchTitan's sections, this package's, and those that other installed packages register.

    Raises ConfigError when a registered section clashes or is no plain dataclass.
    """
    sections = _titan_sections()
    for f in dataclasses.fields(Sections):
        cls = typing.get_type_hints(Sections)[f.name]
        sections[f.name] = _of_dataclass(f.name, cls)
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda p: p.name):
        if point.name in sections:
            raise ConfigError(
                f"section [{point.name}], registered by {point.value}, already exists"
            )
        cls = point.load()
        if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
            raise ConfigError(f"section [{point.name}]: {point.value} is not a dataclass")
        sections[point.name] = _of_dataclass(point.name, cls)
    return Schema(sections)


def _titan_sections() -> dict[str, Section]:
    text = files("torchtitan_rl_ft").joinpath("config").joinpath(TITAN_SNAPSHOT).read_text()
    sections: dict[str, Section] = {}
    for name, section in json.loads(text)["sections"].items():
        keys = {
            key: Key(name, key, ValueType.from_json(data["type"]), data["default"])
            for key, data in section["keys"].items()
        }
        sources = tuple((module, cls) for module, cls in section["sources"])
        sections[name] = Section(name, keys, None, sources)
    return sections


def _of_dataclass(section: str, cls: type) -> Section:
    hints = typing.get_type_hints(cls)
    keys = {
        f.name: Key(section, f.name, ValueType.of(hints[f.name]), default_of(f))
        for f in dataclasses.fields(cls)
    }
    return Section(section, keys, cls)


def default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default
