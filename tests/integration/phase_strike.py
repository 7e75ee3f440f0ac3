"""Signals to a trainer at a named point of its step, from outside: by its events."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOOK_S = 0.0002

POINTS = (
    "waiting_for_batch",
    "quorum",
    "forward_backward",
    "reduce",
    "commit",
    "optimizer",
    "report",
    "publish",
    "checkpoint",
)
"""The phases of a step, in the order of a step (trainer/stepper.py)."""


class EventTail:
    """The events of a run from now on, without reading what is behind."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        os.lseek(self._fd, 0, os.SEEK_END)
        self._rest = b""

    def __enter__(self) -> EventTail:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def read(self) -> list[dict[str, Any]]:
        """What was appended since the last call."""
        data = self._rest + os.read(self._fd, 1 << 20)
        *lines, self._rest = data.split(b"\n")
        return [json.loads(line) for line in lines]


@dataclass(frozen=True)
class Strike:
    """Who was hit, when (monotonic), and where it was by its own last word."""

    name: str
    point: str
    mono_s: float
    step: int


def strike(
    events: Path,
    name: str,
    point: str,
    *,
    pid: int | None = None,
    signum: int = signal.SIGKILL,
    timeout_s: float = 60.0,
) -> Strike:
    """Send `signum` to `pid`, or to the process that speaks for its group, as soon as trainer
    `name` says that it enters `point`.

    It may have gone on by the time the signal arrives: what is returned is where it was.
    """
    end = time.monotonic() + timeout_s
    with EventTail(events) as tail:
        while True:
            seen = [e for e in tail.read() if e["kind"] == "phase" and e["name"] == name]
            if any(e["phase"] == point for e in seen):
                os.kill(pid or seen[-1]["pid"], signum)
                hit_s = time.monotonic()
                time.sleep(0.05)  # what it wrote before it was gone
                seen += [e for e in tail.read() if e["kind"] == "phase" and e["name"] == name]
                return Strike(name, seen[-1]["phase"], hit_s, seen[-1]["step"])
            if time.monotonic() > end:
                raise TimeoutError(f"{name} did not enter {point} within {timeout_s:g} s")
            time.sleep(LOOK_S)
