"""The machines of a job and what one step of it takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from benchmarks.simulator import parameters as p
from torchtitan_rl_ft.journal import views
from torchtitan_rl_ft.rollout.schedule import Mode, Rules

ENDLESS_STEPS = 10**9


@dataclass(frozen=True)
class Cluster:
    """Equal roles: as many machines train as roll out, an engine is one machine.

    `one_host`: all slots share cores that are always busy; those that are left get what the lost
    ones used, and a step is as much work as before."""

    trainer_machines: int
    engines: int
    trainer_groups: int = 1
    one_host: bool = False

    @property
    def trainer_share(self) -> float:
        """Of all slots; a slot is a machine."""
        return self.trainer_machines / (self.trainer_machines + self.engines)

    @classmethod
    def of_gpus(cls, gpus: int, *, group_machines: int | None = None) -> Cluster:
        """`group_machines`: trainers in replica groups of about so many machines; None: one."""
        half = gpus // p.GPUS_PER_MACHINE // 2
        groups = 1 if group_machines is None else max(1, round(half / group_machines))
        return cls(half, half, groups)


@dataclass(frozen=True)
class Workload:
    """`rollout_s`: to roll one batch out with all engines; `train_s`: to train it with all
    groups. A save blocks training for `save_blocking_s` and is durable `save_async_s` later."""

    mode: Mode
    rollout_s: float
    train_s: float
    steps: int = ENDLESS_STEPS
    sync_s: float = p.WEIGHT_SYNC_S
    save_blocking_s: float = p.SAVE_BLOCKING_S
    save_async_s: float = p.SAVE_ASYNC_S
    prompts_per_step: int = p.PROMPTS_PER_STEP
    startup_s: float = 0.0

    @property
    def rules(self) -> Rules:
        return Rules(
            self.mode,
            p.SEMI_SYNC_FRACTION,
            p.MAX_POLICY_AGE,
            self.prompts_per_step,
            self.steps,
        )

    @classmethod
    def of_step(cls, mode: Mode, step_s: float, steps: int = ENDLESS_STEPS) -> Workload:
        """Whose step takes `step_s` without faults and saves, with equal work of both roles.

        async: rollout (and the sync it waits for) beside training. semi_async: half of a batch is
        rolled out before its training starts. sync: one after the other."""
        fresh = {"sync": 1.0, "semi_async": p.SEMI_SYNC_FRACTION, "async": 0.0}[mode]
        # step_s = sync_s + fresh * work_s + work_s, and in async the sync is beside training.
        sync_s = p.WEIGHT_SYNC_S
        work_s = step_s if mode == "async" else (step_s - sync_s) / (1 + fresh)
        if work_s <= sync_s:
            raise ValueError(f"a step of {step_s:g} s has no room for a sync of {sync_s:g} s")
        return cls(mode, work_s - sync_s if mode == "async" else work_s, work_s, steps)


@cache
def slowdown(groups: int, lost: int, machines: int) -> float:
    """Time of a step's training by `groups - lost` of `groups` replica groups against that by all,
    as our own split of the batch has it: the group with most tokens is waited for."""
    samples = max(p.PROMPTS_PER_STEP * p.SAMPLES_PER_PROMPT, p.SAMPLES_PER_PROMPT * machines)
    rng = np.random.default_rng(0)
    lengths = (1_000 * rng.lognormal(0.0, p.LENGTH_SIGMA, samples)).astype(np.int64)

    def longest(shards: int) -> int:
        owner = views.assignment(lengths, shards)
        return int(np.bincount(owner, weights=lengths, minlength=shards).max())

    return longest(groups - lost) / longest(groups)
