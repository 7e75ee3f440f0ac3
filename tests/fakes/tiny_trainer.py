"""A tiny trainer's parts under the real checkpoint manager, for tests without a run."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from torchtitan_rl_ft.journal.checkpoints import Marker
from torchtitan_rl_ft.trainer.checkpoint import RLCheckpointManager
from torchtitan_rl_ft.trainer.group_link import GroupLink
from torchtitan_rl_ft.trainer.optimizers import RLOptimizers
from torchtitan_rl_ft.trainer.random_state import RandomState

CPU = torch.device("cpu")


class TinyTrainer:
    """A linear model with AdamW in `folder`; it may always save, and remembers what it was told."""

    def __init__(self, folder: Path, width: int = 4, optimizer=None, model=None, **keys) -> None:
        torch.manual_seed(0)
        self.model = model if model is not None else torch.nn.Linear(width, width)
        config = optimizer or default_adamw(lr=0.1)
        self.optimizers = RLOptimizers(config, model_parts=[self.model])
        self.schedulers = LRSchedulersContainer(self.optimizers, lambda step: 1 / (1 + step))
        self.width, self.step, self.history = width, 0, "h"
        self.layout: dict[str, int] = {"dp_shard": 1}
        self.told: list[str] = []
        self.removable: list[str] = []
        self.link = GroupLink()
        keys = {"enable": True, "last_save_model_only": False, "interval": 1, **keys}
        self.manager = RLCheckpointManager(
            RLCheckpointManager.Config(**keys),
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder=str(folder),
        )
        self.manager.bind(self, self.link, RandomState(self.link.rank, CPU))

    def train(self) -> None:
        self.model(torch.ones(1, self.width)).sum().backward()
        self.manager.maybe_wait_for_staging()
        self.optimizers.step()
        self.schedulers.step()
        self.optimizers.zero_grad()
        self.step += 1

    def path(self) -> Path:
        """Where the present state is saved."""
        return Path(self.manager._create_checkpoint_id(self.step))

    # Stateful -----------------------------------------------------------------------------

    def state_dict(self) -> dict:
        return {"progress": json.dumps({"step": self.step})}

    def load_state_dict(self, state: dict) -> None:
        self.step = json.loads(state["progress"])["step"]

    # SaveDuty -----------------------------------------------------------------------------

    def may_save(self, step: int) -> bool:
        return True

    def marker(self) -> Marker:
        return Marker(self.step, f"{self.history}{self.step}", "m", layout=self.layout)

    def saved(self, marker: Marker, path: str) -> list[str]:
        self.told.append(f"saved {marker.step}")
        return self.removable

    def save_failed(self, step: int, reason: str) -> None:
        self.told.append(f"failed {step}: {reason}")

    def restored(self, marker: Marker, path: str, differs: list[str]) -> None:
        self.told.append(f"restored {marker.step}, differs: {', '.join(differs) or 'nothing'}")
