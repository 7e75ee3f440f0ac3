"""Gradients summed over replica groups, in buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from torchtitan_rl_ft.replica.shards import local_shard

BUCKET_BYTES = 32 * 1024 * 1024


def local_gradients(params: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    """This rank's gradient shards, in parameter order. A parameter without a gradient gets a zero
    one, so that all groups reduce the same bytes."""
    shards = []
    for p in params:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        shards.append(local_shard(p.grad))
    return shards


def sum_over_groups(
    gradients: list[torch.Tensor], all_reduce: Callable[[torch.Tensor], Callable[[], None]]
) -> None:
    """Replace each gradient by its sum over the participating groups, in place.

    `all_reduce` starts a sum of a flat tensor in place and returns its wait. All buckets are in
    flight at once; the order is the same in all groups. SUM, not AVG: the loss weights already
    divide by the global batch, so the number of groups never enters.
    """
    pending: list[tuple[torch.Tensor, list[torch.Tensor], Callable[[], None]]] = []
    for bucket in _buckets(gradients):
        flat = torch.cat([g.reshape(-1) for g in bucket])
        pending.append((flat, bucket, all_reduce(flat)))
    for flat, bucket, wait in pending:
        wait()
        offset = 0
        for g in bucket:
            g.copy_(flat[offset : offset + g.numel()].view_as(g))
            offset += g.numel()


def _buckets(gradients: list[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    size = 0
    for g in gradients:
        if bucket and (size + g.nbytes > BUCKET_BYTES or g.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(g)
        size += g.nbytes
    if bucket:
        yield bucket
