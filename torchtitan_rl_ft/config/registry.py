"""Values that a registry function sets: what `job.module`/`job.config` gives beneath the TOML.

A registry function returns a TorchTitan trainer config, and calling it imports torch. So the
values of this package's `base` are kept in `registry_values.json`
(`python -m torchtitan_rl_ft.config.registry` writes it anew, a test compares it); its other
functions are `base` under a shipped file. Functions of other modules are called in a child process.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.config.errors import ConfigError, near_miss
from torchtitan_rl_ft.config.file_values import Values, file_values
from torchtitan_rl_ft.config.schema import load_schema
from torchtitan_rl_ft.config.toml_file import read_toml, shipped
from torchtitan_rl_ft.exit_codes import ExitCode

OWN_MODULE = "torchtitan_rl_ft"
BASE = "base"
SNAPSHOT = "registry_values.json"
CHILD_TIMEOUT_S = 120.0


def registry_values(module: str, function: str) -> Values:
    """Values, other than the defaults, that the function sets: section -> key -> value.

    Raises ConfigError when there is no such module or function.
    """
    if module != OWN_MODULE:
        return _from_child(module, function)
    values = base_values()
    if function == BASE:
        return values
    names = [name.removesuffix(".toml") for name in shipped()]
    if function not in names:
        known = [BASE, *names]
        raise ConfigError(
            f"job.config = {function!r}: {module} has no such registry function"
            f"{near_miss(function, known)} (it has {', '.join(known)})"
        )
    for section, keys in file_values(read_toml(f"{function}.toml")).items():
        if section != "job":
            values.setdefault(section, {}).update(keys)
    return values


def base_values() -> Values:
    """What our `base` sets, from the snapshot."""
    return json.loads(files("torchtitan_rl_ft").joinpath("config").joinpath(SNAPSHOT).read_text())


def _from_child(module: str, function: str) -> Values:
    command = [sys.executable, "-m", "torchtitan_rl_ft.config.registry", module, function]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{_named(module, function)}: no answer from the function within {CHILD_TIMEOUT_S:g} s"
        ) from None
    lines = done.stdout.splitlines()
    if done.returncode == ExitCode.DONE and lines:
        return json.loads(lines[-1])
    cause = (done.stderr.strip().splitlines() or ["no output"])[-1]
    if done.returncode == ExitCode.CONFIG:
        raise ConfigError(cause)
    raise ConfigError(f"{_named(module, function)}: {cause}")


def _named(module: str, function: str) -> str:
    return f"job.module = {module!r}, job.config = {function!r}"


# From here on torch is imported -------------------------------------------------------------


def call(module: str, function: str) -> Any:
    """The trainer config that the registry function returns, found as TorchTitan finds it.

    Raises ConfigError.
    """
    from torchtitan_rl_ft.platform import torchtitan_cpu

    torchtitan_cpu.install()
    from torchtitan.config.manager import ConfigManager

    _import(module)
    try:
        # TorchTitan's own lookup of --module and --config, so that both entry points agree.
        config, _ = ConfigManager()._load_config(["--module", module, "--config", function])
    except (ImportError, ValueError) as e:
        raise ConfigError(f"{_named(module, function)}: {e}") from None
    if not dataclasses.is_dataclass(config):
        raise ConfigError(f"{_named(module, function)}: returns {type(config).__name__}, no config")
    return config


def _import(module: str) -> None:
    """TorchTitan's lookup takes any import error for "no such module": show the real one.

    Raises ConfigError.
    """
    for candidate in (f"{module}.config_registry", module):
        try:
            importlib.import_module(candidate)
            return
        except ModuleNotFoundError as e:
            missing = e.name or ""
            if candidate != missing and not candidate.startswith(f"{missing}."):
                raise ConfigError(f"job.module = {module!r}: importing {candidate}: {e}") from e
        except ImportError as e:
            raise ConfigError(f"job.module = {module!r}: importing {candidate}: {e}") from e


def values_of(config: Any) -> Values:
    """What a trainer config holds in the keys of our schema, where it is not the default."""
    from torchtitan_rl_ft.config.overlay import read_values

    found = read_values(config)
    schema = load_schema()
    return {
        section: kept
        for section, keys in found.items()
        if (
            kept := {
                name: value
                for name, value in keys.items()
                if value != schema.sections[section].keys[name].default
            }
        )
    }


def main(argv: list[str]) -> int:
    if argv:
        try:
            config = call(*argv)
        except ConfigError as e:
            print(e, file=sys.stderr)
            return ExitCode.CONFIG
        print(json.dumps(values_of(config)))
        return ExitCode.DONE
    target = Path(__file__).with_name(SNAPSHOT)
    values = values_of(call(OWN_MODULE, BASE))
    target.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n")
    print(f"wrote {target}")
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
