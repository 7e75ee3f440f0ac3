"""The receiving side: what it leaves behind when a push is given up, at whatever moment."""

import asyncio
import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from fakes.fake_agent import FakeAgent

from torchtitan_rl_ft.weights.holder.client import HolderError
from torchtitan_rl_ft.weights.holder.mapping import KEPT, Mappings
from torchtitan_rl_ft.weights.holder.piece_digest import piece_digest
from torchtitan_rl_ft.weights.holder.receive import Receiver, WornOut
from torchtitan_rl_ft.weights.holder.settings import Key
from torchtitan_rl_ft.weights.holder.versions import Version
from torchtitan_rl_ft.weights.image import Image
from torchtitan_rl_ft.weights.pieces import Piece, cut

IMAGE = Image({"a": ("F32", [3000])})
DATA = IMAGE.header + bytes(i % 251 for i in range(IMAGE.nbytes - len(IMAGE.header)))
PIECES = [Piece(s, e, piece_digest(DATA[s:e])) for s, e in cut(IMAGE, [(0, IMAGE.nbytes)], 4096)]
LIMIT_S = 30.0


class Bench:
    def __init__(self, tmp_path, pool):
        self.agents: list[FakeAgent] = []
        self.agents_to_be_made = threading.Semaphore(100)
        self.agent_may_be_dropped = threading.Event()
        self.agent_may_be_dropped.set()
        file = tmp_path / "model.safetensors"
        file.write_bytes(bytes(IMAGE.nbytes))
        self.version = Version(Key(1, "t"), tmp_path, IMAGE, Mappings())
        self.receiver = Receiver(
            self._make, "nixl", LIMIT_S, pool, pool, at_once=2, addresses_lost=30 * IMAGE.nbytes
        )
        self.checked: list[Piece] = []
        self.asked = asyncio.Event()
        self.at_once = self.most_at_once = 0

    def _make(self):
        self.agents_to_be_made.acquire(timeout=LIMIT_S)
        agent = FakeAgent()
        drop = agent.drop

        def drop_in_time():
            self.agent_may_be_dropped.wait(LIMIT_S)
            drop()

        agent.drop = drop_in_time
        self.agents.append(agent)
        return agent

    def receive(self, ask):
        return asyncio.create_task(
            self.receiver.receive(self.version, PIECES, ask, self.checked.append)
        )

    async def never(self, offer):
        """And slow to end, when it is told to."""
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)

    async def refuse(self, offer):
        self.asked.set()
        raise HolderError("it broke", 502)

    async def until(self, found):
        async with asyncio.timeout(LIMIT_S):
            while not found():
                await asyncio.sleep(0.002)

    def mapped(self):
        """Mappings of the file in this process."""
        lines = Path("/proc/self/maps").read_text().splitlines()
        return sum(line.endswith(str(self.version.file.path)) for line in lines)


@pytest.fixture
def bench(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        yield Bench(tmp_path, pool)


async def test_what_is_written_is_checked_and_stays(bench):
    async def ask(offer):
        assert (offer.agent, offer.nbytes) == (b"agent", IMAGE.nbytes)
        ctypes.memmove(offer.address, DATA, len(DATA))
        bench.agents[-1].notes_to_come = [f"{p.start}-{p.end}".encode() for p in PIECES]

    await bench.receive(ask)
    assert sorted(bench.checked) == PIECES
    assert bench.version.file.path.read_bytes() == DATA
    assert not bench.agents[0].dropped, "the version comes first"
    await bench.until(lambda: bench.agents[0].dropped)
    assert bench.receiver.abandoned == 0


@pytest.mark.parametrize("when", ["asked", "ending"])
async def test_a_push_that_is_given_up_twice_reaches_the_file_no_more(bench, when):
    """A fetch may be cancelled again while it still ends."""
    before = bench.mapped()
    bench.agent_may_be_dropped.clear()
    receiving = bench.receive(bench.never if when == "asked" else bench.refuse)
    await bench.asked.wait()
    if when == "asked":
        receiving.cancel()
        await asyncio.sleep(0.001)
    else:
        await bench.until(lambda: bench.receiver.abandoned)  # it ends, and is not over yet
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    assert bench.mapped() == before
    bench.agent_may_be_dropped.set()
    await bench.until(lambda: bench.agents[0].dropped)
    assert bench.mapped() == before


async def test_a_push_that_is_given_up_before_it_is_asked_for_leaves_nothing(bench):
    process, before = psutil.Process(), bench.mapped()
    descriptors = process.num_fds()
    bench.agents_to_be_made = threading.Semaphore(0)
    for n in range(1, 3 * KEPT):
        receiving = bench.receive(bench.never)
        await asyncio.sleep(0.005)
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        bench.agents_to_be_made.release()
        await bench.until(lambda n=n: sum(a.dropped for a in bench.agents) >= n)
    bench.agents_to_be_made.release()  # the one that is made ahead
    assert process.num_fds() <= descriptors + KEPT
    assert bench.mapped() <= before + KEPT
    assert not bench.asked.is_set()


async def test_a_receiver_that_has_lost_too_many_addresses_says_so(bench):
    """Each push that is given up takes its own for good; a new process has them again."""
    wearing = asyncio.create_task(bench.receiver.wear())
    for n in range(31):
        assert not wearing.done(), n
        with pytest.raises(HolderError):
            await bench.receive(bench.refuse)
    with pytest.raises(WornOut, match="31 pushes were given up"):
        await asyncio.wait_for(wearing, LIMIT_S)


async def test_no_more_pushes_at_once_than_have_threads(bench):
    go_on = asyncio.Event()

    async def ask(offer):
        bench.at_once += 1
        bench.most_at_once = max(bench.most_at_once, bench.at_once)
        await go_on.wait()
        ctypes.memmove(offer.address, DATA, len(DATA))
        bench.at_once -= 1

    receiving = [bench.receive(ask) for _ in range(5)]
    await bench.until(lambda: bench.at_once == 2)
    await asyncio.sleep(0.02)
    go_on.set()
    await asyncio.gather(*receiving)
    assert bench.most_at_once == 2
