"""Saves that are cut off, and saves of several ranks, in processes of their own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fakes.checkpoint_saver import WIDTH
from fakes.tiny_trainer import TinyTrainer

from torchtitan_rl_ft.journal.checkpoints import MARKER, finder, flaw, read_marker

FAKES = Path(__file__).parents[1] / "fakes"


@pytest.mark.row("E9")
@pytest.mark.scenario("C-4")
@pytest.mark.timeout(120)
def test_killed_at_random_points_of_a_save_the_newest_complete_one_is_whole(tmp_path):
    script = [sys.executable, str(FAKES / "checkpoint_saver.py"), str(tmp_path), "10", "0"]
    subprocess.run(script, check=True, timeout=110)
    complete, torn = [], []
    for found in finder(tmp_path / "checkpoint")():
        why = flaw(Path(found.path), found.step, found.token or "")
        (complete if why is None else torn).append((found.step, found.path, why))
    told = (tmp_path / "told").read_text().splitlines()
    assert told and set(told) <= {path for _, path, _ in complete}  # durable is durable
    assert torn, "no kill came in the middle of a save"
    assert all(why == f"no {MARKER}: it was not finished" for _, _, why in torn)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        trainer = TinyTrainer(tmp_path, width=WIDTH)
        step, newest, _ = max(complete)
        trainer.manager.restore(Path(newest))
        assert trainer.step == step
        assert torch.equal(trainer.model.weight, torch.full((WIDTH, WIDTH), float(step)))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("what", ["checkpoint", "shard"])
def test_what_is_removed_by_hand_while_it_is_saved_is_a_failed_save(tmp_path, what):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        trainer = TinyTrainer(tmp_path, async_mode="async")
        trainer.train()
        removed = threading.Event()
        trainer.manager._hashing.submit(removed.wait)
        trainer.manager.save(1)
        assert trainer.manager.save_future is not None
        trainer.manager.save_future.result()  # all is written, and not looked at yet
        if what == "checkpoint":
            shutil.rmtree(tmp_path / "checkpoint")
        else:
            (trainer.path() / "__0_0.distcp").unlink()
        removed.set()
        trainer.manager.finish(wait=True)
        (told,) = trainer.told
        assert told.startswith("failed 1: ") and ("removed" in told or "No such file" in told)
        assert not trainer.path().exists()
        trainer.train()
        trainer.manager.save(2)
        trainer.manager.finish(wait=True)
        assert trainer.told[-1] == "saved 2"
    finally:
        dist.destroy_process_group()


@pytest.mark.timeout(120)
def test_ranks_write_their_own_shards_and_nobody_gathers_the_optimizers_state(tmp_path):
    script = [sys.executable, str(FAKES / "sharded_saver.py"), str(tmp_path)]
    ranks = [
        subprocess.Popen([*script, str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    told = [json.loads(rank.communicate(timeout=110)[0].splitlines()[-1]) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    for rank in told:
        assert rank["gathered_by_full_tensor"] > 0  # what is counted would be seen
        assert rank["gathered_by_save"] == 0
        assert rank["told"] == ["saved 1", "restored 1, differs: nothing"]
        assert rank["restored"]
    files = read_marker(Path(told[0]["path"])).files
    shards = [files[f"__{rank}_0.distcp"].bytes for rank in range(2)]
    assert max(shards) < 0.6 * sum(shards)
