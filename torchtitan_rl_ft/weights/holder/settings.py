"""What a holder is told when it is started."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from torchtitan_rl_ft.config.weights import WeightsSection
from torchtitan_rl_ft.run_folder import ProcessId

Kind = Literal["source", "relay"]

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Key(NamedTuple):
    """A version of the policy by its history, before it has a number."""

    step: int
    token: str

    def __str__(self) -> str:
        return f"step {self.step} ({self.token[:8]})"


@dataclass(frozen=True)
class HolderSettings:
    """`name` is the holder's own in its run, `run_id` the run's on this machine; both become names
    of folders. `serving_url` is known to a relay (serving is its parent); a source looks serving up
    in `run_folder`, where it moves when it is restarted. `owner` is the process with whose end what
    is in memory has no use any more: the job's, or the parent."""

    name: str
    kind: Kind
    run_id: str
    weights: WeightsSection
    owner: ProcessId
    run_folder: str = ""
    serving_url: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError."""
        for text in (self.name, self.run_id):
            if not _FILE_NAME.fullmatch(text):
                raise ValueError(f"{text!r} cannot be the name of a folder")
        if self.kind not in ("source", "relay"):
            raise ValueError(f"{self.kind!r} is no kind of holder: source or relay")
        if not self.run_folder and not self.serving_url:
            raise ValueError(f"holder {self.name}: neither run_folder nor serving_url is given")

    @property
    def run_memory(self) -> Path:
        return run_memory(self.weights.memory_folder, self.run_id)

    @property
    def folder(self) -> Path:
        """Where this holder's versions are, in memory."""
        return self.run_memory / self.name

    @property
    def piece_bytes(self) -> int:
        return self.weights.piece_mb << 20

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> HolderSettings:
        """Raises ValueError, KeyError, TypeError."""
        fields = json.loads(text)
        fields["weights"] = WeightsSection(**fields["weights"])
        fields["owner"] = ProcessId(**fields["owner"])
        return cls(**fields)


def user_memory(memory_folder: str) -> Path:
    """Where all runs of this user keep versions."""
    return Path(memory_folder) / f"torchtitan_rl_ft-{os.getuid()}"


def run_memory(memory_folder: str, run_id: str) -> Path:
    return user_memory(memory_folder) / run_id
