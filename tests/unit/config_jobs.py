"""Jobs for tests of the configuration: resolved from TOML text and arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchtitan_rl_ft.config.resolve import Resolved, resolve

Values = dict[str, dict[str, Any]]


def no_registry(module: str, function: str) -> Values:
    """A registry function that sets nothing."""
    return {}


def write(folder: Path, text: str, name: str = "job.toml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def job(folder: Path, text: str = "", *argv: str, **kwargs: Any) -> Resolved:
    """The job of a file that holds `text`, on top of our own `base`."""
    return resolve(["--job.config_file", write(folder, text), *argv], **kwargs)


GOOD = """
[training]
steps = 100
seq_len = 32
local_batch_size = 64

[activation_checkpoint]
mode = "none"

[fault_tolerance]
enable = true
replica_groups = 2

[rl]
groups_per_step = 16
samples_per_prompt = 8

[rollout]
engines = 2
max_prompt_tokens = 16
max_response_tokens = 8
"""
"""A job that breaks no rule and is not suspicious."""
