"""One role of a job, as the keeper is told of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torchtitan_rl_ft.roles.lifecycle import Duty
from torchtitan_rl_ft.run_folder import ProcessId


@dataclass(frozen=True)
class RoleSpec:
    """One role to keep running."""

    name: str
    duty: Duty
    argv: tuple[str, ...]
    outlives_parent: bool = False
    """It, and what it starts, is not ended by our death."""

    adopt: tuple[ProcessId, Path] | None = None
    """The role is up already, as this process with this log."""

    env: Mapping[str, str] = field(default_factory=dict)
    """What its environment has beside that of all roles."""
