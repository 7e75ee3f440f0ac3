"""What a debug mode leaves out of a job, and where dumps are. Pure."""

from __future__ import annotations

import string
from enum import StrEnum
from pathlib import Path

from torchtitan_rl_ft.config.sections import RolloutSection

FIELD = "rollout_id"
DEFAULT_DUMPS = "rollouts/{rollout_id}.safetensors"
"""Dumps of a debug mode that names none."""


class DebugMode(StrEnum):
    NONE = "none"
    ROLLOUT_ONLY = "rollout_only"  # no trainer, no lighthouse: samples are dumped
    TRAIN_ONLY = "train_only"  # no serving, no engine: batches come from dumps


def debug_mode(rollout: RolloutSection) -> DebugMode:
    """The mode of a job; dumps to load imply train_only."""
    if rollout.load_debug_rollout_data:
        return DebugMode.TRAIN_ONLY
    return DebugMode(rollout.debug_mode)


def journaling(rollout: RolloutSection) -> bool:
    """Whether the job keeps the journal of its run folder: unless it is switched off, and never
    in a debug mode. No other key plays a part."""
    return rollout.journal and debug_mode(rollout) is DebugMode.NONE


def roles_of_trainers(rollout: RolloutSection) -> tuple[str, ...]:
    """The roles that a trainer talks to, beside the lighthouse."""
    alone = debug_mode(rollout) is DebugMode.TRAIN_ONLY
    return ("rollout",) if alone else ("rollout", "serving")


def dump_path(template: str, run_folder: Path, rollout_id: int) -> Path:
    """The file of one rollout. A relative template is in the run folder."""
    return run_folder / template.format(rollout_id=rollout_id)


def template_problem(template: str) -> str | None:
    """Why `template` cannot name one file per rollout, or None."""
    try:
        fields = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
        if fields == {FIELD}:
            template.format(rollout_id=1)
    except ValueError as e:
        return f"the template of dump files cannot be read ({e})"
    if FIELD not in fields:
        return "the template of dump files must contain {rollout_id}"
    if others := fields - {FIELD}:
        return f"the template of dump files knows {{rollout_id}} alone, not {{{min(others)}}}"
    return None
