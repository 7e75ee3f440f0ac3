"""What a rule looks at: the resolved job, the machine, and how a problem is worded."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torchtitan_rl_ft.config.resolve import Resolved
from torchtitan_rl_ft.host.ports import LAST_PORT


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


@dataclass(frozen=True)
class Machine:
    """What the rules ask of the machine; tests give their own."""

    has_module: Callable[[str], bool] = _has_module
    exists: Callable[[str], bool] = os.path.exists
    find_program: Callable[[str], str | None] = shutil.which


@dataclass(frozen=True)
class Job:
    resolved: Resolved
    machine: Machine
    starting: bool = False
    """The job is about to start: what it reads must be there."""

    def broken(self, rule: str, *paths: str) -> str:
        """`rule: key = value (origin), key = value (origin)`."""
        return f"{rule}: {', '.join(self.resolved.where(p) for p in paths)}"

    def positive(self, section: str, *keys: str) -> Iterator[str]:
        for key in keys:
            path = f"{section}.{key}"
            if not self.resolved.get(path) > 0:
                yield self.broken(f"{path} must be positive", path)

    def not_negative(self, section: str, *keys: str) -> Iterator[str]:
        for key in keys:
            path = f"{section}.{key}"
            if self.resolved.get(path) < 0:
                yield self.broken(f"{path} must not be negative", path)

    def port(self, section: str, key: str) -> Iterator[str]:
        path = f"{section}.{key}"
        if not 0 <= self.resolved.get(path) <= LAST_PORT:
            yield self.broken(f"ports lie between 1 and {LAST_PORT}, 0: any", path)

    # torchft ----------------------------------------------------------------------------
