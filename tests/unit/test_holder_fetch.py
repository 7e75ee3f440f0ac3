"""Getting a version whole: whom a fetch asks, what it forgives, and what it does not."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from fakes.fake_agent import FakeAgent

from torchtitan_rl_ft.config.weights import WeightsSection
from torchtitan_rl_ft.run_folder import ProcessId
from torchtitan_rl_ft.weights.holder.agent import NixlError
from torchtitan_rl_ft.weights.holder.client import HolderError, Offer
from torchtitan_rl_ft.weights.holder.directory import DirectoryError, Lease, Superseded
from torchtitan_rl_ft.weights.holder.fetch import Fetch, FetchFailed, OtherPolicy, Wish
from torchtitan_rl_ft.weights.holder.fetches import Fetches
from torchtitan_rl_ft.weights.holder.files import HolderFiles, NoMemory
from torchtitan_rl_ft.weights.holder.piece_digest import piece_digest
from torchtitan_rl_ft.weights.holder.push import Pusher
from torchtitan_rl_ft.weights.holder.receive import ReceiveFailed
from torchtitan_rl_ft.weights.holder.settings import HolderSettings, Key
from torchtitan_rl_ft.weights.holder.shelf import Shelf
from torchtitan_rl_ft.weights.image import Image
from torchtitan_rl_ft.weights.manifest import Manifest, read_and_verify, tensor_entry
from torchtitan_rl_ft.weights.pieces import Piece, clip, contains, cut, intersect, merge, subtract

IMAGE = Image({"a": ("F32", [300]), "b": ("BF16", [7]), "none": ("F32", [0])})
DATA = IMAGE.header + bytes(i % 251 for i in range(IMAGE.nbytes - len(IMAGE.header)))
KEY = Key(7, "token")
WISH = Wish(KEY, IMAGE.layout_digest, IMAGE.nbytes, None)
PIECES = [Piece(s, e, piece_digest(DATA[s:e])) for s, e in cut(IMAGE, [(0, IMAGE.nbytes)], 256)]
MANIFEST = Manifest.build(
    step=KEY.step,
    token=KEY.token,
    tensors={
        n: tensor_entry(t.dtype, t.shape, DATA[t.start : t.end], "model.safetensors")
        for n, t in IMAGE.tensors.items()
    },
)


class FakeDirectory:
    """The directory's side of a fetch, in memory: each holder gives one lease at a time."""

    def __init__(self, *givers: "Giver") -> None:
        self.givers = {g.name: g for g in givers}
        self.leased: dict[str, str] = {}
        self.returns: list[tuple[str, str | None]] = []
        self.asked: list[list] = []
        self.unreachable = 0
        self.superseded = False
        self.changed = asyncio.Event()

    async def lease(self, name, key, missing, timeout_s):
        self.asked.append(list(missing))
        if self.unreachable:
            self.unreachable -= 1
            raise DirectoryError("no answer")
        if self.superseded:
            raise Superseded(f"{key} is superseded")
        end = asyncio.get_running_loop().time() + timeout_s
        while not (granted := self._grant(list(missing))):
            if (left := end - asyncio.get_running_loop().time()) <= 0:
                return []
            self.changed.clear()
            try:
                async with asyncio.timeout(left):
                    await self.changed.wait()
            except TimeoutError:
                return []
        return granted

    def _grant(self, missing):
        granted = []
        for giver in self.givers.values():
            ranges = intersect(giver.ranges, missing)
            if giver.name not in self.leased.values() and ranges and not giver.barred:
                lease = Lease(
                    f"lease-{len(self.asked)}-{giver.name}", giver.name, giver.name, ranges
                )
                self.leased[lease.id] = giver.name
                missing = subtract(missing, ranges)
                granted.append(lease)
        return granted

    async def returned(self, lease, cause, timeout_s):
        name = self.leased.pop(lease.id)
        self.givers[name].barred |= cause is not None
        self.returns.append((name, cause))
        self.changed.set()


class Giver:
    """A holder, as its client sees it. It writes into the file whose path is the offer's agent."""

    def __init__(self, name, ranges=((0, IMAGE.nbytes),), breaks_at=None, damages=None):
        self.name, self.ranges = name, list(ranges)
        self.breaks_at, self.damages = breaks_at, damages
        self.barred = False
        self.pushed: list = []
        self.files = {"config.json": b"{}"}
        self.header = IMAGE.header
        self.refuses: Exception | None = None
        self.inside, self.go_on = asyncio.Event(), asyncio.Event()
        self.go_on.set()

    async def pieces(self, key, timeout_s, ranges):
        if self.refuses is not None:
            raise self.refuses
        parts = clip(PIECES, ranges) if ranges else []
        return self.header, [Piece(s, e, piece_digest(DATA[s:e])) for s, e in parts]

    async def assets(self, key, timeout_s):
        return dict(self.files)

    async def push(self, key, layout_digest, ranges, offer, stall_timeout_s, timeout_s):
        assert (key, layout_digest, offer.nbytes) == (KEY, IMAGE.layout_digest, IMAGE.nbytes)
        self.inside.set()
        await self.go_on.wait()
        for number, (start, end) in enumerate(ranges):
            if number == self.breaks_at:
                raise HolderError("it broke", 502)
            with open(offer.agent.decode(), "r+b") as f:
                f.seek(start)
                f.write(bytes(end - start) if number == self.damages else DATA[start:end])
            self.pushed.append((start, end))


class FakeReceiver:
    stall_timeout_s = 1.0

    async def receive(self, version, parts, ask, checked):
        offer = Offer(str(version.file.path).encode(), 0, version.image.nbytes, "nixl")
        try:
            await ask(offer)
        finally:
            right = [p for p in parts if version.file.digest(*p.range) == p.digest]
            for piece in right:
                checked(piece)
        if right != list(parts):
            raise ReceiveFailed("bytes differ from their digest")


@pytest.fixture
def bench(tmp_path):
    with ThreadPoolExecutor(2) as checks:
        yield Bench(tmp_path, checks)


class Bench:
    def __init__(self, tmp_path, checks):
        self.checks = checks
        weights = WeightsSection(memory_folder=str(tmp_path))
        settings = HolderSettings(
            "relay-0", "relay", "run", weights, ProcessId.current(), serving_url="http://x"
        )
        settings.folder.mkdir(parents=True)
        self.shelf = Shelf("relay", HolderFiles(settings), Pusher(FakeAgent), checks, 256)
        self.directory = FakeDirectory()

    def has(self, *givers):
        self.directory = FakeDirectory(*givers)

    def fetch(self, wish=WISH):
        return Fetch(
            wish,
            "relay-0",
            self.directory,
            FakeReceiver(),
            lambda url: self.directory.givers[url],
            self.shelf.begin,
            self.checks,
        )

    async def gets(self, wish=WISH, timeout_s=30.0):
        version = await self.fetch(wish).run(timeout_s)
        assert version.file.path.read_bytes() == DATA
        assert read_and_verify(version.folder).digest == MANIFEST.digest
        assert not self.directory.leased
        return version


MIDDLE = IMAGE.tensors["a"].start + 600


async def test_ranks_bring_their_shards_together(bench):
    header = (0, len(IMAGE.header))
    first = Giver("0", [(0, MIDDLE)])
    second = Giver("1", [header, (MIDDLE, IMAGE.nbytes)])
    bench.has(first, second)
    first.go_on.clear()
    getting = asyncio.create_task(bench.gets())
    await first.inside.wait()
    await second.inside.wait()  # both at once
    first.go_on.set()
    version = await getting
    assert version.bytes_from == {"0": MIDDLE, "1": IMAGE.nbytes - MIDDLE}
    assert (version.folder / "config.json").read_bytes() == b"{}"
    assert bench.directory.asked == [[(0, IMAGE.nbytes)]]


@pytest.mark.parametrize("fault", [{"breaks_at": 2}, {"damages": 2}])
async def test_another_holder_brings_what_the_first_did_not(bench, fault):
    first, second = Giver("0", **fault), Giver("1")
    bench.has(first, second)
    version = await bench.gets()
    assert contains([(0, IMAGE.nbytes)], first.pushed)
    assert sum(version.bytes_from.values()) == IMAGE.nbytes  # nothing came twice
    assert not intersect(second.pushed, first.pushed[:2])
    [(name, cause), (other, none)] = bench.directory.returns
    assert (name, other, none) == ("0", "1", None) and cause.startswith("0: ")


async def test_a_holder_that_refuses_costs_nothing_but_its_turn(bench):
    first, second = Giver("0"), Giver("1")
    first.refuses = HolderError("another push is under way", 409)
    bench.has(first, second)
    assert (await bench.gets()).bytes_from == {"1": IMAGE.nbytes}


async def test_a_relays_manifest_is_taken_over(bench):
    giver = Giver("relay-1")
    giver.files["manifest.json"] = MANIFEST.to_bytes()
    bench.has(giver)
    version = await bench.gets(replace(WISH, manifest_digest=MANIFEST.digest))
    assert version.manifest_digest == MANIFEST.digest


@pytest.mark.parametrize("other", ["step", "shape", "no manifest"])
async def test_the_manifest_of_something_else_is_refused(bench, other):
    giver = Giver("relay-1")
    tensors = dict(MANIFEST.tensors)
    if other == "shape":
        tensors["a"] = replace(tensors["a"], shape=[150, 2])
    manifest = Manifest.build(step=KEY.step + (other == "step"), token=KEY.token, tensors=tensors)
    giver.files["manifest.json"] = b"x" if other == "no manifest" else manifest.to_bytes()
    bench.has(giver)
    told = {"no manifest": ": not a manifest: "}.get(other, "is of something else")
    with pytest.raises(OtherPolicy, match=told):
        await bench.gets()
    assert not bench.shelf.held


async def test_another_content_than_was_announced_is_refused(bench):
    bench.has(Giver("0"))
    with pytest.raises(OtherPolicy, match="another policy"):
        await bench.gets(replace(WISH, manifest_digest="0" * 64))
    assert not bench.shelf.held


async def test_a_holder_of_another_model_is_not_believed(bench):
    first, second = Giver("0"), Giver("1")
    first.header = Image({"a": ("F32", [301])}).header
    bench.has(first, second)
    assert (await bench.gets()).bytes_from == {"1": IMAGE.nbytes}
    assert "another model" in bench.directory.returns[0][1]
    assert not first.pushed


async def test_a_fault_of_this_side_is_not_put_on_the_other(bench):
    giver = Giver("0")
    giver.refuses = NixlError("making a NIXL agent: all ports are taken")
    bench.has(giver)
    with pytest.raises(FetchFailed, match=r"\(relay-0: making a NIXL agent"):
        await bench.gets(timeout_s=0.5)


async def test_names_of_files_are_checked(bench):
    first, second = Giver("0"), Giver("1")
    first.files = {"../../authorized_keys": b"x"}
    bench.has(first, second)
    await bench.gets()
    assert "no file of a policy" in bench.directory.returns[0][1]


async def test_a_directory_that_is_away_is_asked_again(bench):
    bench.has(Giver("0"))
    bench.directory.unreachable = 3
    await bench.gets()
    assert len(bench.directory.asked) == 4


async def test_a_later_try_goes_on_where_the_first_ended(bench):
    first = Giver("0", breaks_at=3)
    bench.has(first)
    with pytest.raises(
        FetchFailed, match=r"within 0.5 s: \d+ of .* bytes are missing \(0: it broke"
    ):
        await bench.gets(timeout_s=0.5)
    second = Giver("1")
    bench.has(second)
    await bench.gets()
    assert subtract([(0, IMAGE.nbytes)], second.pushed) == merge(first.pushed)


async def test_a_superseded_version_is_given_up(bench):
    bench.has(Giver("0"))
    bench.directory.superseded = True
    with pytest.raises(Superseded):
        await bench.gets()


async def test_too_little_memory_ends_a_fetch(bench):
    bench.has(Giver("0"))

    async def no_room(key, image):
        raise NoMemory("no room")

    bench.shelf.begin = no_room
    with pytest.raises(NoMemory):
        await bench.gets()
    assert not bench.directory.leased


async def test_pushes_that_keep_failing_end_a_fetch(bench, monkeypatch):
    giver = Giver("0", breaks_at=0)
    bench.has(giver)
    bar = bench.directory.returned

    async def never_barred(lease, cause, timeout_s):
        await bar(lease, None, timeout_s)

    bench.directory.returned = never_barred
    with pytest.raises(FetchFailed, match="too many pushes failed"):
        await bench.gets()


async def test_a_fetch_that_ends_returns_its_leases(bench):
    giver = Giver("0")
    giver.go_on.clear()
    bench.has(giver)
    getting = asyncio.create_task(bench.gets())
    await giver.inside.wait()
    getting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await getting
    assert not bench.directory.leased


async def test_a_lease_that_comes_too_late_is_declined(bench):
    giver = Giver("0", ranges=[])
    bench.has(giver)
    getting = asyncio.create_task(bench.gets())
    while not bench.directory.asked:
        await asyncio.sleep(0)
    getting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await getting
    giver.ranges = [(0, IMAGE.nbytes)]
    bench.directory.changed.set()
    async with asyncio.timeout(10.0):
        while not bench.directory.returns:
            await asyncio.sleep(0.001)
    assert not bench.directory.leased and bench.directory.returns == [("0", None)]


async def test_a_lease_is_returned_whatever_becomes_of_its_fetch(bench):
    """The request that returns it is under way when another version is wanted."""
    bench.has(Giver("0", [(0, MIDDLE)]))
    give_back, under_way, go_on = bench.directory.returned, asyncio.Event(), asyncio.Event()

    async def returned(lease, cause, timeout_s):
        under_way.set()
        await go_on.wait()
        await give_back(lease, cause, timeout_s)

    bench.directory.returned = returned
    getting = asyncio.create_task(bench.gets())
    await under_way.wait()
    for _ in range(2):
        getting.cancel()
        await asyncio.sleep(0.001)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await getting
    async with asyncio.timeout(10.0):
        while bench.directory.leased:
            await asyncio.sleep(0.001)


async def test_a_fetch_that_is_ended_twice_is_over_when_its_pushes_are(bench):
    """What they write into is used again then."""
    giver = Giver("0")
    bench.has(giver)
    ending, go_on = asyncio.Event(), asyncio.Event()

    async def push(*args):
        try:
            giver.inside.set()
            await asyncio.Event().wait()
        finally:
            ending.set()
            await go_on.wait()

    giver.push = push
    getting = asyncio.create_task(bench.gets())
    await giver.inside.wait()
    getting.cancel()
    await ending.wait()
    getting.cancel()
    await asyncio.sleep(0.01)
    assert not getting.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await getting
    assert not bench.directory.leased


async def test_pieces_that_overlap_are_not_taken(bench):
    first, second = Giver("0"), Giver("1")
    told = first.pieces

    async def twice(key, timeout_s, ranges):
        header, pieces = await told(key, timeout_s, ranges)
        return header, [*pieces, *pieces[:1]]

    first.pieces = twice
    bench.has(first, second)
    assert (await bench.gets()).bytes_from == {"1": IMAGE.nbytes}
    assert "other pieces" in bench.directory.returns[0][1]


# Several wishes -------------------------------------------------------------------------------


async def test_the_same_wish_joins_and_another_ends_it(bench):
    giver = Giver("0")
    giver.go_on.clear()
    bench.has(giver)
    fetches = Fetches(bench.shelf, bench.fetch)
    other = replace(WISH, layout_digest="0" * 64)
    first = asyncio.create_task(fetches.fetch(other, 30.0))
    while not bench.directory.asked:
        await asyncio.sleep(0)
    both = [asyncio.create_task(fetches.fetch(WISH, 30.0)) for _ in range(2)]
    with pytest.raises(Superseded, match="given up for another"):
        await first
    await giver.inside.wait()
    giver.go_on.set()
    one, two = await asyncio.gather(*both)
    assert one is two
    assert await fetches.fetch(WISH, 30.0) is one  # nobody is asked
    with pytest.raises(OtherPolicy, match="another policy is held"):
        await fetches.fetch(replace(WISH, manifest_digest="0" * 64), 30.0)
    assert fetches.counts() == {"done": 1, "failed": 1}
