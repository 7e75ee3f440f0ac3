"""Fault traces of the live benchmark: what dies when, the same for every strategy. Pure."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any, Literal

Faults = Literal["none", "trainers", "all_roles"]

WINDOW_STEPS = 10
"""RobustRL's "10 % failure injection" (OSDI '26): one trainer fault at a uniform random time in
every window of 10 % of 100 steps."""

LAST_STEPS = 0.5
"""Steps before the end of a run in which nothing strikes: the run could end before the fault."""


@dataclass(frozen=True)
class TraceFault:
    """`subject` is killed `phase_offset_s` after the first commit of `step`."""

    step: int
    phase_offset_s: float
    subject: str

    @property
    def line(self) -> str:
        """In the language of faults (torchtitan_rl_ft/chaos/plan.py)."""
        return f"kill {self.subject} at step {self.step} plus {self.phase_offset_s:.3f} s"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def draw(
    faults: Faults, *, steps: int, step_s: float, seed: int, groups: int, engines: int
) -> list[TraceFault]:
    """In the order of time. `step_s`: of an undisturbed step, in which a fault's offset lies.

    trainers: one of `groups` trainer groups in each window. all_roles: in each window one group
    and one engine, in every second one the rollout role as well. Nothing strikes before the first
    commit.
    """
    rng = random.Random(f"{seed} {faults}")
    found = []
    for i in range(0 if faults == "none" else steps // WINDOW_STEPS):
        victims = [f"trainer-{rng.randrange(groups)}"]
        if faults == "all_roles":
            victims.append(f"engine-{rng.randrange(engines)}")
            victims += ["rollout"] if i % 2 else []
        begin = max(1.0, i * WINDOW_STEPS)
        end = min((i + 1) * WINDOW_STEPS, steps - LAST_STEPS)
        for victim in victims:
            at_steps = rng.uniform(begin, end)
            step = int(at_steps)
            # The language knows no time that is no time.
            offset_s = max(0.001, round((at_steps - step) * step_s, 3))
            found.append((at_steps, TraceFault(step, offset_s, victim)))
    return [fault for _, fault in sorted(found, key=lambda f: f[0])]
