"""A rank's random numbers: a function of (seed, step, rank) in a step, state between steps.

At the start of every attempt all generators are seeded from (seed, step, rank), so that a retried
or replayed step draws the same numbers, in whatever process and however many were drawn before.
What is drawn between two steps follows from where the step before left the generators: that state
is part of a checkpoint, rank by rank. In another layout there is no such rank, and it is seeded as
for a step.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch


def seed_all(seed: int, step: int, rank: int, inner_step: int = 0) -> None:
    """Seed Python's, NumPy's and torch's generators, those of devices included. `inner_step`: of a
    window."""
    digest = hashlib.sha256(f"{seed}|{step}|{rank}|{inner_step}".encode()).digest()
    random.seed(digest[8:16])
    np.random.seed(int.from_bytes(digest[16:20], "little"))
    torch.manual_seed(int.from_bytes(digest[:7], "little"))


class RandomState:
    """The generators of this rank, as tensors under its name: `Stateful` of TorchTitan."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._name, self._device = f"rank-{rank}", device

    def state_dict(self) -> dict[str, Any]:
        version, words, gauss = random.getstate()
        numpy = np.random.get_state(legacy=False)
        state = {
            "python": torch.tensor([version, *words], dtype=torch.int64),
            "python_gauss": torch.tensor([gauss is not None, gauss or 0.0], dtype=torch.float64),
            "numpy": torch.tensor(
                [*numpy["state"]["key"].tolist(), numpy["state"]["pos"], numpy["has_gauss"]],
                dtype=torch.int64,
            ),
            "numpy_gauss": torch.tensor([numpy["gauss"]], dtype=torch.float64),
            "torch": torch.get_rng_state(),
        }
        if self._device.type != "cpu":
            state["device"] = torch.get_device_module(self._device).get_rng_state(self._device)
        return {self._name: state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises KeyError when this rank is not in it."""
        state = state_dict[self._name]
        version, *words = state["python"].tolist()
        known, gauss = state["python_gauss"].tolist()
        random.setstate((version, tuple(words), gauss if known else None))
        *key, position, has_gauss = state["numpy"].tolist()
        np.random.set_state(
            (
                "MT19937",
                np.array(key, np.uint32),
                position,
                has_gauss,
                *state["numpy_gauss"].tolist(),
            )
        )
        torch.set_rng_state(state["torch"])
        if self._device.type != "cpu":
            module = torch.get_device_module(self._device)
            module.set_rng_state(state["device"], self._device)
