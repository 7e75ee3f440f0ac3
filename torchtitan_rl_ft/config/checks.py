"""Every rule between the keys of a job. Each problem names its keys, their values and origins, and
the rule. All of them need only the resolved values; what needs TorchTitan is in `deep_checks.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torchtitan_rl_ft.config.resolve import Resolved
from torchtitan_rl_ft.config.rules import (
    exits,
    groups,
    journaling,
    learning,
    observing,
    replica_groups,
    routing,
    service,
    sizes,
    standby,
    suspicious,
    weights,
)
from torchtitan_rl_ft.config.rules.job import Job, Machine

RULES = (
    replica_groups.torchft_installed,
    replica_groups.replica_groups,
    replica_groups.timeouts,
    replica_groups.quorum,
    replica_groups.semi_sync,
    sizes.parallelism,
    sizes.batch,
    sizes.lengths,
    learning.policy_age,
    learning.algorithm,
    learning.plug_ins,
    learning.model_directory,
    learning.training,
    learning.numeric_guards,
    service.serving,
    routing.router,
    routing.external_engines,
    groups.engine_group_tables,
    groups.floor,
    groups.placement,
    service.session,
    service.health_times,
    journaling.resumable,
    journaling.saved_optimizer,
    journaling.dump_files,
    journaling.debug_modes,
    service.recovery,
    exits.exits,
    service.watching,
    standby.standby_trainers,
    service.chaos,
    service.secrets,
    observing.pages,
    weights.transport,
    weights.holders,
    observing.otel,
    observing.metric_sinks,
    observing.profiles,
)


@dataclass(frozen=True)
class Report:
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def check_holders(resolved: Resolved, machine: Machine | None = None) -> list[str]:
    """Broken rules of [weights] alone: what `torchtitan doctor` reads."""
    return list(weights.holders(Job(resolved, machine or Machine())))


def check(resolved: Resolved, machine: Machine | None = None, *, starting: bool = False) -> Report:
    """Every broken rule, and what is legal but suspicious. Pure but for `machine`.

    `starting`: the job is about to run here, so what it reads must be there.
    """
    job = Job(resolved, machine or Machine(), starting)
    problems = [problem for rule in RULES for problem in rule(job)]
    refused, ignored = suspicious.without_effect(job)
    return Report([*problems, *refused], [*suspicious.suspicious(job), *ignored])
