"""The sending side: what it leaves behind, however a push ends."""

import threading
import time

import pytest
from fakes.fake_agent import FakeAgent

from torchtitan_rl_ft.weights.holder.agent import NixlError
from torchtitan_rl_ft.weights.holder.client import Offer
from torchtitan_rl_ft.weights.holder.push import Memory, PushBusy, Pusher, PushFailed, range_of

OFFER = Offer(b"peer", 10_000, 100, "nixl")
MEMORY = Memory(500, ((0, 100),))
PIECES = [(0, 40), (40, 90), (90, 100)]


class Bench:
    def __init__(self) -> None:
        self.agents: list[FakeAgent] = []
        self.now_s = 0.0
        self.next = FakeAgent()
        self.pusher = Pusher(self._make, lambda: self.now_s, self._sleep)

    def _make(self) -> FakeAgent:
        self.agents.append(self.next)
        self.next = FakeAgent()
        return self.agents[-1]

    def _sleep(self, seconds: float) -> None:
        self.now_s += 0.1


def test_pieces_are_written_in_order_each_with_its_note():
    bench = Bench()
    bench.next.polls_needed = 3
    bench.pusher.push(MEMORY, PIECES, OFFER, 1.0)
    [agent] = bench.agents
    assert agent.written == [
        (500, 10_000, 40, b"0-40"),
        (540, 10_040, 50, b"40-90"),
        (590, 10_090, 10, b"90-100"),
    ]
    assert [range_of(note) for *_, note in agent.written] == PIECES
    assert not agent.open_handles and not agent.peers and not agent.dropped
    assert bench.pusher.counts() == {"done": 1, "failed": 0, "bytes": 100}


def test_memory_is_registered_once_and_until_it_is_forgotten():
    bench = Bench()
    other = Memory(9_000, ((0, 100),))
    for memory in (MEMORY, MEMORY, other):
        bench.pusher.push(memory, PIECES, OFFER, 1.0)
    [agent] = bench.agents
    assert [address for address, _ in agent.registered] == [500, 9_000]
    bench.pusher.forget(500)
    assert [address for address, _ in agent.registered] == [9_000]


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("how", ["fails_at", "hangs_at"])
def test_a_push_that_fails_leaves_nothing_and_its_agent_is_not_used_again(how, number):
    bench = Bench()
    failing = bench.next
    setattr(failing, how, number)
    with pytest.raises(PushFailed, match="DISCONNECT" if how == "fails_at" else "no piece for 1 s"):
        bench.pusher.push(MEMORY, PIECES, OFFER, 1.0)
    assert failing.dropped and not failing.open_handles and not failing.peers
    assert len(failing.written) == number
    bench.pusher.push(MEMORY, PIECES, OFFER, 1.0)
    assert len(bench.agents) == 2 and bench.agents[1].registered
    assert bench.pusher.counts()["failed"] == 1


def test_the_limit_is_for_each_piece():
    bench = Bench()
    bench.next.polls_needed = 9  # 0.8 s each, 2.4 s in all
    bench.pusher.push(MEMORY, PIECES, OFFER, 1.0)
    assert bench.now_s > 2.0


def test_a_receiver_that_cannot_be_read_fails_the_push():
    bench = Bench()
    with pytest.raises(PushFailed, match="garbage"):
        bench.pusher.push(MEMORY, PIECES, Offer(b"garbage", 0, 100, "nixl"), 1.0)
    assert not bench.agents[0].written


def test_an_agent_that_cannot_register_memory_is_not_used_again():
    bench = Bench()
    broken = bench.next

    def register(address, ranges):
        raise NixlError("registering memory: NIXL_ERR_BACKEND")

    broken.register = register
    with pytest.raises(NixlError, match="registering memory"):
        bench.pusher.push(MEMORY, PIECES, OFFER, 1.0)
    assert broken.dropped and not broken.written
    bench.pusher.push(MEMORY, PIECES, OFFER, 1.0)
    assert len(bench.agents) == 2


def test_one_push_at_a_time():
    bench = Bench()
    inside, go_on = threading.Event(), threading.Event()
    bench.next.polls_needed = 2

    def wait(seconds: float) -> None:
        inside.set()
        go_on.wait(10.0)

    pusher = Pusher(bench._make, lambda: 0.0, wait)
    thread = threading.Thread(target=pusher.push, args=(MEMORY, PIECES, OFFER, 1.0))
    thread.start()
    assert inside.wait(10.0)
    with pytest.raises(PushBusy):
        pusher.push(MEMORY, PIECES, OFFER, 1.0)
    go_on.set()
    thread.join(10.0)
    pusher.push(MEMORY, PIECES, OFFER, 1.0)
    assert pusher.counts()["done"] == 2


class Lanes:
    """A push with two agents, which come in the order given."""

    def __init__(self, *agents: FakeAgent) -> None:
        self.agents, self.now_s = list(agents), 0.0
        left = iter(agents)
        self.pusher = Pusher(lambda: next(left), lambda: self.now_s, self._sleep, lane_bytes=50)

    def _sleep(self, seconds: float) -> None:
        self.now_s += 0.1
        time.sleep(0.001)


def test_a_large_push_is_shared_by_two_agents():
    one, two = FakeAgent(), FakeAgent()
    one.polls_needed = two.polls_needed = 5
    bench = Lanes(one, two)
    for memory in (MEMORY, Memory(9_000, ((0, 100),))):
        bench.pusher.push(memory, PIECES, OFFER, 1000.0)
    notes = sorted(range_of(note) for agent in (one, two) for *_, note in agent.written)
    assert notes == sorted(2 * PIECES)
    assert not (one.open_handles or two.open_handles or one.peers or two.peers)
    assert bench.pusher.counts() == {"done": 2, "failed": 0, "bytes": 200}
    bench.pusher.forget(500)
    assert [len(agent.registered) for agent in (one, two)] == [1, 1]


def test_out_of_little_memory_there_is_one_lane():
    bench = Lanes(FakeAgent())
    bench.pusher.push(Memory(500, ((0, 90),)), [(0, 40), (40, 90)], OFFER, 1.0)
    assert len(bench.agents[0].written) == 2


@pytest.mark.parametrize("how", ["fails_at", "hangs_at"])
def test_the_failure_of_one_lane_ends_both_and_both_agents(how):
    one, two, *new = (FakeAgent() for _ in range(4))
    setattr(one, how, 1)
    two.polls_needed = 1_000_000
    bench = Lanes(one, two, *new)
    with pytest.raises(PushFailed, match="DISCONNECT" if how == "fails_at" else "no piece for 1 s"):
        bench.pusher.push(MEMORY, PIECES, OFFER, 1.0)
    for agent in (one, two):
        assert agent.dropped and not agent.open_handles and not agent.peers
        assert len(agent.written) <= 1
    assert bench.pusher.counts() == {"done": 0, "failed": 1, "bytes": 0}
    bench.pusher.push(MEMORY, PIECES, OFFER, 1.0)
    assert sum(len(agent.written) for agent in new) == len(PIECES)


def test_a_lane_that_cannot_be_made_ends_the_others():
    made = [FakeAgent()]

    def make():
        if len(made) > 1:
            raise NixlError("making a NIXL agent: NIXL_ERR_BACKEND")
        made.append(made[0])
        return made[0]

    pusher = Pusher(make, lane_bytes=50)
    with pytest.raises(NixlError, match="making a NIXL agent"):
        pusher.push(MEMORY, PIECES, OFFER, 1.0)
    assert made[0].dropped and not made[0].written
