"""Copies a rank's shards to their places in an image, and looks at every number on the way."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from torchtitan_rl_ft.weights.publisher import gathered
from torchtitan_rl_ft.weights.shards import Part, ShardPlan, local_tensor

CPU_CHUNK_BYTES = 1 << 20
"""What is copied is looked at while the cache still has it."""

DEVICE_CHUNK_BYTES = 1 << 28


class ShardWriter:
    """At most `buffer_bytes` of gathered tensors exist at a time, or one if that is larger."""

    def __init__(self, plan: ShardPlan, buffer_bytes: int) -> None:
        self.plan, self._buffer_bytes = plan, buffer_bytes

    def write(self, tensors: Mapping[str, torch.Tensor], image: torch.Tensor | None) -> str | None:
        """Write this rank's parts of `tensors` into `image` (its bytes, uint8); collective over the
        tensors' meshes. None: only take part. Returns a tensor that holds NaN or infinity."""
        bad: list[str] = []
        if image is not None:
            for part in self.plan.own:
                self._put(part, local_tensor(tensors[part.name]), image, bad)
        parts = {part.name: part for part in self.plan.gathered}
        wanted = {name: tensors[name] for name in parts}
        for name, whole in gathered(wanted, self._buffer_bytes):
            if image is not None:
                self._put(parts[name], whole, image, bad)
        if image is not None and self.plan.writes_header:
            header = torch.frombuffer(bytearray(self.plan.image.header), dtype=torch.uint8)
            image[: len(header)].copy_(header)
        return min(bad, default=None)

    @staticmethod
    def _put(part: Part, source: torch.Tensor, image: torch.Tensor, bad: list[str]) -> None:
        n_items = part.run[1] - part.run[0]
        values = source.reshape(-1)[part.local : part.local + n_items]
        target = image[part.start : part.start + n_items * values.element_size()]
        if not finite_copy(values, target):
            bad.append(part.name)


def finite_copy(values: torch.Tensor, target: torch.Tensor) -> bool:
    """Copy contiguous floating-point `values` into the bytes of `target`. False: one of them is NaN
    or infinite; all are copied all the same."""
    on_cpu = values.device.type == "cpu"
    item = values.element_size()
    step = (CPU_CHUNK_BYTES if on_cpu else DEVICE_CHUNK_BYTES) // item
    extremes = []
    for start in range(0, values.numel(), step):
        chunk = values[start : start + step]
        target[start * item : (start + chunk.numel()) * item].copy_(chunk.view(torch.uint8))
        # NaN propagates through both. A sum could overflow, isfinite costs ten times as much.
        low, high = torch.aminmax(chunk)
        extremes += [low, high]
    if on_cpu:
        return all(math.isfinite(e.item()) for e in extremes)
    return not extremes or bool(torch.isfinite(torch.stack(extremes)).all())
