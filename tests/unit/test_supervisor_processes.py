"""Processes by pid and start time, their trees, and what they hold on this machine."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import psutil
import pytest

from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.host.footprint import SHM, Footprint
from torchtitan_rl_ft.host.log_tail import last_lines
from torchtitan_rl_ft.run_folder import ProcessId

HOLDER = textwrap.dedent(
    """
    import mmap, os, socket, sys, time
    s = socket.socket(); s.bind(("127.0.0.1", 0)); s.listen()
    maps = []
    for name in sys.argv[1:]:
        with open(name, "w+b") as f:
            f.truncate(4096)
            maps.append(mmap.mmap(f.fileno(), 4096))
    print(s.getsockname()[1], flush=True)
    time.sleep(600)
    """
)


@pytest.fixture
def segments():
    names = [SHM / f"psm_{uuid.uuid4().hex[:8]}", SHM / f"model-{uuid.uuid4().hex[:8]}.bin"]
    yield names
    for name in names:
        name.unlink(missing_ok=True)


@pytest.fixture
def holder(segments):
    command = [sys.executable, "-c", HOLDER, *map(str, segments)]
    popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    popen.port = int(popen.stdout.readline())
    yield popen
    popen.kill()
    popen.wait()


def test_footprint_names_what_is_left_and_touches_no_file_of_others(holder, segments):
    ours, users = segments
    footprint = Footprint(before=frozenset())
    footprint.observe([ProcessId.of(holder.pid)])
    assert footprint.ports == {holder.port} and footprint.shared_memory == {ours}
    assert footprint.leftovers() == sorted(
        [
            f"process {holder.pid}",
            f"port {holder.port} (held by process {holder.pid})",
            f"shared memory {ours}",
        ]
    )
    holder.kill()
    holder.wait()
    assert footprint.leftovers() == [f"shared memory {ours}"]
    assert footprint.remove_shared_memory() == [ours]
    assert footprint.leftovers() == [] and users.exists()


def test_segment_that_was_there_before_is_not_ours(holder, segments):
    footprint = Footprint(before=frozenset(segments))
    footprint.observe([ProcessId.of(holder.pid)])
    assert footprint.shared_memory == set()


def test_port_taken_by_another_program_afterwards_is_not_ours(holder):
    footprint = Footprint()
    footprint.observe([ProcessId.of(holder.pid)])
    holder.kill()
    holder.wait()
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("127.0.0.1", holder.port))
        s.listen()
        assert [line for line in footprint.leftovers() if "port" in line] == []


def test_reused_pid_is_another_process(holder):
    real = ProcessId.of(holder.pid)
    impostor = ProcessId(real.pid, real.start_time - 1.0)
    assert real.alive() and not impostor.alive()
    assert not process.kill(impostor)
    assert real.alive()


def test_zombie_is_not_alive():
    child = subprocess.Popen(["true"])
    named = ProcessId.of(child.pid)
    while Path(f"/proc/{child.pid}/stat").read_text().split(") ")[1][0] != "Z":
        time.sleep(0.01)
    assert not named.alive()
    child.wait()


def test_process_that_is_gone_has_no_name():
    child = subprocess.Popen(["true"])
    child.wait()
    with pytest.raises(ProcessLookupError):
        ProcessId.of(child.pid)


def test_exit_is_noticed_at_once(tmp_path):
    async def run():
        child = process.spawn(["sleep", "600"], log=tmp_path / "log", env=dict(os.environ))
        waiting = asyncio.create_task(child.wait())
        await asyncio.sleep(0.1)
        killed_s = time.monotonic()
        child.send(signal.SIGKILL)
        assert await waiting == -signal.SIGKILL
        return time.monotonic() - killed_s

    assert asyncio.run(run()) < 0.5


def test_whole_tree_is_ended_with_what_it_starts_meanwhile(tmp_path):
    seconds = str(600 + os.getpid())  # tells these apart from any other

    async def run():
        script = f"while :; do setsid sleep {seconds} & sleep 0.01; done"
        child = process.spawn(["sh", "-c", script], log=tmp_path / "log", env=dict(os.environ))
        await asyncio.sleep(0.3)
        tree = [child.id, *process.descendants(child.id)]
        assert len(tree) > 2
        left = await process.kill_until_gone(tree, time.monotonic() + 10)
        await child.wait()
        return tree, left

    tree, left = asyncio.run(run())
    assert left == [] and not any(p.alive() for p in tree)
    escaped = [
        p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", seconds]
    ]
    for one in escaped:
        one.kill()
    assert escaped == []


def test_processes_that_cannot_be_killed_in_time_are_returned(holder, monkeypatch):
    alive = ProcessId.of(holder.pid)
    monkeypatch.setattr(process, "kill", lambda target, signum=signal.SIGKILL: True)
    # A deadline that has passed: nothing is waited for.
    assert asyncio.run(process.kill_until_gone([alive], time.monotonic() - 1)) == [alive]


def test_nothing_stays_stopped_when_the_time_is_over_or_the_caller_is_cancelled(tmp_path):
    async def run():
        children = [
            process.spawn(["sleep", "60"], log=tmp_path / "log", env=dict(os.environ))
            for _ in range(2)
        ]
        await process.kill_until_gone([children[0].id], time.monotonic() - 1)
        assert await children[0].wait() == -signal.SIGKILL
        killing = asyncio.create_task(
            process.kill_until_gone([children[1].id], time.monotonic() + 10)
        )
        await asyncio.sleep(0.003)  # in the middle of it, or nearly
        killing.cancel()
        await asyncio.sleep(0.5)
        state = process_state(children[1])
        process.kill(children[1].id)
        return state

    assert asyncio.run(run()) != psutil.STATUS_STOPPED


def process_state(child: process.Child) -> str:
    if child.returncode is not None:
        return "ended"
    return psutil.Process(child.pid).status()


def test_last_lines_of_a_log(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"x" * 100_000 + b"\n\n" + b"".join(b"line %d\n" % i for i in range(9)) + b"\n")
    assert last_lines(log, 2) == ["line 7", "line 8"]
    assert last_lines(tmp_path / "none") == []
    log.write_bytes(b"\x1b[31mstep: 142  \x1b[38;2;180;60;0mloss:\x1b[39m 0.1\x1b[0m\n")
    assert last_lines(log) == ["step: 142  loss: 0.1"]  # colours are for terminals
    log.write_bytes(b"\xff\xfe broken \n")
    assert len(last_lines(log)) == 1
