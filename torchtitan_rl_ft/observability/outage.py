"""The record of one fault: what was lost, and how it came back, in phases."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torchtitan_rl_ft.observability.events import first_line

PHASES = ("detect", "restart", "reconnect", "redo")

ROLES = ("trainer", "engine", "rollout", "serving", "gateway", "lighthouse", "supervisor")

_NUMBERED = re.compile(r"(trainer|engine)-\d+")


def role_of(name: str) -> str | None:
    """The role of a process, None for one whose loss stops no work (a standby, the inspector)."""
    if _NUMBERED.fullmatch(name):
        return name.split("-")[0]
    return name if name in ROLES else None


@dataclass
class Outage:
    """A fault of one process, until it does its work again. Times are of the monotonic clock, in
    seconds; None: it has not come to that."""

    role: str
    name: str
    cause: str
    began_s: float  # the injection, where it is known, else the detection
    detected_s: float | None = None
    retired_s: float | None = None  # the process is gone, or out of use
    replaced_s: float | None = None  # the new process is up
    connected_s: float | None = None  # it is known to the others, with their state
    done_s: float | None = None  # it does its work again
    until_s: float = 0.0  # done, or the last moment that is known
    overtaken: bool = False
    """The same process was hit again before it was back: the next record goes on from there."""

    version_before: int | None = None
    version_after: int | None = None
    samples_lost: int = 0  # in no batch any more, because of it
    samples_replayed: int = 0  # trained, or rolled out, again
    injected: str | None = None  # the kind of an injected fault

    @property
    def phase_s(self) -> dict[str, float]:
        """Each at least 0, in sum `until_s - began_s`: `done_s - began_s` when it is over.

        detect: until it is noticed. restart: until the new process is up. reconnect: until it has
        joined the others and holds their state. redo: until it does its work again.
        """
        marks_s = [self.began_s]
        for at_s in (self.detected_s, self.replaced_s, self.connected_s, self.until_s):
            known_s = self.until_s if at_s is None else min(at_s, self.until_s)
            marks_s.append(max(marks_s[-1], known_s))
        return {p: marks_s[i + 1] - marks_s[i] for i, p in enumerate(PHASES)}

    @property
    def total_s(self) -> float:
        return self.until_s - self.began_s

    @property
    def spans(self) -> list[tuple[str, float, float]]:
        """Phase, begin, end; without those that took no time."""
        found, at_s = [], self.began_s
        for phase, phase_s in self.phase_s.items():
            if phase_s > 0:
                found.append((phase, at_s, at_s + phase_s))
            at_s += phase_s
        return found

    def to_json(self) -> dict[str, Any]:
        """All fields, and what is derived of them."""
        return {
            "role": self.role,
            "name": self.name,
            "cause": self.cause,
            "injected": self.injected,
            "began_s": self.began_s,
            "detected_s": self.detected_s,
            "retired_s": self.retired_s,
            "replaced_s": self.replaced_s,
            "connected_s": self.connected_s,
            "done_s": self.done_s,
            "until_s": self.until_s,
            "overtaken": self.overtaken,
            "phase_s": self.phase_s,
            "version_before": self.version_before,
            "version_after": self.version_after,
            "samples_lost": self.samples_lost,
            "samples_replayed": self.samples_replayed,
        }

    def line(self) -> str:
        parts = ", ".join(f"{p} {s:.2f}" for p, s in self.phase_s.items() if s >= 0.005)
        end = "" if self.done_s is not None else ", not over" if not self.overtaken else ", again"
        return f"{self.name}: {first_line(self.cause)}: {self.total_s:.2f} s ({parts}){end}"
