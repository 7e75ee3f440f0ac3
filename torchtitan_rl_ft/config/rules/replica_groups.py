"""Replica groups, quorum, and semi-synchronous training."""

from __future__ import annotations

from collections.abc import Iterator

from torchtitan_rl_ft.config.errors import near_miss
from torchtitan_rl_ft.config.rules.job import Job
from torchtitan_rl_ft.host.ports import LAST_PORT

SEMI_SYNC_METHODS = ("local_sgd", "diloco")
PROCESS_GROUPS = ("gloo", "nccl")


def torchft_installed(job: Job) -> Iterator[str]:
    if job.resolved.sections.fault_tolerance.enable and not job.machine.has_module("torchft"):
        yield job.broken(
            "torchft is not installed: pip install -r requirements-torchft.txt "
            "(or the extra torchtitan_rl_ft[torchft])",
            "fault_tolerance.enable",
        )


def replica_groups(job: Job) -> Iterator[str]:
    ft = job.resolved.sections.fault_tolerance
    section = "fault_tolerance"
    yield from job.positive(section, "replica_groups", "ranks_per_group")
    if ft.process_group not in PROCESS_GROUPS:
        hint = near_miss(ft.process_group, PROCESS_GROUPS)
        yield job.broken(
            f"{section}.process_group must be one of {', '.join(PROCESS_GROUPS)}{hint}",
            f"{section}.process_group",
        )
    if ft.replica_groups < 1:
        return
    if not ft.enable:
        if ft.replica_groups > 1:
            yield job.broken(
                "more than one replica group needs fault tolerance, without it the groups "
                "would train apart",
                f"{section}.replica_groups",
                f"{section}.enable",
            )
        return
    if not 1 <= ft.min_replica_size <= ft.replica_groups:
        yield job.broken(
            "the minimum must be between 1 and the number of replica groups",
            f"{section}.min_replica_size",
            f"{section}.replica_groups",
        )
    if ft.group_size != ft.replica_groups:
        yield job.broken(
            "group_size must equal replica_groups, or be 0 for automatic",
            f"{section}.group_size",
            f"{section}.replica_groups",
        )
    if not 0 <= ft.replica_id < ft.replica_groups:
        yield job.broken(
            "replica ids count from 0 to the number of replica groups minus 1",
            f"{section}.replica_id",
            f"{section}.replica_groups",
        )
    if ft.lighthouse_min_replicas != ft.min_replica_size:
        yield job.broken(
            "the lighthouse's minimum must equal ours: a smaller one lets it form quorums "
            "whose every commit is refused, a larger one stalls groups that may commit",
            f"{section}.lighthouse_min_replicas",
            f"{section}.min_replica_size",
        )


def timeouts(job: Job) -> Iterator[str]:
    comm = ("init_timeout_seconds", "train_timeout_seconds")
    yield from job.positive("comm", *comm)
    ft = job.resolved.sections.fault_tolerance
    yield from job.positive("fault_tolerance", "process_group_timeout_ms")
    if not ft.enable:
        return
    group_s = ft.process_group_timeout_ms / 1000
    train_s = job.resolved.get("comm.train_timeout_seconds")
    if not group_s < train_s:
        yield job.broken(
            "a lost peer group must be noticed before a collective inside the group gives up: "
            "process_group_timeout_ms must be shorter than train_timeout_seconds",
            "fault_tolerance.process_group_timeout_ms",
            "comm.train_timeout_seconds",
        )
    elif not group_s < ft.manager_timeout_s:
        yield job.broken(
            "a commit vote waits for a rank whose sum is running into its timeout: "
            "process_group_timeout_ms must be shorter than manager_timeout_s",
            "fault_tolerance.process_group_timeout_ms",
            "fault_tolerance.manager_timeout_s",
        )
    if not train_s < job.resolved.get("comm.init_timeout_seconds"):
        yield job.broken(
            "start-up takes longer than a step: train_timeout_seconds must be shorter than "
            "init_timeout_seconds",
            "comm.train_timeout_seconds",
            "comm.init_timeout_seconds",
        )


def quorum(job: Job) -> Iterator[str]:
    ft, section = job.resolved.sections.fault_tolerance, "fault_tolerance"
    yield from job.positive(
        section,
        "heartbeat_interval_ms",
        "heartbeat_timeout_ms",
        "join_timeout_ms",
        "quorum_tick_ms",
        "quorum_timeout_s",
        "connect_timeout_s",
        "manager_timeout_s",
        "max_commit_retries",
    )
    yield from job.not_negative(section, "quorum_retries")
    if not ft.heartbeat_interval_ms < ft.heartbeat_timeout_ms:
        yield job.broken(
            "a group must beat more often than the lighthouse's patience lasts",
            f"{section}.heartbeat_interval_ms",
            f"{section}.heartbeat_timeout_ms",
        )
    if not 0 < ft.heal_warn_share <= 1:
        yield job.broken("a share lies between 0 and 1", f"{section}.heal_warn_share")
    yield from job.port(section, "heal_port")
    if ":" in ft.heal_address and not _has_port(ft.heal_address):
        yield job.broken("an address is host or host:port", f"{section}.heal_address")
    if not ft.join_timeout_ms < ft.quorum_timeout_s * 1000:
        yield job.broken(
            "the lighthouse waits join_timeout_ms for stragglers, a group must wait longer",
            f"{section}.join_timeout_ms",
            f"{section}.quorum_timeout_s",
        )
    elif not ft.heartbeat_timeout_ms < ft.quorum_timeout_s * 1000:
        yield job.broken(
            "the lighthouse gives a silent group up after heartbeat_timeout_ms, the others must "
            "wait longer for a quorum",
            f"{section}.heartbeat_timeout_ms",
            f"{section}.quorum_timeout_s",
        )


def _has_port(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and ":" not in host and port.isdecimal() and 0 < int(port) <= LAST_PORT


def semi_sync(job: Job) -> Iterator[str]:
    ft, section = job.resolved.sections.fault_tolerance, "fault_tolerance"
    method = ft.semi_sync_method
    if method is None:
        return
    if method not in SEMI_SYNC_METHODS:
        yield job.broken(
            f"semi_sync_method must be one of {', '.join(SEMI_SYNC_METHODS)} or none"
            f"{near_miss(method, SEMI_SYNC_METHODS)}",
            f"{section}.semi_sync_method",
        )
        return
    if not ft.enable:
        yield job.broken(
            "semi-synchronous training is between replica groups of torchft",
            f"{section}.semi_sync_method",
            f"{section}.enable",
        )
    yield from _fragments(job)
    yield from _per_fragment_commits(job)
    if ft.should_quantize:
        yield job.broken(
            "torchft quantizes with FP8 kernels for CUDA under nccl only, scaled per element of a "
            "flat bucket, which saves nothing; the outer all-reduce is exact",
            f"{section}.should_quantize",
        )


def _per_fragment_commits(job: Job) -> Iterator[str]:
    """Syncs that are applied later, or in part: a sample would be committed fragment by fragment,
    so that no step has a state that holds it, and a loss in between would train it in half of the
    model only."""
    ft, section = job.resolved.sections.fault_tolerance, "fault_tolerance"
    why = "a sample is committed once, for the whole model, at the end of its window"
    if ft.fragment_sync_delay > 0:
        yield job.broken(
            f"{why}: fragment_sync_delay, which applies a fragment's sync later, must be 0",
            f"{section}.fragment_sync_delay",
        )
    if 0 < ft.fragment_update_alpha <= 1:
        yield job.broken(
            f"{why}, and all groups are equal then: fragment_update_alpha, the share of its own "
            "parameters that a group would keep, must be 0",
            f"{section}.fragment_update_alpha",
        )


def _fragments(job: Job) -> Iterator[str]:
    ft, section = job.resolved.sections.fault_tolerance, "fault_tolerance"
    yield from job.positive(section, "sync_steps", "num_fragments")
    yield from job.not_negative(section, "fragment_sync_delay", "outer_momentum")
    yield from job.positive(section, "outer_lr")
    if ft.outer_momentum >= 1:
        yield job.broken("outer_momentum must be below 1", f"{section}.outer_momentum")
    if not 0 <= ft.fragment_update_alpha <= 1:
        yield job.broken(
            "fragment_update_alpha must be between 0 and 1", f"{section}.fragment_update_alpha"
        )
    named = len(ft.module_fqns_per_model_fragment)
    if named and ft.num_fragments not in (1, named):
        yield job.broken(
            "num_fragments must be the number of fragments that are named",
            f"{section}.num_fragments",
            f"{section}.module_fqns_per_model_fragment",
        )
    fragments_key = "module_fqns_per_model_fragment" if named else "num_fragments"
    fragments = named or ft.num_fragments
    if ft.sync_steps < 1 or fragments < 1:
        return
    if ft.sync_steps % fragments:
        yield job.broken(
            "sync_steps must be a multiple of the number of fragments",
            f"{section}.sync_steps",
            f"{section}.{fragments_key}",
        )
    elif ft.fragment_sync_delay >= ft.sync_steps // fragments:
        yield job.broken(
            "fragment_sync_delay must be shorter than the period of one fragment "
            f"(sync_steps / fragments = {ft.sync_steps // fragments})",
            f"{section}.fragment_sync_delay",
            f"{section}.sync_steps",
            f"{section}.{fragments_key}",
        )
