"""Endless, resumable order over a fixed number of prompts."""

from __future__ import annotations

from typing import Any

import numpy as np


class ShuffledVisits:
    """Epoch after epoch, each in its own order: a pure function of (seed, epoch)."""

    def __init__(self, size: int, seed: int) -> None:
        if size < 1:
            raise ValueError("there are no prompts")
        self._size, self._seed = size, seed
        self._epoch = self._position = 0
        self._order = self._shuffled()

    def next(self, n: int) -> list[tuple[int, int]]:
        """The next `n` visits as (epoch, index)."""
        visits = []
        for _ in range(n):
            visits.append((self._epoch, int(self._order[self._position])))
            self._position += 1
            if self._position == self._size:
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._shuffled()
        return visits

    def state_dict(self) -> dict[str, Any]:
        return {
            "size": self._size,
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError when the position is of other prompts or another seed."""
        for key, mine in (("size", self._size), ("seed", self._seed)):
            if state.get(key) != mine:
                raise ValueError(
                    f"the journal's position is of a source with {key} {state.get(key)}, this "
                    f"one has {mine}: go on with the data it was started with, or start anew"
                )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        if not 0 <= self._position < self._size:
            raise ValueError(f"position {self._position} is outside of {self._size} prompts")
        self._order = self._shuffled()

    def _shuffled(self) -> np.ndarray:
        return np.random.default_rng([self._seed, self._epoch]).permutation(self._size)
