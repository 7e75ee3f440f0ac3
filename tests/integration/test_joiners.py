"""A group that joins and cannot: whatever happens to it, the others train on."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from slow_link import SlowLinkThread
from trainer_run import TrainerRun, assert_each_step_once, assert_groups_equal

from torchtitan_rl_ft.host.ports import free_port
from torchtitan_rl_ft.observability.events import read_events
from torchtitan_rl_ft.observability.healing import recoveries

pytestmark = pytest.mark.timeout(400)

STALL_LIMIT_S = 20.0
"""Process-group timeout 4 s, heartbeat timeout 1 s, and a loaded machine."""

MANAGER_TIMEOUT_S = 6
KEYS = {
    "fault_tolerance__process_group_timeout_ms": 4000,
    "fault_tolerance__manager_timeout_s": MANAGER_TIMEOUT_S,
    "fault_tolerance__heal_warn_share": 0.4,
    "checkpoint__enable": "false",
    "rollout__journal": "false",  # checked only: the host keeps a journal
}


def pair_of_free_ports() -> int:
    """The lower one of two neighbours."""
    while True:
        with ExitStack() as stack:
            low = free_port()
            try:
                for port in (low, low + 1):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return low


def go_on(run: TrainerRun, participants: int, steps: int = 3) -> None:
    """Until the last steps were committed by so many groups."""
    enough = len(run.metrics()) + steps

    def done() -> bool:
        rows = run.metrics()
        last = rows[-steps:]
        return len(rows) >= enough and all(r["participants"] == participants for r in last)

    run.wait_for(done, f"{steps} steps of {participants} groups")


def longest_pause_s(run: TrainerRun, since_s: float) -> float:
    commits = [e["mono_s"] for e in run.events("commit") if e["mono_s"] > since_s]
    times = [since_s, *commits, time.monotonic()]
    return max(b - a for a, b in zip(times, times[1:], strict=False))


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Iterator[tuple[TrainerRun, SlowLinkThread]]:
    """Group 0 trains; its state is fetched over a link that a test may slow down or break."""
    listening, reached = pair_of_free_ports(), pair_of_free_ports()
    keys = {
        **KEYS,
        "fault_tolerance__heal_port": listening,
        "fault_tolerance__heal_address": f"127.0.0.1:{reached}",
    }
    path = tmp_path_factory.mktemp("joiners") / "run"
    with (
        SlowLinkThread(f"http://127.0.0.1:{listening}", reached) as thread,
        TrainerRun(path, steps=100_000, groups=2, **keys) as run,
    ):
        run.start("host", "lighthouse", "trainer-0", host_args=("--slow-s", "0.05"))
        go_on(run, 1)
        yield run, thread
        assert run.processes["trainer-0"][0].poll() is None
        assert_each_step_once(run)


@pytest.fixture
def joiner(alone):
    """Has the joiner do something to itself, and starts it. Afterwards it is gone and group 0
    trains."""
    run, thread = alone

    def start(**order) -> float:
        if order:
            run.order(1, **order)
        run.start("trainer-1")
        return time.monotonic()

    yield start
    thread.link.rate_bytes_s, thread.link.cut_after_bytes = 0.0, 0
    if "trainer-1" in run.processes:
        run.kill("trainer-1")
    go_on(run, 1)


@pytest.mark.row("G4")
@pytest.mark.scenario("Q-3")
@pytest.mark.parametrize("point", ["configure", "transfer"])
def test_a_joiner_that_dies_while_it_joins_takes_nobody_along(alone, joiner, point):
    run, _ = alone
    since_s = joiner(act="kill", point=point)
    assert run.wait_exit("trainer-1") == [-signal.SIGKILL]
    go_on(run, 1)
    # The step that it disturbed was refused, and committed under another quorum.
    (refused,) = [e for e in run.events("refuse") if e["mono_s"] > since_s]
    quorums = [e for e in run.events("quorum") if e["step"] == refused["step"]]
    assert len({e["data"]["quorum_id"] for e in quorums}) == 2
    assert sum(e["step"] == refused["step"] for e in run.events("commit")) == 1
    assert longest_pause_s(run, since_s) < STALL_LIMIT_S


def test_a_joiner_that_freezes_while_it_heals_holds_nobody_up(alone, joiner):
    run, _ = alone
    since_s = joiner(act="stop", point="transfer")
    pid = run.processes["trainer-1"][0].pid
    run.wait_for(lambda: state_of(pid) == "T", "the joiner to stop")
    go_on(run, 1)
    assert longest_pause_s(run, since_s) < STALL_LIMIT_S
    os.kill(pid, signal.SIGCONT)
    # It heals after all, at the step that the others have come to, or ends.
    run.wait_for(
        lambda: run.processes["trainer-1"][0].poll() or run.metrics()[-1]["participants"] == 2,
        "the joiner to heal or to end",
    )


@pytest.mark.parametrize(
    ("rate_bytes_s", "cut_after_bytes"), [(2000.0, 0), (0.0, 50_000)], ids=["slow", "broken"]
)
def test_a_joiner_that_cannot_heal_ends(alone, joiner, rate_bytes_s, cut_after_bytes):
    """The donor's answer does not come to an end within manager_timeout_s, or breaks off."""
    run, thread = alone
    thread.link.rate_bytes_s, thread.link.cut_after_bytes = rate_bytes_s, cut_after_bytes
    since_s = joiner()
    assert run.wait_exit("trainer-1") == [1], run.logs()
    assert "HealFailed" in (run.run.path / "trainer-1.0.log").read_text()
    go_on(run, 1)
    assert longest_pause_s(run, since_s) < STALL_LIMIT_S + MANAGER_TIMEOUT_S


@pytest.mark.row("G3")
@pytest.mark.scenario("R-3")
@pytest.mark.scenario("R-6")
def test_a_slow_heal_is_told_with_its_phases(alone, joiner):
    """The phases add up to the time from the quorum to the joiner's first commit."""
    run, thread = alone
    thread.link.rate_bytes_s = 800_000.0
    before = len(run.events("heal"))
    joiner()
    go_on(run, 2)
    heal = run.events("heal")[before]
    assert heal["data"]["source"] == address_of(run, thread)
    assert heal["data"]["bytes"] / heal["data"]["transfer_s"] < 900_000
    (warning,) = [e for e in run.events("warn") if e["pid"] == heal["pid"]]
    assert "slow heal" in warning["cause"] and "heal_warn_share = 0.4" in warning["cause"]
    mine = [e for e in run.events("phase") if e["pid"] == heal["pid"]]
    assert "forward_backward" not in {e["phase"] for e in mine if e["mono_s"] < heal["mono_s"]}
    told = [r for r in recoveries(list(read_events(run.run.events))) if r.name == "trainer-1"][-1]
    assert told.phase_s["transfer"] > 1.0
    assert sum(told.phase_s.values()) == pytest.approx(told.total_s, rel=0.05)
    assert_groups_equal(run, (0, 1), at_least=3)


REJOINS = 20


@pytest.mark.row("G3")
@pytest.mark.scenario("R-3")
def test_a_group_that_joins_again_and_again_trains_nothing_before_it_is_healed(tmp_path):
    """The donor's answers are late by up to 0.2 s, each time by another while, once by 2 s."""
    rng, listening, reached = random.Random(3), pair_of_free_ports(), pair_of_free_ports()
    keys = {
        **KEYS,
        "fault_tolerance__heal_port": listening,
        "fault_tolerance__heal_address": f"127.0.0.1:{reached}",
    }
    with (
        SlowLinkThread(f"http://127.0.0.1:{listening}", reached) as thread,
        TrainerRun(tmp_path / "run", steps=100_000, groups=2, forked=True, **keys) as run,
    ):
        run.start("host", "lighthouse", "trainer-0", host_args=("--slow-s", "0.05"))
        go_on(run, 1)
        for turn in range(REJOINS):
            thread.link.delay_s = 2.0 if turn == 0 else rng.uniform(0.0, 0.2)
            since, held = len(run.events("heal")), len(run.probes(1))
            run.start("trainer-1")
            run.wait_for(lambda n=held: len(run.probes(1)) >= n + 2, "two steps of the joiner")
            (heal,) = run.events("heal")[since:]
            mine = [e for e in run.events("phase") if e["pid"] == heal["pid"]]
            early = {e["phase"] for e in mine if e["mono_s"] < heal["mono_s"]}
            assert "forward_backward" not in early
            assert heal["data"]["transfer_s"] >= thread.link.delay_s
            run.kill("trainer-1")
        assert run.processes["trainer-0"][0].poll() is None
        assert_each_step_once(run)
        assert_groups_equal(run, (0, 1), at_least=2 * REJOINS)


def address_of(run: TrainerRun, thread: SlowLinkThread) -> str:
    """Where group 0 says that its state is."""
    log = (run.run.path / "trainer-0.0.log").read_text()
    assert f"state at {thread.url}/state/ (listening on" in log
    return f"{thread.url}/state/"


def state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as f:
        return f.read().rpartition(")")[2].split()[0]
