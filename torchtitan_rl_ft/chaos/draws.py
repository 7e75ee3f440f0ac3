"""Faults drawn at random: a Poisson process in the time of training, the same for equal seeds."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from torchtitan_rl_ft.chaos.plan import Fault, parse
from torchtitan_rl_ft.chaos.schedule import Planned


def drawn(deeds: Sequence[Fault], mtbf_s: float, seed: int) -> Iterator[Planned]:
    """Without end, in order of time: deeds chosen alike often, exponential times (mean `mtbf_s`)
    between them. Which ones, and when, depends on nothing that happens in the job."""
    random_state = random.Random(f"mtbf {seed}")
    after_s, number = 0.0, 0
    while True:
        # To the millisecond, so that the line says exactly when.
        wait_s = max(0.001, random_state.expovariate(1 / mtbf_s))
        after_s, number = round(after_s + wait_s, 3), number + 1
        deed = random_state.choice(deeds).deed()
        fault = parse(f"{deed} after {after_s:.3f} s of training")
        yield Planned(f"drawn {number}: {fault.line}", fault)
