"""What the choice of a transport depends on, asked of this machine."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import psutil

from torchtitan_rl_ft.config.debug_mode import DebugMode, debug_mode
from torchtitan_rl_ft.config.resolve import Resolved
from torchtitan_rl_ft.config.weights import WeightsSection
from torchtitan_rl_ft.weights.tensor_files import TensorFile, TensorFileError
from torchtitan_rl_ft.weights.transports import nixl_check
from torchtitan_rl_ft.weights.transports.choice import Facts, copies_held

CHECK_TIMEOUT_S = 30.0

_TRAINED_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""By `training.dtype`: what is trained is what is published."""


def observe(resolved: Resolved) -> Facts:
    """Of a job that is about to start here."""
    sections = resolved.sections
    folder = sections.weights.memory_folder
    free_bytes, no_folder = 0, None
    try:
        # What is in a tmpfs is memory: both have to have room.
        free_bytes = min(shutil.disk_usage(folder).free, psutil.virtual_memory().available)
    except OSError as e:
        no_folder = f"weights.memory_folder = {folder!r}: {e.strerror}"
    model = Path(sections.model.hf_assets_path or resolved.run_folder.model)
    return Facts(
        nixl_problem=no_folder or nixl_problem(sections.weights),
        policies_travel=debug_mode(sections.rollout) is DebugMode.NONE,
        external_engines=bool(sections.rollout.external_urls),
        image_bytes=trained_bytes(model, str(resolved.get("training.dtype"))),
        copies=copies_held(sections.weights.holders, sections.fault_tolerance.replica_groups),
        free_bytes=free_bytes,
        memory_folder=folder,
    )


def nixl_problem(weights: WeightsSection) -> str | None:
    """Why NIXL does not work here. Tried in a process of its own, which it may take with it."""
    command = [sys.executable, "-m", nixl_check.__name__, json.dumps(asdict(weights))]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=CHECK_TIMEOUT_S, env=os.environ
        )
    except subprocess.TimeoutExpired:
        return f"NIXL did not come up within {CHECK_TIMEOUT_S:g} s"
    told = done.stdout.strip().splitlines()
    if done.returncode == 0:
        return None
    return told[-1] if told else f"NIXL ended the process that tried it ({done.returncode})"


def trained_bytes(model: Path, dtype: str) -> int:
    """Size of the weights in `model` when they are trained as `dtype`; 0: nobody can tell yet."""
    item_bytes = _TRAINED_ITEM_BYTES.get(dtype, 4)
    total = 0
    for path in model.glob("*.safetensors"):
        with contextlib.suppress(OSError, TensorFileError), closing(TensorFile(path)) as file:
            total += sum(math.prod(t.shape) * item_bytes for t in file.tensors.values())
    return total
