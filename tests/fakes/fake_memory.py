"""Memory of the fake engine that is released and resumed as SGLang does it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

TAGS = ("kv_cache", "weights", "cuda_graph")


class MemoryMisused(Exception):
    """SGLang's scheduler would end: an assertion, or a fault of the device."""


class Memory:
    """`backup`: weights come back as they were; else as whatever was in the memory meanwhile."""

    def __init__(self, backup: bool) -> None:
        self._backup = backup
        self.released: set[str] = set()

    def release(self, tags: list[str] | None, *, idle: bool) -> None:
        if not idle:
            raise MemoryMisused("release_memory_occupation should be called only when idle")
        self.released |= set(tags or TAGS)

    def resume(self, tags: list[str] | None, wipe: Callable[[], None]) -> None:
        for tag in tags or TAGS:
            if tag not in self.released:
                raise MemoryMisused(f"{tag} was not released")
            self.released.remove(tag)
        if "weights" in (tags or TAGS) and not self._backup:
            wipe()

    def need(self, *tags: str) -> None:
        if used := self.released & set(tags):
            raise MemoryMisused(f"{min(used)} is used and released")


def wipe(parameters: dict[str, np.ndarray]) -> None:
    """Leave random weights."""
    random = np.random.default_rng()
    for name, array in parameters.items():
        parameters[name] = random.standard_normal(array.shape).astype(array.dtype)
