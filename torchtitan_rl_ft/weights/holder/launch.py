"""Starting a holder beside a role, and finding it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.run_folder import TOKEN_ENV, ProcessId, write_atomic
from torchtitan_rl_ft.weights.holder.settings import HolderSettings

ADDRESS_FILE = "holder.json"

_NOT_FOR_A_HOLDER = ("UCX_", "NIXL_", "CUDA_", "NCCL_", "TORCH_", "PYTORCH_", "LD_PRELOAD")
"""Of its parent's environment: what UCX does is pinned by [weights], and a holder holds no device.
"""


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """Of a holder, made of its parent's."""
    kept = {k: v for k, v in base.items() if not k.startswith(_NOT_FOR_A_HOLDER)}
    return {**kept, "CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class HolderAddress:
    """Where a holder answers; `url` has no trailing slash."""

    url: str
    pid: int
    start_time: float

    @property
    def id(self) -> ProcessId:
        return ProcessId(self.pid, self.start_time)


class Start(Protocol):
    """As `start`, which it may stand for. Raises OSError."""

    def __call__(
        self, settings: HolderSettings, *, token: str, log: Path, env: Mapping[str, str]
    ) -> process.Child: ...


def start(
    settings: HolderSettings, *, token: str, log: Path, env: Mapping[str, str]
) -> process.Child:
    """Start a holder that the kernel kills with this process; call it from the main thread (see
    host/parent_bound.py). It is ready when `address` finds it. Raises OSError."""
    argv = [sys.executable, "-m", "torchtitan_rl_ft.weights.holder", settings.to_json()]
    return process.spawn(argv, log=log, env={**env, TOKEN_ENV: token})


def address(settings: HolderSettings) -> HolderAddress | None:
    """Of the living holder; None before it is ready and after its end."""
    try:
        found = HolderAddress(**json.loads((settings.folder / ADDRESS_FILE).read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return found if found.id.alive() else None


def announce(settings: HolderSettings, url: str) -> HolderAddress:
    """Say where this process, the holder, answers. Raises OSError."""
    me = ProcessId.current()
    found = HolderAddress(url, me.pid, me.start_time)
    write_atomic(settings.folder / ADDRESS_FILE, json.dumps(asdict(found)).encode())
    return found
