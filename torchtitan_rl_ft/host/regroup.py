"""How the ranks of a group that start again inside their processes meet: the launcher numbers the
generations of its group and names the port of each.

    PHASES/<group>.generation     {"generation": 2, "master_port": 40123}
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from torchtitan_rl_ft.run_folder import write_atomic

GENERATION_ENV = "TORCHTITAN_RL_FT_GENERATION"
"""Of the group, as a rank was started. Not set: no launcher that regroups."""

RESTARTING = "restarting"
"""The phase of a rank that waits for the next generation."""


@dataclass(frozen=True)
class Generation:
    generation: int
    master_port: int


def write(folder: Path, group: str, found: Generation) -> None:
    """Raises OSError."""
    write_atomic(_path(folder, group), json.dumps(asdict(found)).encode())


def read(folder: Path, group: str) -> Generation | None:
    try:
        return Generation(**json.loads(_path(folder, group).read_bytes()))
    except FileNotFoundError:
        return None


def _path(folder: Path, group: str) -> Path:
    return folder / f"{group}.generation"
