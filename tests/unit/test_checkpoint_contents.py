"""What a checkpoint must hold to be gone on with, on TorchTitan's own DCP format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    default_adamw,
)

from torchtitan_rl_ft.trainer.checkpoint import RLCheckpointManager


@pytest.fixture
def one_rank(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Progress:
    text = "{}"

    def state_dict(self):
        return {"progress": self.text}

    def load_state_dict(self, state):
        self.text = state["progress"]


class Parts:
    """A tiny trainer's parts under a checkpoint manager in `folder`."""

    def __init__(self, folder: Path, **keys) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 4)
        self.optimizers = OptimizersContainer(default_adamw(lr=0.1), model_parts=[self.model])
        self.schedulers = LRSchedulersContainer(self.optimizers, lambda step: 1 / (1 + step))
        self.progress = Progress()
        self.manager = RLCheckpointManager(
            RLCheckpointManager.Config(enable=True, last_save_model_only=False, **keys),
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.progress},
            sd_adapter=None,
            base_folder=str(folder),
        )

    def train(self) -> None:
        self.model(torch.ones(1, 4)).sum().backward()
        self.optimizers.step()
        self.schedulers.step()
        self.optimizers.zero_grad()

    def save(self, step: int, without: str = "") -> None:
        states = {k: v for k, v in self.manager.states.items() if k != without}
        self.manager.dcp_save(
            self.manager._flattened_model_states_sd(states),
            checkpoint_id=self.manager._create_checkpoint_id(step),
            async_mode=self.manager.async_mode,
        )


def test_everything_comes_back(one_rank, tmp_path):
    saved = Parts(tmp_path)
    saved.train()
    saved.progress.text = json.dumps({"step": 1})
    saved.save(1)
    found = Parts(tmp_path)
    found.manager.restore(1)
    assert found.progress.text == saved.progress.text
    assert torch.equal(found.model.weight, saved.model.weight)
    ours, theirs = (p.schedulers.schedulers[0].state_dict() for p in (found, saved))
    assert ours["last_epoch"] == theirs["last_epoch"] == 1


@pytest.mark.row("A5")
@pytest.mark.parametrize("missing", ["lr_scheduler", "train_state", "optimizer"])
def test_a_checkpoint_that_lacks_a_state_is_an_error(one_rank, tmp_path, missing):
    saved = Parts(tmp_path)
    saved.train()
    saved.save(1, without=missing)
    with pytest.raises((RuntimeError, CheckpointException)) as e:
        Parts(tmp_path).manager.restore(1)
    text = str(e.value)
    assert missing in text or "Missing key" in text


@pytest.mark.row("A5")
def test_without_the_state_of_a_stateless_optimizer_the_rest_comes_back(one_rank, tmp_path):
    saved = Parts(tmp_path)
    saved.train()
    saved.save(1, without="optimizer")
    found = Parts(tmp_path, exclude_from_loading=["optimizer"])
    found.manager.restore(1)
    assert torch.equal(found.model.weight, saved.model.weight)
    assert found.schedulers.schedulers[0].last_epoch == 1
