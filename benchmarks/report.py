"""How every benchmark ends: rows to read, then one line of JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Aim:
    """A measured value and what it should be: at most (or at least) `aim`."""

    value: float
    aim: float
    at_most: bool = True

    @property
    def met(self) -> bool:
        return self.value <= self.aim if self.at_most else self.value >= self.aim


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
