"""What the choice of a transport asks of the machine and of the job."""

from __future__ import annotations

import json
import math
import os
import socket
from pathlib import Path

from torchtitan_rl_ft.config.debug_mode import DebugMode, debug_mode
from torchtitan_rl_ft.config.resolve import Resolved
from torchtitan_rl_ft.config.weights import WeightsSection
from torchtitan_rl_ft.host.ports import free_of
from torchtitan_rl_ft.weights.holder.files import free_bytes
from torchtitan_rl_ft.weights.tensor_files import TensorFile, TensorFileError
from torchtitan_rl_ft.weights.transports.choice import Facts, copies_held
from torchtitan_rl_ft.weights.transports.probe import Probe, probe

RELAY_PORTS, SOURCE_PORTS = 4, 2
"""That agents listen on at a time: those that push, and in a relay one that receives and one that
is made ahead."""

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
    groups = sections.fault_tolerance
    problem = (
        memory_problem(weights.memory_folder)
        or address_problem(weights.host)
        or port_problem(weights, groups.ranks_per_group)
        or (tried or probe(weights)).problem
    )
    return Facts(
        problem,
        policies_travel,
        external,
        image_bytes(
            Path(sections.model.hf_assets_path or resolved.run_folder.model),
            str(resolved.get("training.dtype")),
        ),
        copies_held(weights.holders, groups.replica_groups),
        room(weights.memory_folder),
        weights.memory_folder,
    )


def memory_problem(folder: str) -> str | None:
    """Why no version can be held there, or None."""
    if not Path(folder).is_dir():
        return f"there is no {folder} (weights.memory_folder)"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} (weights.memory_folder) is read-only, or not for this user to write to"
    return None


def address_problem(host: str) -> str | None:
    """Why holders cannot answer there, or None."""
    with socket.socket() as s:
        try:
            s.bind((host, 0))
        except OSError as e:
            return f"weights.host = {host!r} is no address of this machine: {e.strerror or e}"
    return None


def port_problem(weights: WeightsSection, ranks: int) -> str | None:
    """Why UCX has too few ports for the relays and the sources of a group of `ranks`, or None."""
    if not weights.ucx_ports:
        return None
    needed = RELAY_PORTS * weights.holders + SOURCE_PORTS * ranks
    if (free := free_of(weights.ucx_ports, enough=needed)) >= needed:
        return None
    return (
        f"weights.ucx_port_range = {weights.ucx_port_range!r} has {free} free ports, {needed} are "
        f"needed: {RELAY_PORTS} for each relay, {SOURCE_PORTS} for each rank of a group"
    )


def room(folder: str) -> int:
    """Bytes that are free there; 0 where it cannot be told."""
    try:
        return free_bytes(folder)
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
