"""Plug-ins named in the configuration as `module:name`, loaded and built."""

from __future__ import annotations

import importlib
import inspect
from typing import Any
from urllib.parse import parse_qsl

from torchtitan_rl_ft.config.errors import ConfigError
from torchtitan_rl_ft.rollout.protocols import DataSource, GroupFilter, PluginContext, Reward

_STATE_METHODS = ("state_dict", "load_state_dict")


def load(key: str, spec: str, context: PluginContext) -> Any:
    """The object named by `spec` = "module:name" or "module:name?option=value&...".

    A class, or anything with options, is called with the context; a function is taken as it is.
    `key` is the configuration key, for messages. Raises ConfigError.
    """
    path, _, query = spec.partition("?")
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError(f"{key} = {spec!r} must be written module:name")
    try:
        module = importlib.import_module(module_name)
    except Exception as e:  # a plug-in's import runs its own code: any error is the user's
        raise ConfigError(f"{key} = {spec!r}: importing {module_name}: {_text(e)}") from e
    found = getattr(module, name, None)
    if found is None:
        raise ConfigError(f"{key} = {spec!r}: {module_name} has no {name!r}")
    if not callable(found):
        raise ConfigError(f"{key} = {spec!r}: {name} is neither a function nor a class")
    if not inspect.isclass(found):
        if query:
            raise ConfigError(f"{key} = {spec!r}: only a class takes options, not a function")
        return found
    options = dict(parse_qsl(query, keep_blank_values=True))
    plugin_class: Any = found
    try:
        return plugin_class(
            PluginContext(context.seed, context.tokenizer, context.model_path, options)
        )
    except Exception as e:  # as above
        raise ConfigError(f"{key} = {spec!r}: {_text(e)}") from e


def load_data_source(spec: str, context: PluginContext, *, journaling: bool) -> DataSource:
    """Raises ConfigError, also when the source cannot be resumed but has to be."""
    source = load("rl.data_source", spec, context)
    if not callable(getattr(source, "next", None)):
        raise ConfigError(f"rl.data_source = {spec!r} has no method next(n)")
    missing = [m for m in _STATE_METHODS if not callable(getattr(source, m, None))]
    if missing and journaling:
        raise ConfigError(
            f"rl.data_source = {spec!r} has no {' and no '.join(missing)}, so its position "
            "cannot be kept in the journal: add them, or set rollout.journal = false"
        )
    return source


def load_reward(spec: str, context: PluginContext) -> Reward:
    """Raises ConfigError."""
    reward = load("rl.reward", spec, context)
    if not callable(reward):
        raise ConfigError(f"rl.reward = {spec!r} cannot be called")
    return reward


def load_filter(spec: str, context: PluginContext) -> GroupFilter | None:
    """None when no filter is configured. Raises ConfigError."""
    if not spec:
        return None
    group_filter = load("rl.filter", spec, context)
    if not callable(group_filter):
        raise ConfigError(f"rl.filter = {spec!r} cannot be called")
    return group_filter


def _text(e: Exception) -> str:
    return f"{type(e).__name__}: {e}"
