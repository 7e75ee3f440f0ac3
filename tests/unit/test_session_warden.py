"""The warden: ends what a session holds when nobody is left to do it, and nothing else."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchtitan_rl_ft.run_folder import ProcessId
from torchtitan_rl_ft.serving import warden
from torchtitan_rl_ft.session_folder import (
    Owner,
    ServingAt,
    SessionBusy,
    SessionFolder,
    SessionRecord,
    boot_s,
)

HERE = socket.gethostname()
DEAD = ServingAt(1, 1.0, HERE, "", "")  # pid 1 did not begin then


@pytest.fixture
def run():
    """Starts processes in sessions of their own; all have ended afterwards."""
    started = []

    def start(*command: str) -> subprocess.Popen:
        started.append(subprocess.Popen(command, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def kept(folder: Path, **changed) -> SessionFolder:
    session = SessionFolder("s", folder)
    record = SessionRecord("s", "rule", DEAD, retain_ttl_s=0.5, unowned_since_boot_s=boot_s())
    session.write(dataclasses.replace(record, **changed))
    return session


def record_engine(session: SessionFolder, root: ProcessId, *members: ProcessId, scratch: Path):
    scratch.mkdir()
    segment = scratch.with_suffix(".shm")
    segment.write_text("x")
    engine = {
        "processes": [{"pid": root.pid, "start_time": root.start_time, "log": "x"}],
        "members": [[m.pid, m.start_time] for m in (root, *members)],
        "scratch": str(scratch),
        "shared_memory": [str(segment)],
    }
    session.engines.write_text(json.dumps({"0": engine}))
    return segment


def watched(run, session: SessionFolder) -> subprocess.Popen:
    return run(sys.executable, "-I", "-S", warden.__file__, str(session.path))


def child_of(process: subprocess.Popen) -> ProcessId:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    end = time.monotonic() + 5.0
    while not (pids := children.read_text().split()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return ProcessId.of(int(pids[0]))


def holder_memory(folder: Path, owner: ProcessId) -> Path:
    """What a holder has left, or holds."""
    folder.mkdir(parents=True)
    (folder / "owner.json").write_text(json.dumps(dataclasses.asdict(owner)))
    (folder / "lock").touch()
    (folder / "model.safetensors").write_bytes(bytes(4096))
    return folder


def test_memory_of_its_relays_and_of_the_dead_jobs_sources_is_free(run, tmp_path):
    session, memory = kept(tmp_path / "sessions"), tmp_path / "memory"
    relay = holder_memory(memory / "session" / "relay-0", DEAD.id)
    source = holder_memory(memory / "sources-1" / "trainer-0.0", DEAD.id)
    other = holder_memory(memory / "sources-2" / "trainer-0.0", ProcessId.current())
    session.hold_memory(relay.parent)
    assert watched(run, session).wait(10.0) == 0
    assert not relay.parent.exists() and not source.parent.exists()
    assert (other / "model.safetensors").exists()


@pytest.mark.scenario("Z-1")
def test_engines_of_a_session_that_nobody_wants_are_ended(run, tmp_path):
    """The tree, also what the record does not know; not a process with a recycled pid, nor one
    that looks alike."""
    engine = run("/bin/sh", "-c", "sleep 600 & wait")
    below = child_of(engine)
    decoy, alike = run("sleep", "600"), run("/bin/sh", "-c", "sleep 600 & wait")
    session = kept(tmp_path)
    recycled = ProcessId(decoy.pid, ProcessId.of(decoy.pid).start_time - 3.0)
    segment = record_engine(
        session, ProcessId.of(engine.pid), recycled, scratch=tmp_path / "scratch"
    )
    started_s = time.monotonic()
    assert watched(run, session).wait(10.0) == 0
    assert time.monotonic() - started_s > 0.4
    engine.wait(1.0)
    assert not below.alive()
    assert decoy.poll() is None and alike.poll() is None and child_of(alike).alive()
    assert not (tmp_path / "scratch").exists() and not segment.exists()
    assert not session.path.exists()


def test_a_living_owner_or_serving_is_waited_for(run, tmp_path):
    """The owner's death and then the serving role's: after that, the time to live."""
    engine, supervisor = run("sleep", "600"), run("sleep", "600")
    me = ProcessId.of(supervisor.pid)
    owner = Owner(me.pid, me.start_time, HERE, "a", "/runs/a")
    session = kept(tmp_path, owner=owner, unowned_since_boot_s=None, retain_ttl_s=0.0)
    record_engine(session, ProcessId.of(engine.pid), scratch=tmp_path / "scratch")
    guard = watched(run, session)
    time.sleep(2.5)
    assert guard.poll() is None and engine.poll() is None
    supervisor.kill()
    supervisor.wait()
    assert guard.wait(10.0) == 0
    assert engine.wait(1.0) == -signal.SIGKILL


def test_it_ends_with_the_session_and_there_is_one(run, tmp_path):
    me = ProcessId.current()
    owner = Owner(me.pid, me.start_time, HERE, "a", "/runs/a")
    session = kept(tmp_path, owner=owner)
    first = watched(run, session)
    time.sleep(0.5)
    assert watched(run, session).wait(5.0) == 0
    assert first.poll() is None
    session.remove()
    assert first.wait(5.0) == 0


def test_a_new_serving_role_is_not_robbed(run, tmp_path):
    """It holds the session already when the time is over."""
    engine = run("sleep", "600")
    session = kept(tmp_path, retain_ttl_s=0.0)
    record_engine(session, ProcessId.of(engine.pid), scratch=tmp_path / "scratch")
    record = session.read()
    with session.serving_lock(), pytest.raises(SessionBusy):
        warden.end(session, record)
    session.write(dataclasses.replace(record, last_attempt="new"))
    assert not warden.end(session, record)
    assert engine.poll() is None and session.path.exists()


@pytest.mark.parametrize(
    ("changed", "orphaned_boot_s", "due_s"),
    [
        ({}, None, None),
        ({}, 1000.0, 60.0),
        ({"unowned_since_boot_s": 990.0}, 1000.0, 50.0),
        # It does the disposal itself, unless it hangs.
        ({"serving": True}, 1000.0, 60.0 + warden.HANGING_S),
    ],
)
def test_when_a_session_is_due(changed, orphaned_boot_s, due_s):
    me = ProcessId.current()
    if changed.get("serving"):
        changed = {"serving": ServingAt(os.getpid(), me.start_time, HERE, "", "")}
    record = dataclasses.replace(SessionRecord("s", "r", DEAD, retain_ttl_s=60.0), **changed)
    assert warden.due_in_s(record, orphaned_boot_s, 1000.0) == due_s


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, False),
        ({"owner": Owner(1, 1.0, HERE, "a", "/a")}, False),
        ({"owner": Owner(1, 1.0, "elsewhere", "a", "/a")}, True),  # nobody can tell
        ({"by_hand": True}, False),
        ({"by_hand": True, "serving": ServingAt(1, 1.0, "elsewhere", "", "")}, True),
    ],
)
def test_who_looks_after_a_session(changed, expected):
    record = dataclasses.replace(SessionRecord("s", "r", DEAD), **changed)
    assert warden.owned(record) is expected


def test_what_cannot_be_read_is_said_once(tmp_path):
    """It may be mended; until then nothing of it is touched."""
    session = kept(tmp_path, retain_ttl_s=0.0)
    session.engines.write_bytes(b"")
    command = [sys.executable, "-I", "-S", warden.__file__, str(session.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as guard:
        time.sleep(2.5)
        assert guard.poll() is None and session.path.exists()
        session.engines.write_text("{}")
        out, _ = guard.communicate(timeout=5.0)
    assert "engines.json cannot be read" in out.splitlines()[0]
    assert out.splitlines()[1:] == ["session s: ended after its retention"]
