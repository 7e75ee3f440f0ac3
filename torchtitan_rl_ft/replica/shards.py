"""What a rank holds of a distributed tensor."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a parameter, gradient or optimizer tensor on this rank, not a copy."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
