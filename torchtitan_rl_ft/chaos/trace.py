"""A recorded fault trace: what was injected into a run, fit to be injected into another one.

A trace is a JSON file: {"format": FORMAT, "run": NAME, "faults": [{"deed": "kill trainer-1",
"after_s": time of training, null before the first commit, "start_s": since the start of its life,
"step": the last committed one, "step_s": since that commit}]}. `deed` names whom it hit, not whom
the line left open.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.chaos.plan import Fault, FaultInvalid, parse, parse_command
from torchtitan_rl_ft.chaos.training_clock import LIFE_STARTS, TrainingClock
from torchtitan_rl_ft.observability.events import Kind, read_event
from torchtitan_rl_ft.observability.jsonl import JsonlTail

FORMAT = "torchtitan_rl_ft fault trace 1"
LEAST_S = 0.001
"""The language knows no time of 0 s."""


class TraceInvalid(ValueError):
    """The file is no trace; the message names it and says why."""


@dataclass(frozen=True)
class Recorded:
    """One fault of a trace (times in seconds, see above)."""

    deed: str
    after_s: float | None
    start_s: float
    step: int
    step_s: float

    def fault(self, by: str) -> Fault:
        """To be injected at the same "time" of training, or after the same "step". One from before
        the first commit comes so long after the start of the job. Raises FaultInvalid."""
        if self.after_s is None:
            moment = f"after {self.start_s:.3f} s"
        elif by == "step":
            moment = f"at step {self.step} plus {self.step_s:.3f} s"
        else:
            moment = f"after {self.after_s:.3f} s of training"
        return parse(f"{self.deed} {moment}")


def record(lines: Iterable[Mapping[str, Any]]) -> list[Recorded]:
    """The faults of a run's last start, over its lives, from the lines of its events.jsonl. Raises
    FaultInvalid (of a version with another language)."""
    found: list[Recorded] = []
    clock, step, life_s, commit_s = TrainingClock(), 0, 0.0, 0.0
    for line in lines:
        clock.see(line)
        mono_s, kind, phase = float(line.get("mono_s", 0.0)), line.get("kind"), line.get("phase")
        if kind == Kind.RUN and phase in LIFE_STARTS:
            life_s = commit_s = mono_s
            if phase == "start":
                found, step = [], 0
        elif kind == Kind.COMMIT:
            step, commit_s = int(line.get("step") or 0), mono_s
        elif kind == Kind.CHAOS and phase == "inject":
            deed = parse_command(str(line.get("cause"))).deed(str(line["data"]["subject"]))
            after_s = clock.training_s(mono_s)
            found.append(
                Recorded(
                    deed,
                    _at_least(after_s) if after_s is not None else None,
                    _at_least(mono_s - life_s),
                    step,
                    _at_least(mono_s - commit_s),
                )
            )
    return found


def save(path: Path, run: str, faults: Iterable[Recorded]) -> None:
    """Raises OSError."""
    trace = {"format": FORMAT, "run": run, "faults": [asdict(f) for f in faults]}
    path.write_text(json.dumps(trace, indent=1) + "\n")


def load(path: Path) -> list[Recorded]:
    """From a trace, or the events.jsonl of a run. Raises TraceInvalid."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise TraceInvalid(f"{path} cannot be read: {e}") from None
    try:
        whole = json.loads(text)
    except ValueError:
        whole = None
    try:
        if isinstance(whole, dict) and "faults" in whole:
            return _read(whole)
        found = record(JsonlTail(path, parse=read_event).read())
    except (FaultInvalid, KeyError, TypeError, ValueError) as e:
        raise TraceInvalid(f"{path}: {type(e).__name__}: {e}") from None
    if not found:
        raise TraceInvalid(
            f"{path} holds no injected fault: neither a trace that `torchtitan chaos --record` "
            "wrote, nor events.jsonl of a run with faults"
        )
    return found


def _read(trace: Mapping[str, Any]) -> list[Recorded]:
    if trace.get("format") != FORMAT:
        raise ValueError(f"its format is {trace.get('format')!r}, known is {FORMAT!r}")
    found = [Recorded(**fault) for fault in trace["faults"]]
    for fault, by in itertools.product(found, ("time", "step")):
        fault.fault(by)
    return found


def _at_least(seconds: float) -> float:
    return max(LEAST_S, round(seconds, 3))
