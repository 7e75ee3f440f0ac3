"""The arms of the live benchmark: which job runs under which trace. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from benchmarks.live.trace import Faults, TraceFault

Strategy = Literal["no_fault", "role_isolated", "full_restart"]

METHOD = 2
"""Raised when the way of measuring changes: saved results of another one are measured anew."""

GROUPS, ENGINES = 2, 2


@dataclass(frozen=True)
class Load:
    """What makes a step as long as it is: prompt groups, samples of each, tokens of an answer at
    most; and whether rollouts wait for the step before (rl.mode)."""

    prompt_groups: int
    samples: int
    response_tokens: int
    mode: Literal["sync", "async"] = "async"

    @property
    def keys(self) -> tuple[str, ...]:
        return (
            *("--rl.groups_per_step", str(self.prompt_groups)),
            *("--rl.samples_per_prompt", str(self.samples)),
            *("--rollout.max_response_tokens", str(self.response_tokens)),
            *("--training.seq_len", str(16 + self.response_tokens)),
            *("--rl.mode", self.mode),
            *("--rl.max_policy_age", "2" if self.mode == "async" else "0"),
        )


LOADS = {
    "short": Load(64, 16, 48),
    "long": Load(128, 16, 48),
    "sync": Load(64, 16, 48, "sync"),
}


@dataclass(frozen=True)
class Arm:
    """One run. `standby`: recovery.standby of role_isolated."""

    strategy: Strategy
    faults: Faults
    load: str
    steps: int
    seed: int
    checkpoint_every_steps: int = 1
    standby: str = "none"

    @property
    def name(self) -> str:
        """As tables and plots call it; unique among the arms of a load and a seed."""
        parts = [self.strategy, *([] if self.faults == "none" else [self.faults])]
        if self.strategy == "role_isolated":
            parts.append("spare" if self.standby == "spare" else "cold")
        if self.strategy == "full_restart":
            parts.append(f"saved_every_{self.checkpoint_every_steps}")
        return "/".join(parts)

    @property
    def keys(self) -> tuple[str, ...]:
        """What goes to `torchtitan run`, beside the debug job's file."""
        keys = [
            *("--training.steps", str(self.steps)),
            *("--checkpoint.interval", str(self.checkpoint_every_steps)),
            *("--fault_tolerance.replica_groups", str(GROUPS)),
            *("--rollout.engines", str(ENGINES)),
            # Nothing is learned, so that answers keep their length and steps their time.
            *("--optimizer.lr", "1e-9"),
            *("--rl.eval_prompts", "0"),
            *("--recovery.role_max_restarts", "1000"),
            *("--rollout.engine_max_restarts", "1000"),
            *("--rollout.retain_ttl", "0"),
            *LOADS[self.load].keys,
        ]
        if self.strategy == "full_restart":
            keys += ["--recovery.partial_interval_tokens", "0"]  # rollout progress is lost
        elif self.strategy == "role_isolated":
            keys += ["--recovery.standby", self.standby]
            if self.faults == "all_roles" and self.standby == "spare":
                keys += ["--rollout.standby_engines", "1"]
        return tuple(keys)


def config_hash(arm: Arm, trace: Sequence[TraceFault]) -> str:
    """Of all that an arm's result depends on, but for the code and the machine."""
    told = {
        "method": METHOD,
        "arm": asdict(arm),
        "keys": arm.keys,
        "trace": [fault.to_json() for fault in trace],
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def plan(*, quick: bool, seeds: Sequence[int] | None = None, steps: int | None = None) -> list[Arm]:
    """All arms in the order of running: what others take their trace from comes first."""
    first, *more = seeds or ((0,) if quick else (0, 1, 2))
    if quick:
        return _arms("short", steps or 30, first)
    arms = [a for seed in (first, *more) for a in _arms("short", steps or 100, seed, cold=True)]
    for load in ("long", "sync"):
        arms += [a for a in _arms(load, steps or 50, first) if a.faults != "all_roles"]
    return arms


def _arms(load: str, steps: int, seed: int, *, cold: bool = False) -> list[Arm]:
    def arm(strategy: Strategy, faults: Faults, every: int = 1, standby: str = "none") -> Arm:
        return Arm(strategy, faults, load, steps, seed, every, standby)

    return [
        arm("no_fault", "none"),
        arm("role_isolated", "trainers", standby="spare"),
        arm("full_restart", "trainers"),
        arm("full_restart", "trainers", every=5),
        *([arm("role_isolated", "trainers")] if cold else []),
        arm("role_isolated", "all_roles", standby="spare"),
        arm("full_restart", "all_roles"),
    ]
