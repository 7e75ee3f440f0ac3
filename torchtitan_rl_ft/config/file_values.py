"""The typed values of a TOML file, or everything that is wrong with it."""

from __future__ import annotations

from typing import Any

from torchtitan_rl_ft.config.aliases import canonical, given_twice
from torchtitan_rl_ft.config.errors import ConfigError, near_miss
from torchtitan_rl_ft.config.retired import retired
from torchtitan_rl_ft.config.schema import Schema, load_schema
from torchtitan_rl_ft.config.toml_file import TomlFile
from torchtitan_rl_ft.config.value_types import WrongValue

Values = dict[str, dict[str, Any]]
"""section -> key -> value."""


def file_values(file: TomlFile) -> Values:
    """Raises ConfigError with every problem of the file."""
    schema = load_schema()
    values: Values = {}
    problems: list[str] = []
    for section, table in file.data.items():
        found, wrong = _section_values(schema, file, section, table)
        values[section] = found
        problems += wrong
    if "config_file" in values.get("job", {}):
        place = file.place("job", "config_file")
        problems.append(f"{place}: job.config_file would name this very file; leave it out")
    if problems:
        raise ConfigError(problems)
    return values


def _section_values(
    schema: Schema, file: TomlFile, section: str, table: Any
) -> tuple[dict[str, Any], list[str]]:
    """The values of one section and its problems."""
    place = file.place(section)
    if message := retired(section):
        return {}, [f"{place}: {message}"]
    if not isinstance(table, dict):
        hint = _stray_hint(schema, section)
        return {}, [f"{place}: {section} stands outside of a [section]{hint}"]
    if section not in schema.sections:
        return {}, [f"{place}: unknown section [{section}]{near_miss(section, schema.sections)}"]
    values: dict[str, Any] = {}
    problems: list[str] = []
    names: dict[str, list[str]] = {}
    for key, value in table.items():
        path, place = f"{section}.{key}", file.place(section, key)
        if message := retired(path):
            problems.append(f"{place}: {message}")
            continue
        path = canonical(path)
        name = path.partition(".")[2]
        names.setdefault(path, []).append(f"{section}.{key}")
        if twice := given_twice(path, names[path]):
            problems.append(f"{place}: {twice}")
            continue
        try:
            values[name] = schema.find(path).type.accept(value)
        except ConfigError as e:
            problems.append(f"{place}: {e}")
        except WrongValue as e:
            problems.append(f"{place}: {e.at(path)}")
    return values, problems


def _stray_hint(schema: Schema, key: str) -> str:
    homes = [s.name for s in schema.sections.values() if key in s.keys]
    return f"; did you mean '{homes[0]}.{key}'?" if len(homes) == 1 else ""
