"""SIGTERM to a rank whose main thread cannot look at it."""

import signal
import subprocess
import sys
import textwrap
import time

import pytest

RANK = textwrap.dedent(
    """
    import ctypes, sys, pathlib, time
    from torchtitan_rl_ft.rpc.client import RoleUnreachable
    from torchtitan_rl_ft.trainer import exits

    asked = pathlib.Path(sys.argv[1])
    exits.ASK_AGAIN_S = 0.05

    def ask():
        with open(asked, "a") as f:
            f.write("x")
        raise RoleUnreachable("the ledger is being restarted")

    watch = exits.SignalWatch(ask)
    asked.touch()
    ctypes.CDLL(None).sleep(20)  # as a collective: in C, without the GIL; a signal ends it
    for _ in range(2):  # the trainer begins again in this process
        time.sleep(0.3)
        watch.close()
        watch.close()
        before = len(asked.read_text())
        watch = exits.SignalWatch(ask)
        while len(asked.read_text()) == before:
            time.sleep(0.02)
    watch.close()
    print("closed", flush=True)
    ctypes.CDLL(None).sleep(20)
    """
)


@pytest.fixture
def rank(tmp_path):
    asked = tmp_path / "asked"
    command = [sys.executable, "-c", RANK, str(asked)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    wait_for(asked.exists)
    with process:
        yield process, asked
        process.kill()


def wait_for(condition, timeout_s=20.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.row("H1")
def test_the_ledger_is_asked_at_once_and_again_and_again(rank):
    process, asked = rank
    time.sleep(0.2)
    assert asked.read_text() == ""
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: len(asked.read_text()) >= 3)
    assert process.stdout.readline() == "closed\n"
    assert process.poll() is None


def test_sigint_ends_it_at_once(rank):
    process, _ = rank
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == -signal.SIGINT


BETWEEN = textwrap.dedent(
    """
    import os, signal, time
    from torchtitan_rl_ft.trainer import exits

    asked = []
    exits.SignalWatch(lambda: asked.append(1)).close()
    os.kill(os.getpid(), signal.SIGTERM)  # while a trainer begins again
    watch = exits.SignalWatch(lambda: asked.append(2))
    while not asked:
        time.sleep(0.02)
    watch.close()
    assert set(asked) == {2}
    """
)


def test_a_signal_between_two_lives_of_a_rank_is_heard():
    subprocess.run([sys.executable, "-c", BETWEEN], check=True, timeout=30)
