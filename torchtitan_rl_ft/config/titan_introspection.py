"""The snapshot of TorchTitan's config sections (`titan_schema.json`) and how it is made.

Errors in a TOML file must come before torch is imported, so the names, types and defaults of
TorchTitan's keys are kept in a file. It is written by
`python -m torchtitan_rl_ft.config.titan_introspection`; a test compares it with the installed
TorchTitan.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.config.schema import TITAN_SNAPSHOT, default_of
from torchtitan_rl_ft.config.value_types import ValueType

AC_MODES = ("none", "selective", "full", "memory_budget")


def introspect() -> dict[str, Any]:
    """The snapshot of the installed TorchTitan. Imports torch."""
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer
    from torchtitan.config import configs
    from torchtitan.tools.profiler import Profiler

    return {
        "torchtitan": version("torchtitan"),
        "sections": {
            "training": _section(configs.TrainingConfig),
            "optimizer": _optimizer(),
            "lr_scheduler": _section(LRSchedulersContainer.Config),
            "parallelism": _section(configs.ParallelismConfig),
            "checkpoint": _section(CheckpointManager.Config),
            "activation_checkpoint": _activation_checkpoint(),
            "compile": _section(configs.CompileConfig),
            "comm": _section(configs.CommConfig),
            "metrics": _section(MetricsProcessor.Config),
            "profiling": _section(Profiler.Config),
            "debug": _section(configs.DebugConfig),
        },
    }


def _section(*classes: type) -> dict[str, Any]:
    """Keys of config classes; fields that no file can hold (callables) are left out."""
    keys: dict[str, Any] = {}
    sources: list[list[str]] = []
    for cls in classes:
        hints = typing.get_type_hints(cls)
        for f in dataclasses.fields(cls):
            try:
                keys[f.name] = _key(ValueType.of(hints[f.name]), default_of(f))
            except TypeError:
                continue
        for base in reversed(cls.__mro__):
            source = [base.__module__, base.__qualname__]
            if dataclasses.is_dataclass(base) and source not in sources:
                sources.append(source)
    return {"sources": sources, "keys": keys}


def _key(kind: ValueType, default: Any) -> dict[str, Any]:
    return {"type": kind.to_json(), "default": default}


def _optimizer() -> dict[str, Any]:
    """0.3's keys, and beside them 0.2's for the one catch-all group of most jobs."""
    from torchtitan.components.optimizer import OptimizersContainer, default_adamw

    group = default_adamw().param_groups[0]
    kwargs = dict(group.optimizer_kwargs)
    beta1, beta2 = kwargs.pop("betas")
    flat = {"name": group.optimizer_name, "beta1": beta1, "beta2": beta2, **kwargs}
    section = _section(OptimizersContainer.Config)
    keys = {name: _key(ValueType.of(type(value)), value) for name, value in flat.items()}
    return {**section, "keys": {**keys, **section["keys"]}}


def _activation_checkpoint() -> dict[str, Any]:
    """The keys of all policies, and the choice between them."""
    from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC

    section = _section(FullAC.Config, SelectiveAC.Config, MemoryBudgetAC.Config)
    mode = _key(ValueType("str", choices=AC_MODES), "selective")
    return {**section, "keys": {"mode": mode, **section["keys"]}}


def to_text(snapshot: dict[str, Any]) -> str:
    return json.dumps(snapshot, indent=1, allow_nan=False) + "\n"


if __name__ == "__main__":
    target = Path(__file__).with_name(TITAN_SNAPSHOT)
    target.write_text(to_text(introspect()))
    print(f"wrote {target}")
