"""What was injected into a run, on disk: each fault strikes once, whoever is restarted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.run_folder import ProcessId, RunFolder, write_atomic

FILE = "chaos.json"


class Memory:
    """`chaos.json` of a run folder, or another file like it.

    A fault is noted before it is injected: one that kills its own injector does not come twice.
    What is held (stopped processes, an address that was turned aside) is noted as well, so that
    the next injector can let go of it.
    """

    def __init__(self, folder: RunFolder, file: str = FILE) -> None:
        self._path: Path = folder.path / file
        self._started_wall_s: float | None = None
        self._struck: dict[str, dict[str, Any]] = {}
        self._held: dict[str, dict[str, Any]] = {}
        try:
            data = json.loads(self._path.read_bytes())
            self._started_wall_s = data["started_wall_s"]
            self._struck, self._held = data["struck"], data["held"]
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError) as e:
            raise ValueError(
                f"{self._path} cannot be read ({e}): which faults were injected is unknown; "
                "remove it to have them all again"
            ) from e

    def run_started(self, wall_s: float) -> None:
        """A run from step 0 in this folder knows nothing of an earlier one."""
        if wall_s != self._started_wall_s:
            if self._started_wall_s is not None:
                self._struck = {}
            self._started_wall_s = wall_s
            self._write()

    def struck(self, key: str) -> bool:
        return key in self._struck

    def note(self, key: str, **what: Any) -> None:
        """Durable when this returns. Raises OSError."""
        self._struck[key] = what
        self._write()

    def hold(self, key: str, **what: Any) -> None:
        self._held[key] = what
        self._write()

    def let_go(self, key: str) -> None:
        if self._held.pop(key, None) is not None:
            self._write()

    @property
    def held(self) -> dict[str, dict[str, Any]]:
        return dict(self._held)

    def forget(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        data = {
            "started_wall_s": self._started_wall_s,
            "struck": self._struck,
            "held": self._held,
        }
        write_atomic(self._path, json.dumps(data, indent=1).encode())


def to_json(processes: list[ProcessId]) -> list[list[float]]:
    return [[p.pid, p.start_time] for p in processes]


def from_json(pairs: list[list[float]]) -> list[ProcessId]:
    return [ProcessId(int(pid), start_time) for pid, start_time in pairs]
