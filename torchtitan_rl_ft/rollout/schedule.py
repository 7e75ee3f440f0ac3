"""When to roll out, with which policy, for which step; and what is too old. Pure decisions.

A batch for step s is trained by the policy after s - 1 commits. The *age* of a sample is the
number of policy versions between the one that sampled its oldest token and the one that will be
current when it is trained. It is judged once, when the batch is sealed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Mode = Literal["sync", "semi_async", "async"]


@dataclass(frozen=True)
class Rules:
    """The part of [rl] and [training] that decides."""

    mode: Mode
    start_fraction: float
    max_policy_age: int
    groups_per_step: int
    total_steps: int

    @property
    def max_age(self) -> int:
        """Sync mode trains on the newest policy's samples alone."""
        return 0 if self.mode == "sync" else self.max_policy_age

    @property
    def fresh_needed(self) -> int:
        """Groups of a batch that must be rolled out by the newest policy."""
        fraction = {"sync": 1.0, "semi_async": self.start_fraction, "async": 0.0}[self.mode]
        return math.ceil(fraction * self.groups_per_step)


@dataclass(frozen=True)
class Waiting:
    """An accepted group that is not sealed."""

    group_id: int
    min_version: int


@dataclass(frozen=True)
class Policy:
    """A published policy: its version, and the committed step it was published from."""

    version: int
    step: int


def known_policy(version: int, step: int, token: str, tokens: Sequence[str]) -> Policy:
    """The policy that serving announces as (version, step, token), placed in the history
    `tokens` (tokens[k] is the token after k commits).

    A policy of another history is what a rewind has left behind. The tip is published anew as
    the next version, so it counts as the policy of the step before the tip.
    """
    on_chain = step < len(tokens) and tokens[step] == token
    return Policy(version, step if on_chain else len(tokens) - 2)


def constant_policy(version: int, planned_steps: int) -> Policy:
    """The policy of a run that trains nothing: that of every step to come."""
    return Policy(version, planned_steps)


def version_at(policy: Policy, step: int) -> int:
    """Version that will be current after `step` commits, step >= policy.step: every commit
    publishes one."""
    return policy.version + step - policy.step


def wanted(rules: Rules, policy: Policy, planned_steps: int) -> int:
    """Groups that may wait or be in flight together, for the batches after `planned_steps`
    sealed ones, so that none rolled out now by `policy` is too old when trained."""
    total = 0
    for step in range(planned_steps + 1, rules.total_steps + 1):
        age = version_at(policy, step - 1) - policy.version
        if age > rules.max_age:
            break
        total += rules.groups_per_step - (rules.fresh_needed if age > 0 else 0)
    return total


@dataclass(frozen=True)
class Choice:
    """Groups to seal into the next batch (empty: not yet), and groups to drop as too old."""

    seal: tuple[int, ...]
    too_old: tuple[int, ...]


def choose(rules: Rules, accepted: Sequence[Waiting], version: int) -> Choice:
    """What becomes of the accepted groups when the next batch is trained at `version`.

    Older groups go first; at least `fresh_needed` are of `version` itself.
    """
    too_old = tuple(g.group_id for g in accepted if version - g.min_version > rules.max_age)
    usable = sorted(
        (g for g in accepted if version - g.min_version <= rules.max_age),
        key=lambda g: g.group_id,
    )
    fresh = [g.group_id for g in usable if g.min_version >= version]
    stale = [g.group_id for g in usable if g.min_version < version]
    room = rules.groups_per_step - rules.fresh_needed
    taken = stale[:room]
    missing = rules.groups_per_step - len(taken)
    if len(fresh) < missing:
        return Choice((), too_old)
    return Choice(tuple(sorted(taken + fresh[:missing])), too_old)
