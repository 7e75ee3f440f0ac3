"""How every benchmark ends: rows to read, then one line of JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan_rl_ft.observability.events import Event


@dataclass(frozen=True)
class Aim:
    """A measured value and what it should be: at most (or at least) `aim`."""

    value: float
    aim: float
    at_most: bool = True

    @property
    def met(self) -> bool:
        return self.value <= self.aim if self.at_most else self.value >= self.aim


def transport_of(events: Iterable[Event]) -> str:
    """By which the policies of a job have reached its engines; empty when it published none."""
    used = [e.data.get("transport", "") for e in events if e.kind == "publish"]
    return next((t for t in reversed(used) if t), "")


def finish(
    benchmark: str, figures: dict[str, Any], aims: dict[str, Aim], *, verify: bool = False
) -> int:
    """Print the aims and the JSON line; the exit code: non-zero only with `verify` and a miss."""
    for name, aim in aims.items():
        sign = "<=" if aim.at_most else ">="
        print(
            f"{'met   ' if aim.met else 'MISSED'} {name}: {aim.value:.4g} (aim {sign} {aim.aim:g})"
        )
    line = {
        "benchmark": benchmark,
        "figures": figures,
        "aims": {n: {"value": a.value, "aim": a.aim, "met": a.met} for n, a in aims.items()},
    }
    print(json.dumps(line))
    sys.stdout.flush()
    return 1 if verify and not all(a.met for a in aims.values()) else 0
