"""How a thread waits that alone makes the library go on."""

import pytest

from torchtitan_rl_ft.weights.holder.pace import BUSY_S, PATIENCE_S, Pace

NAP_S = 0.01


class Bench:
    """Time that passes in naps, and 0.1 ms for each call."""

    def __init__(self):
        self.now_s = self.cpu_s = 0.0
        self.waits: list[str] = []
        self.pace = Pace(NAP_S, self.sleep, self.give_way, lambda: self.now_s, lambda: self.cpu_s)

    def sleep(self, seconds):
        assert seconds == self.pace.nap_s
        self.now_s += seconds
        self.waits.append("nap")

    def give_way(self):
        self.waits.append("give way")

    def call(self, cpu_s):
        self.pace.begin()
        self.now_s += PATIENCE_S / 10
        self.cpu_s += cpu_s
        self.pace.wait()


@pytest.fixture
def bench():
    return Bench()


def test_a_call_that_moved_nothing_is_followed_by_a_nap(bench):
    for _ in range(3):
        bench.call(BUSY_S / 2)
    assert bench.waits == ["nap"] * 3


def test_a_call_that_moved_bytes_is_followed_by_the_next_at_once(bench):
    for _ in range(50):
        bench.call(3 * BUSY_S)
    assert bench.waits == ["give way"] * 50


def test_a_peer_that_has_stopped_costs_no_processor(bench):
    bench.call(3 * BUSY_S)
    for _ in range(40):
        bench.call(BUSY_S / 2)
    assert bench.waits.count("give way") <= 11, "no longer than the patience lasts"
    assert bench.waits[-20:] == ["nap"] * 20


def test_the_time_that_others_take_is_no_work_of_the_call(bench):
    bench.pace.begin()
    bench.now_s += 1.0  # another process had the processor
    bench.pace.wait()
    assert bench.waits == ["nap"]
