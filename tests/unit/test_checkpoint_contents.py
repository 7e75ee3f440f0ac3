"""What a checkpoint must hold to be gone on with, on TorchTitan's own DCP format."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import random
import resource
import signal
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fakes.tiny_trainer import CPU, TinyTrainer
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torchtitan.components.optimizer.optimizer import ParamGroupConfig

from torchtitan_rl_ft.journal.checkpoints import (
    MARKER,
    CheckpointDamaged,
    CheckpointUnusable,
    flaw,
    read_marker,
    write_marker,
)
from torchtitan_rl_ft.trainer import checkpoint
from torchtitan_rl_ft.trainer.checkpoint_folder import FoldersDiffer, reading, require_same_folder
from torchtitan_rl_ft.trainer.group_link import GroupLink
from torchtitan_rl_ft.trainer.optimizers import RLOptimizers
from torchtitan_rl_ft.trainer.random_state import RandomState, seed_all


@pytest.fixture
def one_rank(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def draws() -> list[float]:
    """A number of each generator of this process."""
    return [random.gauss(0, 1), random.random(), float(np.random.randn()), float(torch.rand(()))]


def saved_once(folder, **keys) -> TinyTrainer:
    trainer = TinyTrainer(folder, **keys)
    trainer.train()
    trainer.manager.save(1)
    return trainer


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_everything_comes_back_also_the_random_numbers(one_rank, tmp_path, async_mode):
    saved = TinyTrainer(tmp_path, async_mode=async_mode)
    saved.train()
    seed_all(7, 3, 0)
    random.gauss(0, 1)  # leaves a second number behind, which is state too
    np.random.randn()
    path = saved.path()
    saved.manager.save(1)
    expected = draws()
    weight = saved.model.weight.detach().clone()
    saved.train()  # goes on while an asynchronous save may still be writing
    saved.manager.finish(wait=True)
    assert saved.told == ["saved 1"]
    found = TinyTrainer(tmp_path)
    found.manager.restore(path)
    assert found.step == 1 and found.told == ["restored 1, differs: nothing"]
    assert torch.equal(found.model.weight, weight)
    assert found.schedulers.schedulers[0].state_dict()["last_epoch"] == 1
    assert draws() == expected


@pytest.mark.row("E9")
def test_the_marker_names_state_parts_and_files(one_rank, tmp_path):
    saved = saved_once(tmp_path)
    marker = read_marker(saved.path())
    assert (marker.step, marker.token) == (1, "h1")
    assert set(marker.parts) == {"model", "optimizer", "lr_scheduler", "train_state", "rng"}
    assert set(marker.files) == {".metadata", "__0_0.distcp"}
    assert flaw(saved.path(), 1, "h1") is None


@pytest.mark.row("E9")
def test_a_changed_byte_is_found_before_anything_is_loaded(one_rank, tmp_path):
    saved = saved_once(tmp_path)
    shard = saved.path() / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    found = TinyTrainer(tmp_path)
    before = found.model.weight.detach().clone()
    with pytest.raises(CheckpointDamaged, match="__0_0.distcp is not what was written"):
        found.manager.restore(saved.path())
    assert torch.equal(found.model.weight, before)


@pytest.mark.row("A5")
@pytest.mark.parametrize("missing", ["lr_scheduler", "train_state", "optimizer", "rng"])
def test_a_checkpoint_that_lacks_a_part_is_an_error_that_names_it(one_rank, tmp_path, missing):
    saved = TinyTrainer(tmp_path)
    saved.train()
    saved.manager.leave_out(missing)
    saved.manager.save(1)
    with pytest.raises(CheckpointUnusable, match=f"lacks '{missing}'"):
        TinyTrainer(tmp_path).manager.restore(saved.path())
    # The marker alone proves nothing.
    marker = read_marker(saved.path())
    write_marker(saved.path(), dataclasses.replace(marker, parts=[*marker.parts, missing]))
    with pytest.raises(CheckpointUnusable, match=f"lacks '{missing}'"):
        TinyTrainer(tmp_path).manager.restore(saved.path())


@pytest.mark.row("A5")
def test_without_the_state_of_a_stateless_optimizer_the_rest_comes_back(one_rank, tmp_path):
    sgd = RLOptimizers.Config(
        param_groups=[
            ParamGroupConfig(pattern=".*", optimizer_name="SGD", optimizer_kwargs={"lr": 0.1})
        ]
    )
    saved = TinyTrainer(tmp_path, optimizer=sgd)
    saved.manager.leave_out("optimizer")
    saved.train()
    saved.manager.save(1)
    assert "optimizer" not in read_marker(saved.path()).parts
    found = TinyTrainer(tmp_path, optimizer=sgd)
    found.manager.leave_out("optimizer")
    found.manager.restore(saved.path())
    assert torch.equal(found.model.weight, saved.model.weight)
    assert found.schedulers.schedulers[0].last_epoch == 1


def test_a_checkpoint_of_another_model_is_refused_with_the_first_difference(one_rank, tmp_path):
    saved = saved_once(tmp_path)
    with pytest.raises(CheckpointUnusable, match=r"weight is \(4, 4\), here \(5, 5\).*dump_folder"):
        TinyTrainer(tmp_path, width=5).manager.restore(saved.path())
    marker = dataclasses.replace(read_marker(saved.path()), model="other")
    write_marker(saved.path(), marker)
    with pytest.raises(CheckpointUnusable, match="another model"):
        TinyTrainer(tmp_path).manager.restore(saved.path())


def test_a_checkpoint_of_another_format_is_refused(one_rank, tmp_path):
    saved = saved_once(tmp_path)
    told = json.loads((saved.path() / MARKER).read_bytes())
    (saved.path() / MARKER).write_text(json.dumps({**told, "format": 99}))
    with pytest.raises(CheckpointUnusable, match="not of format 1"):
        TinyTrainer(tmp_path).manager.restore(saved.path())


def test_in_another_layout_random_numbers_are_not_those_of_a_rank_that_is_gone(one_rank, tmp_path):
    saved = saved_once(tmp_path)
    expected = draws()
    found = TinyTrainer(tmp_path)
    found.layout = {"dp_shard": 2}
    seed_all(0, 0, 0)
    own = draws()
    seed_all(0, 0, 0)
    found.manager.restore(saved.path())
    assert found.told == ["restored 1, differs: dp_shard"]
    assert draws() == own != expected


def test_random_numbers_follow_from_seed_step_and_rank():
    def of(*args):
        seed_all(*args)
        return draws()

    assert of(1, 2, 3) == of(1, 2, 3)
    others = [of(1, 2, 3), of(2, 2, 3), of(1, 3, 3), of(1, 2, 4)]
    assert all(len({other[i] for other in others}) == 4 for i in range(4))
    with pytest.raises(KeyError, match="rank-1"):
        RandomState(1, CPU).load_state_dict(RandomState(0, CPU).state_dict())


# Saving -------------------------------------------------------------------------------------


@pytest.fixture
def slow_disk(monkeypatch):
    """Writing a shard waits for the event."""
    gate, reached = threading.Event(), threading.Event()
    create = FileSystem.create_stream

    def held(self, path, mode):
        if str(path).endswith(".distcp") and mode == "wb":
            reached.set()
            assert gate.wait(60)
        return create(self, path, mode)

    monkeypatch.setattr(FileSystem, "create_stream", held)
    yield gate, reached
    gate.set()


@pytest.mark.row("E7")
def test_nobody_is_told_of_an_asynchronous_save_before_it_is_durable(one_rank, tmp_path, slow_disk):
    gate, reached = slow_disk
    trainer = TinyTrainer(tmp_path, async_mode="async")
    trainer.train()
    path = trainer.path()
    trainer.manager.save(1)
    assert reached.wait(60)
    for _ in range(3):
        trainer.train()
        trainer.manager.finish(wait=False)
    assert trainer.told == [] and flaw(path, 1, "h1") == f"no {MARKER}: it was not finished"
    gate.set()
    trainer.manager.save(4)  # the one before comes first, and is not forgotten
    trainer.manager.finish(wait=True)
    assert trainer.told == ["saved 1", "saved 4"]
    found = TinyTrainer(tmp_path)
    found.manager.restore(path)
    assert found.step == 1


def test_a_full_disk_loses_one_checkpoint_and_nothing_else(one_rank, tmp_path):
    trainer = TinyTrainer(tmp_path, width=256, async_mode="disabled")
    trainer.train()
    trainer.manager.save(1)
    first = trainer.path()
    trainer.train()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        trainer.manager.save(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert trainer.told[0] == "saved 1" and trainer.told[1].startswith("failed 2: ")
    assert f"are free in {tmp_path}" in trainer.told[1]
    assert not trainer.path().exists()  # the space is given back
    trainer.train()
    trainer.manager.save(3)
    assert trainer.told[2] == "saved 3"
    assert flaw(first, 1, "h1") is None


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_only_what_the_disk_says_is_survived(one_rank, tmp_path, monkeypatch, async_mode):
    trainer = TinyTrainer(tmp_path, async_mode=async_mode)
    trainer.train()
    monkeypatch.setattr(FileSystem, "create_stream", lambda *args: 1 / 0)
    with pytest.raises(CheckpointException, match="ZeroDivisionError"):
        trainer.manager.save(1)
        trainer.manager.finish(wait=True)
    assert trainer.told == []


def test_a_marker_that_cannot_be_written_is_a_save_that_failed(one_rank, tmp_path, monkeypatch):
    def full(path, marker):
        raise OSError(28, "No space left on device", str(path))

    trainer = TinyTrainer(tmp_path)
    trainer.train()
    monkeypatch.setattr(checkpoint, "write_marker", full)
    trainer.manager.save(1)
    (told,) = trainer.told
    assert told.startswith("failed 1: OSError: [Errno 28] No space left on device")
    assert not trainer.path().exists()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is memory to pin for")
def test_pinned_memory_without_an_accelerator_is_refused_before_the_first_save(one_rank, tmp_path):
    with pytest.raises(CheckpointUnusable, match="async_mode.*set it to async"):
        TinyTrainer(tmp_path, async_mode="async_with_pinned_mem")


def test_off_the_interval_the_whole_state_is_saved_on_demand(one_rank, tmp_path):
    trainer = TinyTrainer(tmp_path, interval=100, async_mode="async", last_save_model_only=True)
    trainer.train()
    trainer.manager.save(1)
    assert trainer.told == []
    trainer.manager.save_for_exit(1)
    assert trainer.told == ["saved 1"]
    assert {"optimizer", "lr_scheduler", "rng"} <= set(read_marker(trainer.path()).parts)


def test_a_checkpoint_that_is_read_is_not_removed(one_rank, tmp_path):
    trainer = TinyTrainer(tmp_path)
    paths = []
    for step in (1, 2, 3):
        trainer.train()
        paths.append(trainer.path())
        if step == 3:
            trainer.removable = [str(paths[0]), str(paths[1])]
            with reading(paths[0]):
                trainer.manager.save(step)
        else:
            trainer.manager.save(step)
    trainer.manager.close()  # waits for what is being removed
    assert flaw(paths[0], 1, "h1") is None and not paths[1].exists()
    with open(paths[0] / MARKER, "rb") as f:
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody holds it any more


@pytest.mark.row("H4")
def test_ranks_that_see_different_folders_are_refused_with_both_paths(tmp_path, monkeypatch):
    here, there = tmp_path / "a", tmp_path / "b"
    link = GroupLink()
    here.mkdir()
    require_same_folder(here, link)  # the first makes the id,
    require_same_folder(here, link)  # others find it
    monkeypatch.setattr(link, "gather", lambda mine: [mine, (f"host2:{there}", "")])
    with pytest.raises(FoldersDiffer, match=f"rank 0 and rank 1.*{here}.*host2:{there}"):
        require_same_folder(here, link)
