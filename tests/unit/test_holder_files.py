"""Folders of versions in memory: reuse, room, and what dead runs leave."""

import asyncio
import errno
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from torchtitan_rl_ft.config.weights import WeightsSection
from torchtitan_rl_ft.run_folder import ProcessId
from torchtitan_rl_ft.weights.holder.files import (
    HolderFiles,
    HolderRuns,
    MemoryRemoved,
    NoMemory,
    note_pieces,
    noted_pieces,
)
from torchtitan_rl_ft.weights.holder.leftovers import remove_leftovers, remove_run
from torchtitan_rl_ft.weights.holder.piece_digest import piece_digest
from torchtitan_rl_ft.weights.holder.settings import HolderSettings, Key, user_memory
from torchtitan_rl_ft.weights.pieces import Piece

SIZE = 1 << 20
ALL = [(0, SIZE)]


def settings(memory, name="relay-0", owner=None, run_id="run"):
    weights = WeightsSection(memory_folder=str(memory))
    owner = owner or ProcessId.current()
    return HolderSettings(name, "relay", run_id, weights, owner, serving_url="http://x")


@pytest.fixture
def files(tmp_path):
    found = HolderFiles(settings(tmp_path))
    found.open()
    return found


def inode(folder):
    return (folder / "model.safetensors").stat().st_ino


def test_a_released_file_is_the_next_versions(files):
    first = files.take(Key(1, "abcdef0123456"), SIZE, ALL)
    assert first.name == "step-1-abcdef01"
    assert (first / "model.safetensors").stat().st_blocks * 512 >= SIZE  # memory is there
    second = files.take(Key(2, "abcdef0123456"), SIZE, ALL)
    (first / "config.json").write_text("{}")
    was, other = inode(first), inode(second)
    files.release(first)
    assert not first.exists()
    third = files.take(Key(3, "abcdef0123456"), SIZE // 2, [(0, SIZE // 2)])
    assert inode(third) == was and inode(third) != other
    assert sorted(p.name for p in third.iterdir()) == ["model.safetensors", "pieces.jsonl"]
    assert (third / "model.safetensors").stat().st_size == SIZE // 2


def test_few_spare_files_are_kept(files):
    folders = [files.take(Key(i, "t"), SIZE, ALL) for i in range(4)]
    last = inode(folders[-1])
    for folder in folders:
        files.release(folder)
    assert [p.name for p in files.folder.glob("spare-*/*")] == ["model.safetensors"]
    assert inode(files.take(Key(9, "t"), SIZE, ALL)) == last


def test_a_source_takes_the_memory_of_its_shards_alone(files):
    folder = files.take(Key(1, "t"), 64 * SIZE, [(0, 100), (SIZE, 2 * SIZE)])
    stat = (folder / "model.safetensors").stat()
    assert stat.st_size == 64 * SIZE and stat.st_blocks * 512 < 3 * SIZE


def test_what_a_killed_predecessors_library_left_goes(tmp_path):
    folder = settings(tmp_path).folder
    folder.mkdir(parents=True)
    (folder / "ucx_shm_posix_5dd58ce7").write_bytes(bytes(4096))
    HolderFiles(settings(tmp_path)).open()
    assert sorted(p.name for p in folder.iterdir()) == ["lock", "owner.json"]


def test_too_little_memory_is_said_before_it_is_taken(files):
    free = os.statvfs(files.folder)
    too_much = free.f_bavail * free.f_frsize + SIZE
    with pytest.raises(NoMemory, match=r"no room for step 1 .* GB are free; see weights.memory"):
        files.take(Key(1, "t"), too_much, [(0, too_much)])
    assert not list(files.folder.glob("*step*"))
    files.take(Key(1, "t"), SIZE, ALL)


def test_room_for_the_weights_alone_is_too_little(files, monkeypatch):
    """A file of an earlier version needs no more memory; what is noted beside it does."""

    def full(path, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(NoMemory, match=r"no room for step 1 .* see weights.memory_folder"):
        files.take(Key(1, "t"), SIZE, ALL)
    assert not list(files.folder.glob("*step*"))


def test_memory_that_the_file_system_promises_but_nobody_has_is_not_taken(files, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=SIZE - 1))
    with pytest.raises(NoMemory, match=r"no room for step 1 "):
        files.take(Key(1, "t"), SIZE, ALL)
    files.take(Key(1, "t"), SIZE // 2, [(0, SIZE // 2)])


def test_a_token_never_leads_out_of_the_folder(files):
    for token in ("../../etc", "a/b", "", "..", "ä"):
        folder = files.take(Key(1, token), 8, [(0, 8)])
        assert folder.parent == files.folder


def test_a_later_life_finds_versions_and_their_pieces(files, tmp_path):
    pieces = [Piece(i, i + 10, piece_digest(b"%d" % i)) for i in (0, 10, 20)]
    newer, older = Key(9, "t"), Key(10, "t")
    for key in (older, newer):
        folder = files.take(key, SIZE, ALL)
        note_pieces(folder, pieces[:1])
        note_pieces(folder, pieces[1:])
        stamp = 1 if key is older else 2
        os.utime(folder / "pieces.jsonl", ns=(stamp, stamp))
    with open(folder / "pieces.jsonl", "a") as f:
        f.write('[30, 40, "cut of')
    files.release(files.take(Key(3, "t"), SIZE, ALL))
    (files.folder / "step-4-broken").mkdir()
    found = HolderFiles(settings(tmp_path)).found()
    assert list(found) == [older, newer]  # in the order in which they came
    assert noted_pieces(found[newer]) == pieces
    assert not (files.folder / "step-4-broken").exists()


def test_a_holder_runs_once(files, tmp_path):
    with pytest.raises(HolderRuns, match="belongs to another process"):
        HolderFiles(settings(tmp_path)).open(timeout_s=0.1)


def dead_process():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    dead = ProcessId.of(child.pid)
    child.kill()
    child.wait()
    return dead


def test_what_dead_runs_left_is_removed_and_nothing_else(files, tmp_path):
    files.take(Key(1, "t"), SIZE, ALL)
    others = {
        "dead": settings(tmp_path, run_id="dead", owner=dead_process()),
        "restarting": settings(tmp_path, run_id="restarting"),  # its job lives
    }
    for s in others.values():
        s.folder.mkdir(parents=True)
        (s.folder / "lock").touch()
        (s.folder / "owner.json").write_text(json.dumps(asdict(s.owner)))
        (s.folder / "step-1-t").mkdir()
    beginning = settings(tmp_path, run_id="beginning")
    beginning.folder.mkdir(parents=True)
    assert remove_leftovers(user_memory(str(tmp_path))) == [others["dead"].folder]
    assert not others["dead"].folder.parent.exists()
    assert others["restarting"].folder.exists() and beginning.folder.exists()
    assert list(files.found()) == [Key(1, "t")]


def test_a_holder_whose_owner_died_lives_on_while_it_holds_its_lock(tmp_path):
    held = HolderFiles(settings(tmp_path, owner=dead_process()))
    held.open()
    assert remove_leftovers(user_memory(str(tmp_path))) == []
    assert held.folder.exists()


def test_a_run_that_ends_leaves_nothing(files, tmp_path):
    files.take(Key(1, "t"), SIZE, ALL)
    remove_run(str(tmp_path), "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "..", "a/b", "-x", "a" * 200])
def test_names_that_are_no_folders_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match="cannot be the name of a folder"):
        settings(tmp_path, name=name)


def test_settings_travel_as_json(tmp_path):
    given = settings(tmp_path)
    assert HolderSettings.from_json(given.to_json()) == given


def test_what_a_kill_left_unfinished_is_removed_by_the_next_life(tmp_path, files):
    left = files.folder / ".unfinished-step-7-abc"
    left.mkdir()
    (left / "model.safetensors").write_bytes(bytes(SIZE))
    os.close(files._lock)
    HolderFiles(settings(tmp_path)).open()
    assert not left.exists()


def test_a_take_that_is_cut_off_leaves_what_the_next_life_removes(files, monkeypatch):
    """Only its name counts: a kill runs no clean-up."""
    seen = []
    monkeypatch.setattr("os.posix_fallocate", lambda *args: seen.extend(files.folder.iterdir()))
    files.take(Key(1, "abc"), SIZE, ALL)
    assert any(path.name.startswith(".unfinished-") for path in seen)


def test_a_folder_that_another_holder_removes_meanwhile_is_made_anew(tmp_path, monkeypatch):
    """It was a dead predecessor's, and is removed between this one's steps."""
    opened = os.open
    removals = iter([True, True])

    def open_late(path, *args, **kwargs):
        lock = opened(path, *args, **kwargs)
        if str(path).endswith("lock") and next(removals, False):
            shutil.rmtree(os.path.dirname(path))
        return lock

    monkeypatch.setattr("os.open", open_late)
    files = HolderFiles(settings(tmp_path))
    files.open()
    assert (files.folder / "owner.json").exists()
    monkeypatch.undo()
    with pytest.raises(HolderRuns):
        HolderFiles(settings(tmp_path)).open(timeout_s=0.2)


def test_a_version_that_somebody_removed_is_no_spare(files):
    """Its holder goes on with the next one."""
    gone = files.take(Key(1, "t"), SIZE, ALL)
    shutil.rmtree(gone)
    files.release(gone)
    files.release(files.take(Key(2, "t"), SIZE, ALL))
    assert [p.name for p in files.folder.glob("spare-*")] == ["spare-1"]


@pytest.mark.parametrize("anew", [False, True], ids=["removed", "made anew"])
async def test_a_folder_that_somebody_removes_ends_its_holder(files, anew):
    """All that it were to hold from now on would fail, for as long as it lived."""
    watching = asyncio.create_task(files.watch(every_s=0.01))
    await asyncio.sleep(0.05)
    assert not watching.done()
    shutil.rmtree(files.folder)
    if anew:
        HolderFiles(files._settings).open()
    with pytest.raises(MemoryRemoved, match="relay-0 was removed"):
        await watching
