"""`--section.key value` on the command line, in TorchTitan's spelling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan_rl_ft.config.aliases import canonical, given_twice
from torchtitan_rl_ft.config.errors import ConfigError
from torchtitan_rl_ft.config.retired import retired
from torchtitan_rl_ft.config.schema import Key, Schema
from torchtitan_rl_ft.config.value_types import WrongValue

# TorchTitan 0.3 has these without a section, and calls the profiling section after its class.
_ALIASES = {
    "module": "job.module",
    "config": "job.config",
    "dump_folder": "job.dump_folder",
    "hf_assets_path": "model.hf_assets_path",
}
_SECTION_ALIASES = {"profiler": "profiling"}


@dataclass(frozen=True)
class Override:
    """One value given on the command line."""

    path: str
    value: Any


def split_overrides(schema: Schema, argv: Sequence[str]) -> tuple[list[Override], list[str]]:
    """Take `--section.key value` (or `=value`, or a bare flag) out of `argv`.

    Returns the overrides in order and what is left. `-` and `_` are the same in names;
    `--section.no-key` is false for a flag. Raises ConfigError with every problem.
    """
    found: list[Override] = []
    rest: list[str] = []
    problems: list[str] = []
    names: dict[str, list[str]] = {}
    at = 0
    while at < len(argv):
        token = argv[at]
        at += 1
        name, equals, text = token.partition("=")
        if not _is_override(name):
            rest.append(token)
            continue
        try:
            key, negated = _find(schema, name)
            value, used = _value(key, negated, text if equals else None, argv[at : at + 1])
        except (ConfigError, WrongValue) as e:
            problems.append(f"command line: {name}: {e}")
            at += bool(not equals and argv[at : at + 1] and not argv[at].startswith("--"))
            continue
        at += used
        found.append(Override(key.path, value))
        names.setdefault(key.path, []).append(_normal(name).replace(".no_", ".", 1))
    twice = (given_twice(path, spellings) for path, spellings in names.items())
    problems += [f"command line: {message}" for message in twice if message]
    if problems:
        raise ConfigError(problems)
    return found, rest


def _is_override(name: str) -> bool:
    return name.startswith("--") and ("." in name or _normal(name) in _ALIASES)


def _normal(name: str) -> str:
    return name[2:].replace("-", "_")


def _find(schema: Schema, name: str) -> tuple[Key, bool]:
    """The key of `--section.key` and whether it was negated. Raises ConfigError."""
    path = _normal(name)
    path = _ALIASES.get(path, path)
    section, _, key = path.partition(".")
    section = _SECTION_ALIASES.get(section, section)
    bare = key.removeprefix("no_")
    if (first := canonical(f"{section}.{bare}")) != f"{section}.{bare}":
        key = key.removesuffix(bare) + first.partition(".")[2]
    if message := retired(f"{section}.{key}"):
        raise ConfigError(message)
    known = schema.sections[section].keys if section in schema.sections else {}
    if key not in known and key.startswith("no_") and key[3:] in known:
        positive = known[key[3:]]
        if positive.type.base != "bool":
            raise ConfigError(f"{positive.path} is no flag, it takes a value: {positive.type}")
        return positive, True
    return schema.find(f"{section}.{key}"), False


def _value(key: Key, negated: bool, text: str | None, following: Sequence[str]) -> tuple[Any, int]:
    """The value and how many following tokens it took. Raises WrongValue."""
    if negated:
        if text is not None:
            raise WrongValue("takes no value")
        return False, 0
    if text is not None:
        return key.type.parse(text), 0
    if key.type.base == "bool":
        if following and following[0].lower() in ("true", "false"):
            return key.type.parse(following[0]), 1
        return True, 0
    if not following or following[0].startswith("--"):
        hint = f" (for a value that starts with --, write --{key.path}=VALUE)" if following else ""
        raise WrongValue(f"expected {key.type}, got nothing{hint}")
    return key.type.parse(following[0]), 1
