"""What the choice of a transport asks of the machine and of the job."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import psutil

from torchtitan_rl_ft.config.debug_mode import DebugMode, debug_mode
from torchtitan_rl_ft.config.resolve import Resolved
from torchtitan_rl_ft.weights.tensor_files import TensorFile, TensorFileError
from torchtitan_rl_ft.weights.transports.choice import Facts, copies_held
from torchtitan_rl_ft.weights.transports.probe import Probe, probe

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""By `training.dtype`: what is trained is what is published."""


def gather(resolved: Resolved, tried: Probe | None = None) -> Facts:
    """Takes a second where NIXL is installed: it is tried, unless it was `tried` already."""
    sections = resolved.sections
    weights, rollout = sections.weights, sections.rollout
    mode = debug_mode(rollout)
    policies_travel, external = mode is DebugMode.NONE, bool(rollout.external_urls)
    if not policies_travel or external:  # decided, whatever the machine can do
        return Facts(None, policies_travel, external)
    problem = memory_problem(weights.memory_folder) or (tried or probe(weights)).problem
    return Facts(
        problem,
        policies_travel,
        external,
        image_bytes(
            Path(sections.model.hf_assets_path or resolved.run_folder.model),
            str(resolved.get("training.dtype")),
        ),
        copies_held(weights.holders, sections.fault_tolerance.replica_groups),
        free_bytes(weights.memory_folder),
        weights.memory_folder,
    )


def memory_problem(folder: str) -> str | None:
    """Why no version can be held there, or None."""
    return None if Path(folder).is_dir() else f"there is no {folder} (weights.memory_folder)"


def free_bytes(folder: str) -> int:
    """What is in a file system in memory is memory: both have to have room. 0 where it cannot be
    told."""
    try:
        return min(shutil.disk_usage(folder).free, psutil.virtual_memory().available)
    except OSError:
        return 0


def image_bytes(model: Path, dtype: str) -> int:
    """Of the weights in `model` when they are trained as `dtype`; 0 when nobody can tell yet."""
    try:
        return sum(_items(file) for file in _files(model)) * ITEM_BYTES.get(dtype, 4)
    except (OSError, TensorFileError, ValueError, KeyError, TypeError, AttributeError):
        return 0


def _files(model: Path) -> set[Path]:
    index = model / "model.safetensors.index.json"
    if index.is_file():
        return {model / name for name in json.loads(index.read_bytes())["weight_map"].values()}
    return set(model.glob("*.safetensors"))


def _items(file: Path) -> int:
    opened = TensorFile(file)
    try:
        return sum(math.prod(span.shape) for span in opened.tensors.values())
    finally:
        opened.close()
