"""Is a checkpoint whole? Its marker, written last, says what must be there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.journal.protocol import CheckpointRef
from torchtitan_rl_ft.run_folder import write_atomic

MARKER = "commit.json"


def write_marker(path: str | Path, step: int, token: str) -> None:
    """Declare the checkpoint folder complete: every file in it, by size, is in the marker."""
    path = Path(path)
    files = {
        str(f.relative_to(path)): f.stat().st_size
        for f in sorted(path.rglob("*"))
        if f.is_file() and f.name != MARKER
    }
    write_atomic(path / MARKER, json.dumps({"step": step, "token": token, "files": files}).encode())


def flaw(path: Path, step: int, token: str) -> str | None:
    """Why the folder is not the complete checkpoint of (step, token); None when it is."""
    if not path.is_dir():
        return "the folder is gone"
    try:
        marker: dict[str, Any] = json.loads((path / MARKER).read_bytes())
    except FileNotFoundError:
        return f"no {MARKER}: it was not finished"
    except ValueError:
        return f"{MARKER} is damaged"
    if (marker.get("step"), marker.get("token")) != (step, token):
        return f"{MARKER} is of step {marker.get('step')} of another history"
    for name, size in marker["files"].items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, not {size}"
    return None


def finder(folder: Path) -> Callable[[], list[CheckpointRef]]:
    """Lists the checkpoints in `folder` that have a marker, complete or not."""

    def find() -> list[CheckpointRef]:
        found = []
        for marker in sorted(folder.glob(f"*/{MARKER}")):
            try:
                told = json.loads(marker.read_bytes())
                found.append(CheckpointRef(told["step"], told["token"], str(marker.parent)))
            except (OSError, ValueError, KeyError, TypeError):
                continue  # `flaw` names it when it is asked for by the journal
        return found

    return find


def checker(run: Path) -> Callable[[CheckpointRef], str | None]:
    """Says why a checkpoint cannot be loaded, or None. Relative paths are in the run folder."""
    return lambda checkpoint: flaw(run / checkpoint.path, checkpoint.step, checkpoint.token)
