"""Is a checkpoint whole? Its marker, written last, says what must be there.

`commit.json` makes the files of a checkpoint one commit: which state of the history they hold,
which sealed batch came last (with it the journal's position), torchft's counters, the policy
version that was announced then, the trainers' layout, the parts, size and digest of every file.
Nothing else is trusted: no tracker file, no folder name.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.journal.protocol import BatchRef, CheckpointRef
from torchtitan_rl_ft.run_folder import fsync_dir, write_atomic

logger = logging.getLogger(__name__)

MARKER = "commit.json"
FORMAT = 1
_BLOCK_BYTES = 4 * 2**20


class CheckpointUnusable(Exception):
    """A checkpoint that is whole, but that this run cannot go on from: a person has to decide."""


class CheckpointDamaged(Exception):
    """A file is not what the marker says; an older checkpoint may be whole."""


class _Damaged(ValueError):
    """A marker that cannot be read."""


@dataclass(frozen=True)
class FileMark:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Marker:
    """What `commit.json` holds. `batch`: id and digest of the batch of the last step, None at
    step 0; `policy_version`: the newest one that was announced when the save began, if any;
    `layout`: degrees, groups and micro-batch by name."""

    step: int
    token: str
    model: str
    batch: Mapping[str, Any] | None = None
    policy_version: int | None = None
    torchft: Mapping[str, int] = field(default_factory=dict)
    layout: Mapping[str, int] = field(default_factory=dict)
    parts: Sequence[str] = ()
    files: Mapping[str, FileMark] = field(default_factory=dict)


def folder_name(step: int, token: str) -> str:
    """One folder per state: a late writer of another history cannot spoil this one's."""
    return f"step-{step}-{token[:8]}"


def mark_files(path: Path, names: Iterable[str]) -> dict[str, FileMark]:
    """Size and SHA-256 of files in the checkpoint folder."""
    marks = {}
    for name in names:
        digest, size = hashlib.sha256(), 0
        with open(path / name, "rb") as f:
            while block := f.read(_BLOCK_BYTES):
                digest.update(block)
                size += len(block)
        marks[name] = FileMark(size, digest.hexdigest())
    return marks


def file_names(path: Path) -> list[str]:
    """All files of a checkpoint but its marker."""
    found = (
        f for f in path.rglob("*") if f.is_file() and not f.name.startswith((MARKER, ".commit"))
    )
    return sorted(str(f.relative_to(path)) for f in found)


def write_marker(path: Path, marker: Marker) -> None:
    """Declare the checkpoint folder complete."""
    for folder in (path, path.parent):
        fsync_dir(folder)
    write_atomic(path / MARKER, json.dumps({"format": FORMAT, **asdict(marker)}).encode())


def read_marker(path: Path) -> Marker:
    """Raises CheckpointUnusable when its format is not ours, ValueError when it cannot be read,
    FileNotFoundError."""
    told = json.loads((path / MARKER).read_bytes())
    if not isinstance(told, dict):
        raise _Damaged(f"{MARKER} is damaged")
    if told.pop("format", None) != FORMAT:
        raise CheckpointUnusable(
            f"checkpoint {path} is not of format {FORMAT}, the one this version reads and writes: "
            "go on with the version that wrote it, or start in another job.dump_folder with "
            "checkpoint.initial_load_path set to it"
        )
    try:
        files = {name: FileMark(**mark) for name, mark in told.pop("files").items()}
        return Marker(files=files, **told)
    except (KeyError, TypeError, AttributeError) as e:
        raise _Damaged(f"{MARKER} is damaged: {e}") from e


def flaw(path: Path, step: int, token: str) -> str | None:
    """Why the folder is not the complete checkpoint of (step, token); None when it is, as far as
    names and sizes tell. Contents are compared by who loads it (`damage`)."""
    if not path.is_dir():
        return "the folder is gone"
    try:
        marker = read_marker(path)
    except FileNotFoundError:
        return f"no {MARKER}: it was not finished"
    except ValueError:
        return f"{MARKER} is damaged"
    except CheckpointUnusable:
        return None  # nobody goes past it to an older one without being told: loading says why
    if (marker.step, marker.token) != (step, token):
        return f"{MARKER} is of step {marker.step} of another history"
    for name, mark in marker.files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != mark.bytes:
            return f"{name} has {file.stat().st_size} bytes, not {mark.bytes}"
    return None


def damage(path: Path, files: Mapping[str, FileMark]) -> str | None:
    """The first of `files` whose content is not what was written, in words; None: all are."""
    for name, mark in files.items():
        try:
            found = mark_files(path, [name])[name]
        except OSError as e:
            return f"{name} cannot be read: {e.strerror}"
        if found != mark:
            return f"{name} is not what was written: its SHA-256 differs"
    return None


@dataclass(frozen=True)
class Found:
    """A folder below the checkpoint folder. `token` is None without a marker that can be read;
    `batch`: the last one of its history."""

    step: int
    token: str | None
    path: str
    batch: BatchRef | None = None

    @property
    def name(self) -> str:
        return Path(self.path).name


def _batch_of(marker: Mapping[str, Any]) -> BatchRef | None:
    """None at step 0, and where another version wrote it otherwise."""
    try:
        return BatchRef(int(marker["batch"]["id"]), str(marker["batch"]["digest"]))
    except (KeyError, TypeError, ValueError):
        return None


def finder(folder: Path) -> Callable[[], list[Found]]:
    """Lists the checkpoints in `folder`, complete or not."""

    def find() -> list[Found]:
        found = []
        for path in sorted(folder.glob("step-*")):
            number = path.name.split("-")[1]
            if not path.is_dir() or not number.isdecimal():
                continue
            try:
                told = json.loads((path / MARKER).read_bytes())
                step, token, batch = int(told["step"]), str(told["token"]), _batch_of(told)
                found.append(Found(step, token, str(path), batch))
            except (OSError, ValueError, KeyError, TypeError):
                found.append(Found(int(number), None, str(path)))
        return found

    return find


def checker(run: Path) -> Callable[[CheckpointRef], str | None]:
    """Says why a checkpoint cannot be loaded, or None. Relative paths are in the run folder."""
    return lambda checkpoint: flaw(run / checkpoint.path, checkpoint.step, checkpoint.token)
