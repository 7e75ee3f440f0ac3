"""Policy versions: they only grow, whatever dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtitan_rl_ft.serving.versions import VERSIONS_FILE, VersionsCorrupt, VersionStore
from torchtitan_rl_ft.weights.manifest import MANIFEST_FILE


def folder_of(root: Path, step: int) -> Path:
    path = root / f"step-{step}"
    path.mkdir(parents=True, exist_ok=True)
    (path / MANIFEST_FILE).write_text("{}")
    return path


@pytest.mark.row("D2")
def test_numbers_grow_over_restarts(tmp_path: Path) -> None:
    seen = []
    for life in range(4):
        store = VersionStore(tmp_path)
        for step in range(3):
            release = store.add(step, f"t{life}.{step}", folder_of(tmp_path, step), "d")
            seen.append(release.version)
            store.prune([])
    assert seen == list(range(1, 13))
    newest = VersionStore(tmp_path).newest
    assert newest is not None
    assert (newest.version, newest.token) == (12, "t3.2")


def test_find_gives_the_newest_of_a_state(tmp_path: Path) -> None:
    store = VersionStore(tmp_path)
    store.add(1, "a", tmp_path / "x", "d")
    store.add(2, "b", tmp_path / "y", "d")
    store.add(1, "a", tmp_path / "x", "d")
    found = store.find(1, "a")
    assert found is not None
    assert found.version == 3
    assert store.find(1, "b") is None


def test_prune_keeps_the_newest_two_and_what_is_needed(tmp_path: Path) -> None:
    store = VersionStore(tmp_path)
    for step in range(5):
        store.add(step, str(step), folder_of(tmp_path, step), "d")
    gone = store.prune(needed=[1])
    assert [r.version for r in gone] == [2, 3]
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-0", "step-3", "step-4"]
    assert store.prune(needed=[1]) == []
    assert [r.version for r in store.prune(needed=[])] == [1]


def test_prune_removes_nothing_outside_the_run_and_nothing_shared(tmp_path: Path) -> None:
    outside = folder_of(tmp_path / "elsewhere", 0)
    store = VersionStore(tmp_path / "weights")
    shared = folder_of(tmp_path / "weights", 1)
    store.add(0, "a", outside, "d")
    store.add(1, "b", shared, "d")
    store.add(2, "c", folder_of(tmp_path / "weights", 2), "d")
    store.add(1, "b", shared, "d")
    assert [r.version for r in store.prune([])] == [1, 2]
    assert outside.is_dir()
    assert shared.is_dir()


def test_an_unreadable_file_is_never_started_over(tmp_path: Path) -> None:
    (tmp_path / VERSIONS_FILE).write_text('{"next": 4')
    with pytest.raises(VersionsCorrupt, match="cannot be read"):
        VersionStore(tmp_path)
