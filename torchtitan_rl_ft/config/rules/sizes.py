"""Sizes that must divide one another: degrees, batches, rows."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torchtitan_rl_ft.config.automatic import data_parallel_parts
from torchtitan_rl_ft.config.rules.job import Job


def parallelism(job: Job) -> Iterator[str]:
    get, ft = job.resolved.get, job.resolved.sections.fault_tolerance
    degrees = [
        f"parallelism.{name}"
        for name in (
            "data_parallel_replicate_degree",
            "context_parallel_degree",
            "tensor_parallel_degree",
            "pipeline_parallel_degree",
        )
    ]
    shard = "parallelism.data_parallel_shard_degree"
    wrong = [path for path in degrees if get(path) < 1]
    if wrong or (get(shard) < 1 and get(shard) != -1):
        for path in wrong or [shard]:
            yield job.broken(f"{path} must be positive", path)
        return
    if ft.enable and get("parallelism.data_parallel_replicate_degree") > 1:
        yield job.broken(
            "replicas are torchft's replica groups; inside a group parameters are sharded",
            "parallelism.data_parallel_replicate_degree",
            "fault_tolerance.enable",
        )
    others = math.prod(get(path) for path in degrees)
    sharded = max(1, ft.ranks_per_group // others) if get(shard) == -1 else get(shard)
    if others * sharded != ft.ranks_per_group:
        yield job.broken(
            "the parallel degrees must multiply to the ranks of a group",
            "fault_tolerance.ranks_per_group",
            *(path for path in degrees if get(path) > 1),
            shard,
        )
    divisor = _sequence_divisor(job)
    if get("training.seq_len") % divisor:
        yield job.broken(
            f"sequence and context parallelism split a row into {divisor} equal parts",
            "training.seq_len",
            "parallelism.tensor_parallel_degree",
            "parallelism.context_parallel_degree",
        )


def _sequence_divisor(job: Job) -> int:
    get = job.resolved.get
    tensor = get("parallelism.tensor_parallel_degree")
    context = get("parallelism.context_parallel_degree")
    sequence = tensor if get("parallelism.enable_sequence_parallel") else 1
    return sequence * (2 * context if context > 1 else 1)


def shards(job: Job) -> int:
    """Parts into which a batch is split."""
    ft, parallelism = job.resolved.sections.fault_tolerance, job.resolved.values["parallelism"]
    return data_parallel_parts(ft.replica_groups, ft.ranks_per_group, parallelism)


def batch(job: Job) -> Iterator[str]:
    rl = job.resolved.sections.rl
    yield from job.positive("rl", "groups_per_step", "samples_per_prompt")
    yield from job.positive("training", "local_batch_size", "steps", "seq_len")
    samples = rl.groups_per_step * rl.samples_per_prompt
    parts = shards(job)
    if samples < 1 or parts < 1:
        return
    if samples % parts:
        down = samples // parts * parts
        nearest = " or ".join(str(n) for n in (down, down + parts) if n)
        yield job.broken(
            f"a batch of {samples} samples cannot be split evenly over {parts} data-parallel "
            f"parts (replica groups x ranks that share a batch); {nearest} samples can",
            "rl.groups_per_step",
            "rl.samples_per_prompt",
            "fault_tolerance.replica_groups",
            "fault_tolerance.ranks_per_group",
        )
    if job.resolved.get("training.global_batch_size") not in (-1, samples):
        yield job.broken(
            f"a batch holds groups_per_step x samples_per_prompt = {samples} samples: leave "
            "global_batch_size out",
            "training.global_batch_size",
            "rl.groups_per_step",
            "rl.samples_per_prompt",
        )


def lengths(job: Job) -> Iterator[str]:
    rollout = job.resolved.sections.rollout
    yield from job.positive("rollout", "max_prompt_tokens", "max_response_tokens")
    if rollout.max_prompt_tokens + rollout.max_response_tokens > job.resolved.get(
        "training.seq_len"
    ):
        yield job.broken(
            "the longest prompt and answer together must fit into a row of seq_len tokens",
            "rollout.max_prompt_tokens",
            "rollout.max_response_tokens",
            "training.seq_len",
        )
