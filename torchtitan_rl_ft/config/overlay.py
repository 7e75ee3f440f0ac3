"""The values of a job on a TorchTitan trainer config, and back. Needs TorchTitan, not before.

The config is rebuilt level by level with `dataclasses.replace`, so that every `__post_init__`
validates the new values.
"""

from __future__ import annotations

import copy
import dataclasses
import typing
from collections.abc import Callable
from typing import Any

from torchtitan_rl_ft.config.errors import ConfigError
from torchtitan_rl_ft.config.resolve import DEFAULT, Resolved
from torchtitan_rl_ft.config.schema import load_schema
from torchtitan_rl_ft.config.sections import Sections

# Sections whose field in the trainer config has another name, and those without a field.
_FIELDS = {"profiling": "profiler"}
_WITHOUT_FIELD = {"job", "model", "observability", "otel", "chaos", "weights"}

_FLAT_OPTIMIZER = ("name", "lr", "beta1", "beta2", "eps", "weight_decay")


def apply(trainer_config: Any, resolved: Resolved) -> Any:
    """`trainer_config` with every value of the job that is not a default. Defaults stay as they
    came from the registry function; its own values are applied again, to no effect. `model_spec`
    is the caller's affair (it needs the model directory).

    Raises ConfigError naming the section that TorchTitan refuses.
    """
    changes: dict[str, Any] = {"dump_folder": str(resolved.run_folder.path)}
    if path := resolved.sections.model.hf_assets_path:
        changes["hf_assets_path"] = path
    for section, values in _set_values(resolved).items():
        name = _FIELDS.get(section, section)
        if section in _WITHOUT_FIELD or not hasattr(trainer_config, name):
            continue
        current = getattr(trainer_config, name)
        special = _SPECIAL.get(section, _replaced)
        changes[name] = refusing(lambda c=current, v=values, s=special: s(c, v), resolved, section)
    return refusing(lambda: dataclasses.replace(trainer_config, **changes))


def read_values(trainer_config: Any) -> dict[str, dict[str, Any]]:
    """What a trainer config holds in the keys of our schema: the inverse of `apply`."""
    found: dict[str, dict[str, Any]] = {}
    for section in load_schema().sections.values():
        name = _FIELDS.get(section.name, section.name)
        if section.name in _WITHOUT_FIELD or not hasattr(trainer_config, name):
            continue
        config = getattr(trainer_config, name)
        values = {k: _plain(getattr(config, k)) for k in section.keys if hasattr(config, k)}
        if section.name == "optimizer":
            values |= _flat_optimizer(values.pop("param_groups"), config)
        elif section.name == "activation_checkpoint":
            values["mode"] = _mode_of(config)
        found[section.name] = values
    return found


def _set_values(resolved: Resolved) -> dict[str, dict[str, Any]]:
    """section -> key -> value, of the keys that somebody decided."""
    found: dict[str, dict[str, Any]] = {}
    for path, origin in resolved.origins.items():
        if origin != DEFAULT:
            section, _, key = path.partition(".")
            # A copy: the config must not share lists with the resolved job.
            found.setdefault(section, {})[key] = copy.deepcopy(resolved.get(path))
    return found


def refusing(build: Callable[[], Any], resolved: Resolved | None = None, section: str = "") -> Any:
    """The result of `build`; what TorchTitan's validation raises becomes one ConfigError, with
    the values of `section` and their origins."""
    try:
        return build()
    except (ValueError, TypeError, AssertionError) as e:
        message = " ".join(str(e).split())
        if resolved is None:
            raise ConfigError(f"TorchTitan refuses the configuration: {message}") from e
        given = [
            p for p, o in resolved.origins.items() if p.startswith(f"{section}.") and o != DEFAULT
        ]
        values = "; ".join(resolved.where(p) for p in given)
        raise ConfigError(f"[{section}] is refused: {message} ({values})") from e


def _replaced(config: Any, values: dict[str, Any]) -> Any:
    """`config` with `values`, dataclasses below it built from tables."""
    known = {f.name for f in dataclasses.fields(config)}
    missing = [key for key in values if key not in known]
    if missing:
        raise ValueError(f"{type(config).__qualname__} has no {missing[0]!r}")
    hints = typing.get_type_hints(type(config), include_extras=True)
    return dataclasses.replace(config, **{k: _built(hints[k], v) for k, v in values.items()})


def _built(hint: Any, value: Any) -> Any:
    """Tables of a `list[Dataclass]` field as that dataclass."""
    item = next(iter(typing.get_args(hint)), None)
    if isinstance(value, list) and item is not None and dataclasses.is_dataclass(item):
        return [typing.cast(type, item)(**v) if isinstance(v, dict) else v for v in value]
    return value


def _plain(value: Any) -> Any:
    """Dataclasses and tuples as what TOML could hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value


# [optimizer]: 0.2's flat keys on 0.3's parameter groups -------------------------------------


def _optimizer(config: Any, values: dict[str, Any]) -> Any:
    from torchtitan.components.optimizer import default_adamw

    flat = {k: v for k, v in values.items() if k in _FLAT_OPTIMIZER}
    config = _replaced(config, {k: v for k, v in values.items() if k not in flat})
    if not flat:
        return config
    groups = config.param_groups or default_adamw().param_groups
    if len(groups) != 1:
        patterns = ", ".join(repr(g.pattern) for g in groups)
        raise ValueError(
            f"optimizer.{next(iter(flat))} fits one parameter group, and there are {len(groups)} "
            f"({patterns}): set optimizer.param_groups"
        )
    return dataclasses.replace(config, param_groups=[_regrouped(groups[0], flat)])


def _regrouped(group: Any, flat: dict[str, Any]) -> Any:
    """A parameter group with flat values. Another optimizer starts from its own settings: what
    the former one was given (momentum, betas) need not fit it."""
    from torchtitan.components.optimizer import default_adamw

    name = flat.get("name", group.optimizer_name)
    kwargs = dict(group.optimizer_kwargs)
    if name != group.optimizer_name and name not in ("Adam", "AdamW"):
        kwargs = {k: kwargs[k] for k in ("lr", "weight_decay") if k in kwargs}
    elif name != group.optimizer_name and group.optimizer_name not in ("Adam", "AdamW"):
        kwargs = dict(default_adamw().param_groups[0].optimizer_kwargs) | {"lr": kwargs["lr"]}
    for key in ("lr", "eps", "weight_decay"):
        if key in flat:
            kwargs[key] = flat[key]
    if "beta1" in flat or "beta2" in flat:
        if name not in ("Adam", "AdamW"):
            raise ValueError(f"optimizer.beta1 and beta2 mean nothing to optimizer.name = {name!r}")
        beta1, beta2 = kwargs.get("betas", (0.9, 0.95))
        kwargs["betas"] = (flat.get("beta1", beta1), flat.get("beta2", beta2))
    return dataclasses.replace(group, optimizer_name=name, optimizer_kwargs=kwargs)


def _flat_optimizer(groups: list[dict[str, Any]], config: Any) -> dict[str, Any]:
    """One catch-all group in 0.2's spelling where that loses nothing, else the groups."""
    if not groups:
        return {}
    kwargs = dict(groups[0]["optimizer_kwargs"])
    betas = kwargs.pop("betas", None)
    names = {"name": groups[0]["optimizer_name"], **kwargs}
    if betas is not None:
        names |= {"beta1": betas[0], "beta2": betas[1]}
    if len(groups) == 1 and groups[0]["pattern"] == ".*" and set(names) <= set(_FLAT_OPTIMIZER):
        return names
    return {"param_groups": groups}


# [activation_checkpoint]: a mode for 0.3's union of policies ----------------------------------


def _policies() -> dict[str, Any]:
    from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC

    return {
        "none": None,
        "selective": SelectiveAC.Config,
        "full": FullAC.Config,
        "memory_budget": MemoryBudgetAC.Config,
    }


def _mode_of(config: Any) -> str:
    for mode, cls in _policies().items():
        if type(config) is cls or (config is None and cls is None):
            return mode
    raise ConfigError(
        f"activation_checkpoint: {type(config).__qualname__} is none of TorchTitan's policies"
    )


def _activation_checkpoint(config: Any, values: dict[str, Any]) -> Any:
    """The policy of `mode` (default: the one that the registry function chose)."""
    values = dict(values)
    mode = values.pop("mode", None)
    cls = type(config) if mode is None else _policies()[mode]
    if cls is None or config is None and mode is None:
        if values:
            raise ValueError(f"{next(iter(values))!r} means nothing without activation checkpoints")
        return None
    if not isinstance(config, cls):
        config = cls()
    return _replaced(config, values)


# Other packages' policies pass through untouched unless the job names a mode.
_SPECIAL = {"optimizer": _optimizer, "activation_checkpoint": _activation_checkpoint}

assert {f.name for f in dataclasses.fields(Sections)} >= _WITHOUT_FIELD
