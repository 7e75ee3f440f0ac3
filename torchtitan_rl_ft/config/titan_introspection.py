"""The snapshot of TorchTitan's config sections (`titan_schema.json`) and how it is made.

Errors in a TOML file must come before torch is imported, so the names, types, defaults and help
texts of TorchTitan's keys are kept in a file. It is written by
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

from torchtitan_rl_ft.config.schema import TITAN_SNAPSHOT, default_of, field_docs
from torchtitan_rl_ft.config.value_types import ValueType

AC_MODES = ("none", "selective", "full", "memory_budget")

# TorchTitan 0.2 spelled the optimizer with these keys; 0.3 has parameter groups instead.
_FLAT_OPTIMIZER_HELP = {
    "name": "Optimizer: AdamW, Adam or DistMuon.",
    "lr": "Learning rate.",
    "beta1": "First momentum coefficient of Adam and AdamW.",
    "beta2": "Second momentum coefficient of Adam and AdamW.",
    "eps": "Term added to the denominator of Adam and AdamW.",
    "weight_decay": "Weight decay.",
}


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
            "training": _keys(configs.TrainingConfig),
            "optimizer": _optimizer(),
            "lr_scheduler": _keys(LRSchedulersContainer.Config),
            "parallelism": _keys(configs.ParallelismConfig),
            "checkpoint": _keys(CheckpointManager.Config),
            "activation_checkpoint": _activation_checkpoint(),
            "compile": _keys(configs.CompileConfig),
            "comm": _keys(configs.CommConfig),
            "metrics": _keys(MetricsProcessor.Config),
            "profiling": _keys(Profiler.Config),
            "debug": _keys(configs.DebugConfig),
        },
    }


def _keys(cls: type) -> dict[str, Any]:
    """Keys of a config class; fields that no file can hold (callables) are left out."""
    hints, docs = typing.get_type_hints(cls), field_docs(cls)
    found: dict[str, Any] = {}
    for f in dataclasses.fields(cls):
        try:
            kind = ValueType.of(hints[f.name])
        except TypeError:
            continue
        found[f.name] = _key(kind, default_of(f), docs.get(f.name, ""))
    return found


def _key(kind: ValueType, default: Any, text: str) -> dict[str, Any]:
    return {"type": kind.to_json(), "default": default, "help": text}


def _optimizer() -> dict[str, Any]:
    from torchtitan.components.optimizer import OptimizersContainer, default_adamw

    group = default_adamw().param_groups[0]
    kwargs = dict(group.optimizer_kwargs)
    beta1, beta2 = kwargs.pop("betas")
    defaults = {"name": group.optimizer_name, "beta1": beta1, "beta2": beta2, **kwargs}
    flat = {
        name: _key(ValueType.of(type(defaults[name])), defaults[name], text)
        for name, text in _FLAT_OPTIMIZER_HELP.items()
    }
    return {**flat, **_keys(OptimizersContainer.Config)}


def _activation_checkpoint() -> dict[str, Any]:
    from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC

    mode = _key(
        ValueType("str", choices=AC_MODES), "selective", "What is recomputed in the backward pass."
    )
    keys = {"mode": mode}
    for policy in (FullAC, SelectiveAC, MemoryBudgetAC):
        keys |= _keys(policy.Config)
    return keys


def to_text(snapshot: dict[str, Any]) -> str:
    return json.dumps(snapshot, indent=1, allow_nan=False) + "\n"


if __name__ == "__main__":
    target = Path(__file__).with_name(TITAN_SNAPSHOT)
    target.write_text(to_text(introspect()))
    print(f"wrote {target}")
