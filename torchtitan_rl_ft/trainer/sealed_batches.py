"""The data loader seam of TorchTitan, for a trainer whose data comes sealed from the journal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader


class SealedBatchLoader(BaseDataLoader):
    """Yields nothing: batches are asked for step by step, and the data cursor is the ledger's,
    so there is no loader state to save, to shard or to lose."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, **kwargs: Any) -> None:
        self.config = config

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass
