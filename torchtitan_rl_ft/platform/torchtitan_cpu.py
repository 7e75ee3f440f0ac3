"""What TorchTitan 0.3 needs to train on a machine without an accelerator.

TorchTitan takes the device type and module at import of `torchtitan.tools.utils` and has no CPU
branch. `install()` gives it a CPU device module; called before that import it is enough, called
after it (TorchTitan's own entry point imports it first) it rebinds the names in every module that
took a copy.
"""

from __future__ import annotations

import sys
import types
from collections import namedtuple
from typing import Any

import psutil
import torch
import torch._utils

DeviceProperties = namedtuple("DeviceProperties", ["name", "total_memory"])


def needed() -> bool:
    return not torch.accelerator.is_available()


def _cpu_module() -> types.ModuleType:
    """`torch.cpu` with the functions that TorchTitan calls on `torch.cuda`."""
    module = types.ModuleType("torchtitan_rl_ft_cpu")
    module.__dict__.update({k: v for k, v in vars(torch.cpu).items() if not k.startswith("__")})
    total = psutil.virtual_memory().total
    functions: dict[str, Any] = {
        "get_device_name": lambda device=None: "CPU",
        "get_device_properties": lambda device=None: DeviceProperties("CPU", total),
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "memory_stats": lambda device=None: {},
        # torch.cpu answers the string "cpu", which breaks barrier(device_ids=[...]).
        "current_device": lambda: 0,
        "device_count": lambda: 1,
    }
    module.__dict__.update(functions)
    return module


def install() -> None:
    """Make TorchTitan run on the CPU. Does nothing where an accelerator is present; idempotent."""
    if not needed():
        return
    module = _cpu_module()
    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[assignment]
    original = torch._utils._get_device_module

    def device_module(device_type: str) -> Any:
        return module if device_type == "cpu" else original(device_type)

    torch._utils._get_device_module = device_module  # type: ignore[assignment]
    for name, loaded in list(sys.modules.items()):
        if name.startswith("torchtitan.") and loaded is not None:
            if hasattr(loaded, "device_type"):
                loaded.device_type = "cpu"  # type: ignore[attr-defined]
            if hasattr(loaded, "device_module"):
                loaded.device_module = module  # type: ignore[attr-defined]
            if hasattr(loaded, "_get_available_device_type"):
                loaded._get_available_device_type = lambda: "cpu"  # type: ignore[attr-defined]
                loaded._get_device_module = torch._utils._get_device_module  # type: ignore


def prepare_model(model_parts: list[torch.nn.Module]) -> None:
    """gloo has no pre-multiplied sum: make FSDP reduce with plain sums."""
    if not needed():
        return
    from torch.distributed.fsdp import FSDPModule

    for part in model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


def attention_config() -> Any:
    """Inner attention of a training model: dense causal on a CPU, FlexAttention elsewhere.

    Rows hold one sample each, padded on the right, so causal attention needs no mask.
    """
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

    return ScaledDotProductAttention.Config() if needed() else FlexAttention.Config()
