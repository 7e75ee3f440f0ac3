"""Results on disk, saved arm by arm, so that a run that was cut off goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.run_folder import write_atomic

FORMAT = 1


class Results:
    """`{"format", "machine", "arms": [...]}`. Each arm carries the `config_hash` that it ran with,
    and replaces an older one of its `key`."""

    def __init__(self, path: Path, machine: dict[str, Any], steps: dict[str, int]) -> None:
        """`steps`: of the arms to come, by load. Raises ValueError: the file is none of this
        format, of another machine, or of runs of another length, with how to mend it."""
        self._path = path
        self.data: dict[str, Any] = {"format": FORMAT, "machine": machine, "arms": []}
        if not path.exists():
            return
        try:
            data = json.loads(path.read_bytes())
            if data["format"] != FORMAT or not isinstance(data["arms"], list):
                raise ValueError(f"format {data['format']!r}, this is {FORMAT}")
            _comparable(data, machine, steps)
        except (ValueError, KeyError, TypeError) as e:
            raise ValueError(
                f"{path} holds no results that can be gone on with ({e}): name another file "
                "with --out, or remove it"
            ) from None
        self.data = data

    @property
    def arms(self) -> list[dict[str, Any]]:
        return self.data["arms"]

    def find(self, config_hash: str) -> dict[str, Any] | None:
        return next((a for a in self.arms if a["config_hash"] == config_hash), None)

    def put(self, result: dict[str, Any]) -> None:
        """Durable when this returns. Raises OSError."""
        self.data["arms"] = [a for a in self.arms if a["key"] != result["key"]] + [result]
        self.write()

    def write(self) -> None:
        write_atomic(self._path, json.dumps(self.data, indent=1).encode() + b"\n")


def _comparable(data: dict[str, Any], machine: dict[str, Any], steps: dict[str, int]) -> None:
    """Raises ValueError: figures that do not belong into one table."""
    if data["machine"] != machine:
        raise ValueError(f"measured on another machine, {data['machine']}, this is {machine}")
    for arm in data["arms"]:
        wanted = steps.get(arm["load"], arm["steps"])
        if arm["steps"] != wanted:
            raise ValueError(f"{arm['key']} has {arm['steps']} steps, {wanted} are asked for")
