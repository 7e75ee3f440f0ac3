"""One job, resolved: command line over TOML over registry function over defaults, each value
with its origin. No torch here."""

from __future__ import annotations

import copy
import dataclasses
import json
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.config.aliases import spelled
from torchtitan_rl_ft.config.automatic import automatic_values, splittable_groups
from torchtitan_rl_ft.config.command_line import Override, split_overrides
from torchtitan_rl_ft.config.errors import ConfigError
from torchtitan_rl_ft.config.file_values import Values, file_values
from torchtitan_rl_ft.config.registry import registry_values
from torchtitan_rl_ft.config.schema import load_schema
from torchtitan_rl_ft.config.sections import Sections
from torchtitan_rl_ft.config.toml_file import read_toml
from torchtitan_rl_ft.config.value_types import WrongValue
from torchtitan_rl_ft.run_folder import RunFolder, write_atomic

DEFAULT = "default"
COMMAND_LINE = "command line"
REGISTRY = "registry "
LOWERED = ", lowered so that the layout can split the batch, from "
AUTOMATIC = "automatic: "
CHOSEN = "chosen at the start: "
"""For the whole job; it is not derived anew, as what is automatic is."""


@dataclass(frozen=True)
class Resolved:
    """Every value of a job and where it came from."""

    values: Values
    """section -> key -> value, of every section."""

    origins: dict[str, str]
    """"section.key" -> "default", "registry module:function", "file:line", "command line",
    "automatic: why" or "chosen at the start: why"."""

    missing: tuple[str, ...] = ()
    """Keys that another version of this package has not written, or with another type: they have
    their defaults here."""

    sections: Sections = field(init=False)
    """This package's sections as dataclasses."""

    extra: dict[str, Any] = field(init=False)
    """Sections of other packages as their dataclasses."""

    def __post_init__(self) -> None:
        schema = load_schema()
        own = {f.name for f in dataclasses.fields(Sections)}
        built = {
            name: _built(section.dataclass, copy.deepcopy(self.values[name]))
            for name, section in schema.sections.items()
            if section.dataclass is not None
        }
        object.__setattr__(self, "sections", Sections(**{n: built[n] for n in own}))
        object.__setattr__(self, "extra", {n: s for n, s in built.items() if n not in own})

    @property
    def titan(self) -> Values:
        """The values of TorchTitan's own sections."""
        schema = load_schema()
        return {n: v for n, v in self.values.items() if schema.sections[n].dataclass is None}

    @property
    def run_folder(self) -> RunFolder:
        return RunFolder(self.sections.job.dump_folder)

    @property
    def version_note(self) -> str | None:
        """What a reader of a job of another version should know."""
        if not self.missing:
            return None
        first = ", ".join(self.missing[:3]) + (", ..." if len(self.missing) > 3 else "")
        return (
            f"{self.run_folder.resolved_config} was written by another version of this package: "
            f"{len(self.missing)} keys have their defaults here ({first})"
        )

    @property
    def notes(self) -> list[str]:
        """What was decided for the user, a line each."""
        return [
            f"{path} = {self.get(path)!r} ({origin})"
            for path, origin in self.origins.items()
            if origin.startswith((AUTOMATIC, CHOSEN))
        ]

    def get(self, path: str) -> Any:
        """The value of "section.key"."""
        section, _, key = path.partition(".")
        return self.values[section][key]

    def given(self, path: str) -> bool:
        """True when a person set the value, in the TOML or on the command line."""
        origin = self.origins[path]
        return origin != DEFAULT and not origin.startswith((REGISTRY, AUTOMATIC, CHOSEN))

    def where(self, path: str) -> str:
        """`section.key = value (origin)`, for messages."""
        return f"{path} = {self.get(path)!r} ({self.origins[path]})"

    def with_overrides(self, overrides: Sequence[Override]) -> Resolved:
        """The same job with values from the command line on top."""
        values, origins = copy.deepcopy(self.values), dict(self.origins)
        _put_overrides(values, origins, overrides)
        return _finished(values, origins)

    def with_choice(self, path: str, value: Any, why: str) -> Resolved:
        """The same job with a value that was left to its start."""
        values, origins = copy.deepcopy(self.values), dict(self.origins)
        section, _, key = path.partition(".")
        values[section][key] = value
        origins[path] = f"{CHOSEN}{why}"
        return Resolved(values, origins)

    def write(self, folder: RunFolder | None = None) -> Path:
        """Write `config.resolved.json` into the run folder and return its path."""
        path = (folder or self.run_folder).resolved_config
        data = {"values": self.values, "origins": self.origins}
        write_atomic(path, json.dumps(data, indent=1, allow_nan=False).encode() + b"\n")
        return path

    @classmethod
    def read(cls, path: str | Path, *, only_to_look: bool = False) -> Resolved:
        """Read `config.resolved.json` (or a run folder that holds one). The folder of the file
        is the run folder, wherever it was moved. `only_to_look`: what another version of this
        package wrote is read too (see `missing`); nothing is started from that. Raises
        ConfigError."""
        path = Path(path)
        if not path.is_file():
            path = RunFolder(path).resolved_config
        try:
            data = json.loads(path.read_bytes())
            values, origins = data["values"], dict(data["origins"])
        except FileNotFoundError:
            raise ConfigError(
                f"{path} does not exist: start the job with `torchtitan run`, or name its file "
                "with --job.config_file"
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise ConfigError(f"{path} cannot be read: {e}") from None
        checked, wrong = _checked(values)
        if wrong and not (only_to_look and isinstance(values, dict)):
            raise ConfigError(f"{path}: {next(iter(wrong.values()))}")
        checked["job"]["dump_folder"] = str(path.resolve().parent)
        known = {p: origins.get(p, DEFAULT) for p in _paths()}
        return cls(checked, known, tuple(wrong))


def resolve(
    argv: Sequence[str] = (),
    *,
    registry: Callable[[str, str], Values] = registry_values,
) -> Resolved:
    """Resolve `--section.key value` arguments, `--job.config_file` among them.

    Raises ConfigError with every problem of a stage: command line, then file, then registry.
    """
    overrides, rest = split_overrides(load_schema(), argv)
    if rest:
        raise ConfigError(f"command line: {rest[0]!r} is no --section.key")
    return resolve_overrides(overrides, registry=registry)


def resolve_overrides(
    overrides: Sequence[Override],
    *,
    registry: Callable[[str, str], Values] = registry_values,
) -> Resolved:
    """`resolve` for arguments that are parsed already."""
    given = {o.path: o.value for o in overrides}
    name = given.get("job.config_file", "")
    file = read_toml(name) if name else None
    from_file = file_values(file) if file is not None else {}
    values, origins = _defaults()
    base = {
        key: given.get(f"job.{key}", from_file.get("job", {}).get(key, values["job"][key]))
        for key in ("module", "config")
    }
    origin = f"{REGISTRY}{base['module']}:{base['config']}"
    for section, keys in registry(base["module"], base["config"]).items():
        for key, value in keys.items():
            values[section][key] = value
            origins[f"{section}.{key}"] = origin
    for section, keys in from_file.items():
        for key, value in keys.items():
            assert file is not None
            values[section][key] = value
            written = spelled(section, key, file.data[section])
            origins[f"{section}.{key}"] = file.place(section, written)
    _put_overrides(values, origins, overrides)
    return _finished(values, origins)


def _put_overrides(values: Values, origins: dict[str, str], overrides: Sequence[Override]) -> None:
    for override in overrides:
        section, _, key = override.path.partition(".")
        values[section][key] = override.value
        origins[override.path] = COMMAND_LINE


def _finished(values: Values, origins: dict[str, str]) -> Resolved:
    """Add what follows from the rest, anew when the rest has changed."""
    schema = load_schema()
    for path, origin in origins.items():
        if origin.startswith(AUTOMATIC):
            key = schema.find(path)
            values[key.section][key.name] = copy.deepcopy(key.default)
            origins[path] = DEFAULT
    for path, (value, why) in automatic_values(values, origins).items():
        section, _, key = path.partition(".")
        values[section][key] = value
        origins[path] = AUTOMATIC + why
    if (groups := splittable_groups(values)) is not None:
        before = values["rl"]["groups_per_step"]
        values["rl"]["groups_per_step"] = groups
        origins["rl.groups_per_step"] += f"{LOWERED}{before}"
    return Resolved(values, origins)


def _built(cls: type, values: dict[str, Any]) -> Any:
    """A section of its values; the tables of a list become what their annotation says."""
    for name, hint in typing.get_type_hints(cls).items():
        item = next(iter(typing.get_args(hint)), None)
        is_list = typing.get_origin(hint) is list
        if is_list and isinstance(item, type) and dataclasses.is_dataclass(item):
            values[name] = [item(**table) for table in values[name]]
    return cls(**values)


def _paths() -> typing.Iterator[str]:
    return (key.path for key in load_schema().all_keys())


def _defaults() -> tuple[Values, dict[str, str]]:
    sections = load_schema().sections
    values = {
        name: {k.name: copy.deepcopy(k.default) for k in section.keys.values()}
        for name, section in sections.items()
    }
    return values, {path: DEFAULT for path in _paths()}


def _checked(values: Any) -> tuple[Values, dict[str, str]]:
    """Values of a resolved file, every known key, of its type; and by key what is wrong with
    those that have their default here."""
    checked: Values = {}
    wrong = {}
    for section in load_schema().sections.values():
        checked[section.name] = {}
        for key in section.keys.values():
            try:
                value = key.type.accept(values[section.name][key.name])
            except (KeyError, TypeError):
                value = copy.deepcopy(key.default)
                wrong[key.path] = (
                    f"{key.path} is missing: written by another version of this package?"
                )
            except WrongValue as e:
                value = copy.deepcopy(key.default)
                wrong[key.path] = f"{key.path}: {e}"
            checked[section.name][key.name] = value
    return checked, wrong
