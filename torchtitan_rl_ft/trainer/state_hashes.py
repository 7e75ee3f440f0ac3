"""Replica groups compared by hashes of what they hold.

In sync mode all groups hold the same bits. A flipped bit in one of them stays for ever and is in
every later gradient, yet no sum shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

PRIME = 2**40 - 87  # hashes below it are exact in a float64
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_hash(tensor: torch.Tensor) -> int:
    """A number below PRIME of the tensor's bits: torch.hash_tensor, the XOR of all elements, which
    is blind to two equal changes, mixed with their sum."""
    if tensor.numel() == 0:
        return 0
    bits = tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])
    xor, total = int(torch.hash_tensor(bits).view(torch.int64)), int(bits.sum(dtype=torch.int64))
    return (xor + (total << 64)) % PRIME


def hashes(tensors: Mapping[str, torch.Tensor]) -> np.ndarray:
    """float64 [len(tensors)], in the mapping's order."""
    return np.array([float(tensor_hash(t)) for t in tensors.values()])


@dataclass(frozen=True)
class Difference:
    """Groups (places in the quorum) that hold other bits of `name` than the rest on the same rank
    of their group. Without a majority the first group's bits count."""

    name: str
    rank: int
    groups: tuple[int, ...]
    majority: bool

    def __str__(self) -> str:
        groups = ", ".join(map(str, self.groups))
        against = "the majority" if self.majority else "group 0 (no majority)"
        return f"{self.name} on rank {self.rank} of group {groups} differs from {against}"


def differences(table: np.ndarray, names: list[str], degree: int) -> list[Difference]:
    """`table` [groups * degree, len(names)]: the hashes of every data-parallel rank."""
    groups = len(table) // degree
    by_group = table.reshape(groups, degree, len(names))
    found = []
    for rank, column in np.argwhere((by_group != by_group[:1]).any(axis=0)):
        values = by_group[:, rank, column]
        kinds, counts = np.unique(values, return_counts=True)
        majority = bool(counts.max() * 2 > groups)
        right = kinds[counts.argmax()] if majority else values[0]
        odd = tuple(int(g) for g in np.flatnonzero(values != right))
        found.append(Difference(names[column], int(rank), odd, majority))
    return found
