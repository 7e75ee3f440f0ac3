"""Groups of engines, and the devices that they share with the trainer."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence

from torchtitan_rl_ft.config.groups import POLICY, engine_groups, policy_engines, takes_versions
from torchtitan_rl_ft.config.placement import (
    engine_devices,
    engine_ranks,
    exceeded,
    trainer_devices,
)
from torchtitan_rl_ft.config.rules.job import Job
from torchtitan_rl_ft.config.sections import EngineGroup

TABLE = "rollout.groups"


def engine_group_tables(job: Job) -> Iterator[str]:
    rollout = job.resolved.sections.rollout
    if not rollout.groups:
        return
    if job.resolved.given("rollout.engines"):
        yield (
            job.broken(
                "the groups say how many engines there are: leave rollout.engines out",
                "rollout.engines",
            )
            + f", {len(rollout.groups)} groups ({_origin(job)})"
        )
    for i, group in enumerate(rollout.groups):
        yield from _one(job, i, group)
    yield from _names(job, rollout.groups)
    yield from _roles(job, rollout.groups)


def _one(job: Job, i: int, group: EngineGroup) -> Iterator[str]:
    if not group.name or not all(c.isalnum() or c in "-_." for c in group.name):
        yield _wrong(job, i, "name", "a name has letters, digits, and - _ . only")
    for key in ("engines", "nodes_per_engine"):
        if getattr(group, key) < 1:
            yield _wrong(job, i, key, "must be at least 1")
    if group.role == "frozen":
        if not group.model:
            yield _wrong(job, i, "model", "a frozen group keeps a checkpoint of its own: name it")
        elif not job.machine.exists(os.path.join(group.model, "config.json")):
            yield _wrong(job, i, "model", "there is no model directory with a config.json")
    elif group.model and not _same_path(group.model, job.resolved.get("model.hf_assets_path")):
        yield _wrong(
            job,
            i,
            "model",
            f"a {group.role} group takes the policy's versions, so its model is the job's: leave "
            "it out, or make the group frozen",
        )
    yield from _nodes(job, i, group)
    for argument in group.engine_args:
        if argument.partition("=")[0] in ("--api-key", "--admin-api-key"):
            # The message does not repeat the secret.
            yield f"{TABLE}[{i}].engine_args: no secret belongs into a configuration"


def _nodes(job: Job, i: int, group: EngineGroup) -> Iterator[str]:
    if group.nodes_per_engine < 2:
        return
    try:
        ranks = engine_ranks([*job.resolved.sections.rollout.engine_args, *group.engine_args])
    except ValueError as e:
        yield _wrong(job, i, "engine_args", f"a parallel degree is no number ({e})")
        return
    if ranks % group.nodes_per_engine:
        yield _wrong(
            job,
            i,
            "nodes_per_engine",
            f"the {ranks} ranks of an engine (--tp-size x --pp-size) cannot be split evenly",
        )


def _names(job: Job, groups: Sequence[EngineGroup]) -> Iterator[str]:
    first: dict[str, int] = {}
    for i, group in enumerate(groups):
        if group.name in first:
            yield _wrong(job, i, "name", f"{TABLE}[{first[group.name]}] has this name already")
        first.setdefault(group.name, i)
    i = first.get(POLICY)
    if i is None:
        return
    others = [g.name for g in groups if takes_versions(g) and g.name != POLICY]
    if not takes_versions(groups[i]) or others:
        yield _wrong(
            job, i, "name", "names all groups that take the policy's versions: choose another"
        )


def _roles(job: Job, groups: Sequence[EngineGroup]) -> Iterator[str]:
    roles = Counter(g.role for g in groups)
    for one, other in (("prefill", "decode"), ("decode", "prefill")):
        i = next((i for i, g in enumerate(groups) if g.role == one), None)
        if i is not None and not roles[other]:
            yield _wrong(job, i, "role", f"a {one} group needs a {other} group")
        elif roles[one] > 1:
            yield _wrong(job, i or 0, "role", f"there is one {one} group at most")
    if not roles["regular"] and not roles["prefill"] and not roles["decode"]:
        yield (
            f"no group serves the policy: add one of role regular, or prefill and decode: "
            f"{TABLE} ({_origin(job)})"
        )


def floor(job: Job) -> Iterator[str]:
    rollout = job.resolved.sections.rollout
    engines = policy_engines(engine_groups(rollout)) + len(rollout.external_urls)
    if engines > 0 and not 1 <= rollout.min_engines <= engines:
        yield job.broken(
            "the minimum must be between 1 and the number of engines that serve the policy",
            "rollout.min_engines",
            "rollout.engines",
        )


def placement(job: Job) -> Iterator[str]:
    """Colocated trainers run on the devices of the engines and on no others."""
    rollout = job.resolved.sections.rollout
    if rollout.placement != "colocated":
        return
    if rollout.external_urls:
        yield job.broken(
            "engines that somebody else owns do not give their memory up",
            "rollout.placement",
            "rollout.external_urls",
        )
    if rollout.standby_engines:
        yield job.broken(
            "a standby engine would hold devices that the trainer computes on",
            "rollout.placement",
            "rollout.standby_engines",
        )
    if job.resolved.sections.rl.mode != "sync":
        yield job.broken(
            "engines and trainer take turns, so rollouts cannot run ahead of training",
            "rollout.placement",
            "rl.mode",
        )
    ft = job.resolved.sections.fault_tolerance
    try:
        wanted, there = trainer_devices(ft), engine_devices(rollout)
    except ValueError as e:
        yield job.broken(f"a parallel degree is no number ({e})", "rollout.engine_args")
        return
    if (problem := exceeded(wanted, there)) is not None:
        yield job.broken(
            problem,
            "rollout.placement",
            "fault_tolerance.replica_groups",
            "fault_tolerance.ranks_per_group",
        )


def _same_path(a: str, b: str) -> bool:
    return bool(b) and os.path.realpath(a) == os.path.realpath(b)


def _wrong(job: Job, i: int, key: str, rule: str) -> str:
    value = getattr(job.resolved.sections.rollout.groups[i], key)
    return f"{rule}: {TABLE}[{i}].{key} = {value!r} ({_origin(job)})"


def _origin(job: Job) -> str:
    return job.resolved.origins[TABLE]
