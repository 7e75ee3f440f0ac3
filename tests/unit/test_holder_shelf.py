"""The versions of a holder: what it gives up, and when; what it finds again."""

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fakes.fake_agent import FakeAgent

from torchtitan_rl_ft.config.weights import WeightsSection
from torchtitan_rl_ft.run_folder import ProcessId
from torchtitan_rl_ft.weights.holder.files import HolderFiles, note_pieces
from torchtitan_rl_ft.weights.holder.piece_digest import piece_digest
from torchtitan_rl_ft.weights.holder.push import Pusher
from torchtitan_rl_ft.weights.holder.settings import HolderSettings, Key
from torchtitan_rl_ft.weights.holder.shelf import NotReserved, Shelf
from torchtitan_rl_ft.weights.holder.tensor_hashes import TensorHashes
from torchtitan_rl_ft.weights.image import Image
from torchtitan_rl_ft.weights.manifest import read_and_verify, write_manifest
from torchtitan_rl_ft.weights.pieces import Piece, cut

IMAGE = Image({"a": ("F32", [300]), "b": ("BF16", [7]), "none": ("F32", [0])})
ALL = [(0, IMAGE.nbytes)]
DATA = IMAGE.header + bytes(i % 251 for i in range(IMAGE.nbytes - len(IMAGE.header)))


@pytest.fixture
def checks():
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def make(tmp_path, checks):
    def make_shelf(kind):
        weights = WeightsSection(memory_folder=str(tmp_path))
        settings = HolderSettings(
            "h", kind, "run", weights, ProcessId.current(), serving_url="http://x"
        )
        settings.folder.mkdir(parents=True, exist_ok=True)
        return Shelf(kind, HolderFiles(settings), Pusher(FakeAgent), checks, 256)

    return make_shelf


async def offer(shelf, key, ranges=((0, IMAGE.nbytes),), assets=None):
    file = await shelf.reserve(key, IMAGE)
    with open(file, "r+b") as f:
        for start, end in ranges:
            f.seek(start)
            f.write(DATA[start:end])
    await shelf.offer(key, file, list(ranges), assets)
    return shelf[key]


async def get(shelf, key, checks):
    """As a fetch does."""
    version = await shelf.begin(key, IMAGE)
    version.file.path.write_bytes(DATA)
    for start, end in cut(IMAGE, ALL, 256):
        piece = Piece(start, end, piece_digest(DATA[start:end]))
        version.add(piece)
        note_pieces(version.folder, [piece])
    manifest = await TensorHashes(version, checks).manifest()
    version.manifest_digest = write_manifest(version.folder, manifest)
    return version


async def have(shelf, kind, key, checks):
    return await offer(shelf, key) if kind == "source" else await get(shelf, key, checks)


async def test_a_source_holds_what_its_rank_wrote(make, tmp_path):
    shelf = make("source")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "secret.txt").write_text("not of the policy")
    middle = IMAGE.tensors["a"].start + 400
    version = await offer(shelf, Key(1, "t"), [(middle, IMAGE.nbytes)], tmp_path)
    assert version.ranges == [(0, len(IMAGE.header)), (middle, IMAGE.nbytes)]
    assert all(p.digest == piece_digest(DATA[p.start : p.end]) for p in version.pieces)
    assert not version.has_all
    assert sorted(p.name for p in version.folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "pieces.jsonl",
    ]
    [told] = shelf.report(known=[])
    assert told["pieces"] == [p.to_json() for p in version.pieces] and not told["whole"]
    [told] = shelf.report(known=[Key(1, "t")])
    assert "pieces" not in told


async def test_offers_and_reservations_may_be_repeated(make):
    shelf, key = make("source"), Key(1, "t")
    first = await shelf.reserve(key, IMAGE)
    assert await shelf.reserve(key, IMAGE) == first
    version = await offer(shelf, key)
    await shelf.offer(key, first, ALL, None)
    assert shelf[key] is version and await shelf.reserve(key, IMAGE) == first
    with pytest.raises(NotReserved):
        await shelf.offer(Key(2, "t"), first, ALL, None)
    with pytest.raises(NotReserved):
        await shelf.reserve(Key(3, "t"), IMAGE)
        await shelf.offer(Key(3, "t"), Path("/etc/passwd"), ALL, None)


async def test_another_layout_under_the_same_name_takes_its_place(make):
    shelf, key = make("source"), Key(1, "t")
    await offer(shelf, key)
    other = Image({"a": ("F32", [11])})
    file = await shelf.reserve(key, other)
    assert file.stat().st_size == other.nbytes
    with pytest.raises(KeyError):
        shelf[key]


async def test_what_is_newer_than_all_that_is_kept_stays(make):
    shelf = make("source")
    keys = [Key(i, "t") for i in range(1, 3)]
    for key in keys:
        await offer(shelf, key)
    shelf.prune(keep=set())  # serving has just been started
    assert [v.key for v in shelf.held] == keys
    shelf.prune(keep={keys[0]})  # the second is not published yet
    assert [v.key for v in shelf.held] == keys
    shelf.prune(keep={keys[1]})
    assert [v.key for v in shelf.held] == keys[1:]


async def test_a_source_takes_two_files_in_turns_also_without_a_directory(make, tmp_path):
    shelf = make("source")
    inodes = []
    for step in range(1, 7):
        version = await offer(shelf, Key(step, "t"))
        inodes.append(version.file.path.stat().st_ino)
        assert version.file.path.read_bytes() == DATA
    assert len(set(inodes)) == 2
    assert [v.key.step for v in shelf.held] == [5, 6]


async def test_a_version_in_use_keeps_its_memory_until_it_is_not(make):
    shelf = make("source")
    first = await offer(shelf, Key(1, "t"))
    with shelf.using(first.key), shelf.using(first.key):
        await offer(shelf, Key(2, "t"))
        await offer(shelf, Key(3, "t"))  # the third file: the first is being pushed
        with pytest.raises(KeyError):
            shelf[first.key]
        assert bytes(first.file.view) == DATA
    assert not first.folder.exists()
    assert len(list(first.folder.parent.glob("*/model.safetensors"))) == 3


async def test_a_version_that_is_offered_again_is_the_newest_again(make):
    """Its trainers went back to it: what they had made of it is of no use any more."""
    shelf = make("source")
    for step in (1, 2, 1):
        await offer(shelf, Key(step, "t"))
    await shelf.reserve(Key(2, "other"), IMAGE)
    assert [v.key for v in shelf.held] == [Key(1, "t")]


async def test_an_offer_whose_file_was_given_up_meanwhile_is_refused(make, checks):
    shelf, key, go_on = make("source"), Key(1, "t"), threading.Event()
    file = await shelf.reserve(key, IMAGE)
    busy = [checks.submit(go_on.wait, 10.0) for _ in range(2)]
    offering = asyncio.create_task(shelf.offer(key, file, ALL, None))
    await asyncio.sleep(0)
    reserving = asyncio.create_task(shelf.reserve(Key(2, "t"), IMAGE))
    await asyncio.sleep(0)
    go_on.set()
    assert all(b.result() for b in busy)
    with pytest.raises(NotReserved):
        await offering
    assert await reserving != file and shelf.held == []


async def test_a_file_that_is_being_read_is_not_used_again(make, checks, monkeypatch):
    """A tensor may still be hashed when its fetch is over."""
    shelf, inside, go_on = make("relay"), threading.Event(), threading.Event()
    first = await shelf.begin(Key(1, "t"), IMAGE)

    def slow(raw):
        inside.set()
        go_on.wait(10.0)
        return piece_digest(raw)

    monkeypatch.setattr("torchtitan_rl_ft.weights.holder.versions.piece_digest", slow)
    hashing = checks.submit(first.file.digest, 0, IMAGE.nbytes)
    assert inside.wait(10.0)
    await shelf.begin(Key(2, "t"), IMAGE)
    assert first.folder.exists()
    go_on.set()
    assert hashing.result(10.0)
    await shelf.begin(Key(3, "t"), IMAGE)
    assert not first.folder.exists()


async def test_pieces_for_other_ranges_are_hashed_anew(make):
    shelf = make("source")
    version = await offer(shelf, Key(1, "t"))
    whole = version.pieces[2].range
    parts = [whole, (version.pieces[3].start, version.pieces[3].start + 5)]
    found = await shelf.pieces(version, parts)
    assert found[0] == version.pieces[2]
    assert found[1].digest == piece_digest(DATA[slice(*parts[1])])


async def test_a_relay_hands_on_what_is_whole_only(make, checks):
    shelf, key = make("relay"), Key(1, "t")
    version = await shelf.begin(key, IMAGE)
    assert shelf.held == [] and shelf.report([]) == []
    with pytest.raises(KeyError):
        shelf[key]
    version = await get(shelf, key, checks)
    assert shelf[key] is version
    assert read_and_verify(version.folder).digest == version.manifest_digest
    assert "pieces" not in shelf.report([])[0] and shelf.report([])[0]["whole"]


async def test_what_nobody_goes_on_with_makes_room(make, checks):
    shelf = make("relay")
    first = await shelf.begin(Key(1, "t"), IMAGE)
    second = await shelf.begin(Key(2, "t"), IMAGE)
    assert not first.folder.exists() and second.folder.exists()
    whole = await get(shelf, Key(3, "t"), checks)
    with shelf.using(Key(4, "t")):
        busy = await shelf.begin(Key(4, "t"), IMAGE)
        await shelf.begin(Key(5, "t"), IMAGE)
        assert busy.folder.exists() and whole.folder.exists()


@pytest.mark.parametrize("kind", ["source", "relay"])
async def test_the_next_life_takes_up_what_is_right(make, checks, kind):
    shelf, key = make(kind), Key(1, "t")
    version = await have(shelf, kind, key, checks)
    again = make(kind)
    await again.restore()
    assert again[key].pieces == version.pieces
    assert again[key].manifest_digest == version.manifest_digest
    damaged = version.pieces[2]
    with open(version.file.path, "r+b") as f:
        f.seek(damaged.start)
        f.write(b"\xff")
    again = make(kind)
    await again.restore()
    if kind == "source":
        assert again[key].pieces == [p for p in version.pieces if p != damaged]
    else:
        assert again.held == []
        resumed = await again.begin(key, IMAGE)
        assert resumed.pieces == [p for p in version.pieces if p != damaged]


async def test_a_next_life_finds_nothing_of_use(make):
    shelf = make("relay")
    version = await shelf.begin(Key(1, "t"), IMAGE)
    version.file.path.write_bytes(b"\xff" * IMAGE.nbytes)
    again = make("relay")
    await again.restore()
    assert again.held == []
    assert not version.folder.exists()
    await asyncio.sleep(0)


@pytest.mark.parametrize("kind", ["source", "relay"])
async def test_a_file_that_is_cut_short_is_of_no_use_to_the_next_life(make, checks, kind):
    """To look at what is missing would end each next life too."""
    shelf, key = make(kind), Key(1, "t")
    version = await have(shelf, kind, key, checks)
    os.truncate(version.file.path, len(IMAGE.header))
    again = make(kind)
    await again.restore()
    assert again.held == []
    assert not version.folder.exists()
