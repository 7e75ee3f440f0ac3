"""Detection on real SGLang engines: slow or paused is not dead, a hang is. benchmarks/detection.py
has the whole set."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import ServingRole, serving_role

from torchtitan_rl_ft.chaos import faults
from torchtitan_rl_ft.chaos.targets import WORKER_TITLES, titled
from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.run_folder import ProcessId

pytestmark = pytest.mark.timeout(150)

INTERVAL_S, TIMEOUT_S = 1.0, 2.0
LONG = {"max_new_tokens": 300, "ignore_eos": True}


@pytest.fixture(scope="module")
def role(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingRole]:
    """Two engines, looked at every second. The last test of this file breaks both."""
    with serving_role(
        tmp_path_factory.mktemp("detection"),
        health_check_first_wait=0.0,
        health_check_interval=INTERVAL_S,
        health_check_timeout=TIMEOUT_S,
        install_timeout_s=30.0,
    ) as role:
        role.until(lambda: "starting" not in role.states())
        role.publish(0)
        yield role


def server(role: ServingRole, slot: int) -> ProcessId:
    shown = role.engines()[slot]
    return ProcessId(shown["pid"], shown["start_time"])


def scheduler(role: ServingRole, slot: int) -> ProcessId:
    found = titled(process.descendants(server(role, slot)), WORKER_TITLES["scheduler"])
    assert found is not None
    return found


def check(role: ServingRole) -> tuple[dict, float]:
    began = time.monotonic()
    answer = role.client.post("/v1/check", {"timeout_s": 10.0}, deadline_s=15)
    return answer, time.monotonic() - began


@pytest.mark.row("B2")
def test_a_check_of_healthy_engines_is_cheap(role: ServingRole) -> None:
    times = []
    for _ in range(5):
        answer, took_s = check(role)
        assert answer == {"checked": 2, "retired": []}
        times.append(took_s)
    assert min(times) < 0.3  # 20 ms on an idle machine


@pytest.mark.row("B8")
@pytest.mark.scenario("D-1")
def test_a_slowed_engine_is_left_alone(role: ServingRole) -> None:
    """Stopped half of the time, busy and then idle."""
    pids = [e["pid"] for e in role.engines()]
    with faults.slowed(server(role, 0), 0.5):
        with ThreadPoolExecutor(4) as threads:
            asked = [
                threads.submit(role.generate, f"slow-{i}", n=4, sampling=LONG) for i in range(8)
            ]
            assert all(len(f.result()) == 4 for f in asked)
        for _ in range(3):
            assert check(role)[0]["retired"] == []
            time.sleep(INTERVAL_S)
    assert [e["pid"] for e in role.engines()] == pids
    assert role.events("exit") == []


@pytest.mark.row("B8")
def test_an_engine_that_takes_a_version_for_long_is_left_alone(role: ServingRole) -> None:
    """Its scheduler is stopped in the middle, for longer than interval and timeout together: no
    probe could be answered."""
    victim = scheduler(role, 0)
    check(role)  # no probe of its own is due for an interval, which would find it hung
    with ThreadPoolExecutor(1) as threads, faults.stopped(victim, whole_tree=False):
        publishing = threads.submit(role.publish, 1, scale=1.01)
        role.until(lambda: role.states()[0] == "installing", 10)
        time.sleep(INTERVAL_S + TIMEOUT_S + 0.5)
        assert role.states()[0] == "installing"
        assert check(role)[0] == {"checked": 1, "retired": []}
        faults.resume([victim])
        assert publishing.result()["installed"] == [0, 1]
    assert role.events("exit") == []


@pytest.mark.row("B1")
@pytest.mark.row("B4")
@pytest.mark.scenario("D-2")
def test_hung_engines_are_retired(role: ServingRole) -> None:
    """The scheduler of one, the server of the other, at the same time."""
    role.until(lambda: role.states() == ["serving", "serving"])
    stopped = [scheduler(role, 0), server(role, 1)]
    pids = [e["pid"] for e in role.engines()]
    for victim in stopped:
        os.kill(victim.pid, signal.SIGSTOP)
    took_s = role.until(lambda: not set(pids) & {e["pid"] for e in role.engines()}, 20)
    assert took_s < INTERVAL_S + TIMEOUT_S + 2.0
    role.until(lambda: len(role.events("exit")) == 2, 10)
    for slot, part in enumerate(["sglang::scheduler", "its server"]):
        [death] = [e for e in role.events("exit") if e["data"]["subject"] == f"engine-{slot}"]
        assert "no token progress" in death["cause"]
        assert f"stopped: {part} (pid {stopped[slot].pid})" in death["cause"]
        assert "signal" not in death["data"] or death["data"]["signal"] is None
    assert not any(p.alive() for p in stopped)
