"""`torchtitan status` and `stop`, and what a supervisor does about its session, without a job."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys

import pytest
from config_jobs import GOOD, job, write

from torchtitan_rl_ft import cli
from torchtitan_rl_ft.config.errors import ConfigError
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.roles import status as show_status
from torchtitan_rl_ft.roles.session import Session, kept_after, living_processes
from torchtitan_rl_ft.run_folder import ProcessId, RunFolder
from torchtitan_rl_ft.session_folder import (
    Owner,
    ServingAt,
    SessionFolder,
    SessionRecord,
    SessionUnreadable,
    Trainer,
    boot_s,
)

HERE = socket.gethostname()


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("TORCHTITAN_RL_FT_RUN", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def sleeper():
    started = []

    def start(script: str = "exec sleep 600") -> subprocess.Popen:
        started.append(subprocess.Popen(["/bin/sh", "-c", script], start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def at(started: subprocess.Popen, *, earlier_s: float = 0.0) -> tuple[int, float, str]:
    me = ProcessId.of(started.pid)
    return me.pid, me.start_time - earlier_s, HERE


def session(name: str = "s", **changed) -> SessionFolder:
    folder = SessionFolder(name)
    serving = ServingAt(1, 1.0, HERE, "http://127.0.0.1:9", "")
    record = SessionRecord(name, "rollout.session_id", serving, retain_ttl_s=60.0)
    folder.write(dataclasses.replace(record, **changed))
    return folder


def record_engine(folder: SessionFolder, started: subprocess.Popen, earlier_s: float = 0.0) -> None:
    pid, start_time, _ = at(started, earlier_s=earlier_s)
    engine = {
        "slot": 0,
        "group": "policy",
        "url": "http://127.0.0.1:9",
        "fingerprint": "f",
        "processes": [{"pid": pid, "start_time": start_time, "log": "/log"}],
        "members": [[pid, start_time]],
        "scratch": str(folder.path / "scratch"),
        "shared_memory": [],
        "bootstrap_port": None,
        "duty": "active",
    }
    folder.engines.write_text(json.dumps({"0": engine}))


def status(capsys, *words: str) -> dict:
    assert cli.main(["status", *words, "--json"]) == ExitCode.DONE
    return json.loads(capsys.readouterr().out)


# Status ---------------------------------------------------------------------------------------


@pytest.mark.row("A3")
def test_check_and_status_print_the_id_and_its_rule(home, capsys):
    file = write(home, GOOD)
    folder = ["--job.dump_folder", str(home / "run")]
    assert cli.main(["check", "--quick", file, *folder]) == ExitCode.DONE
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "serving session" in x]
    found = status(capsys, "--job.config_file", file, *folder)
    assert found["rule"].startswith("checkpoint folder: ") or found["rule"].startswith("hash of")
    assert f"serving session {found['session']} ({found['rule']})" in line
    assert (found["state"], found["last_step"], found["roles"]) == ("none", None, [])


def test_status_of_a_run_folder_and_of_its_session_agree(home, capsys, sleeper):
    run = RunFolder(home / "run")
    resolved = job(home, GOOD, "--job.dump_folder", str(run.path), "--rollout.session_id", "s")
    resolved.write()
    run.metrics.write_text('{"step": 1}\n{"step": 2}\n')
    run.register("rollout", "http://127.0.0.1:9")
    supervisor = sleeper()
    folder = session(owner=Owner(*at(supervisor), "a", str(run.path)), run_folder=str(run.path))
    record_engine(folder, sleeper())
    found = status(capsys, str(run.path))
    assert found == status(capsys, "s")
    assert found["state"] == "serving has died" and found["last_step"] == 2
    assert found["owner"] == {
        "attempt": "a", "pid": supervisor.pid, "host": HERE, "alive": True
    }  # fmt: skip
    assert [e["state"] for e in found["engines"]] == ["alive"]
    assert [r["name"] for r in found["roles"]] == ["rollout"]
    assert cli.main(["status", "s"]) == ExitCode.DONE
    text = capsys.readouterr().out
    for part in ("session    s (rollout.session_id)", "last step  2", "engine-0  alive", "role"):
        assert part in text


@pytest.mark.parametrize("words", [("status",), ("report", "run")])
def test_a_run_folder_of_another_version_is_told_of(home, capsys, monkeypatch, words):
    """Also when nothing is named and it is the default one."""
    run = RunFolder(home / "run")
    path = job(home, GOOD, "--job.dump_folder", str(run.path)).write()
    older = json.loads(path.read_text())
    del older["values"]["observability"]
    path.write_text(json.dumps(older))
    run.metrics.write_text('{"step": 1}\n')
    monkeypatch.setenv("TORCHTITAN_RL_FT_RUN", str(run.path))
    assert cli.main(list(words)) == ExitCode.DONE
    assert "was written by another version of this package" in capsys.readouterr().out


def test_status_names_trainers_and_why_nothing_is_admitted(home, sleeper):
    living, dead = sleeper(), sleeper()
    trainers = [
        Trainer(*at(living), "a", "trainer-0"),
        Trainer(*at(dead, earlier_s=9.0), "a", "trainer-1"),
    ]
    session(owner=Owner(*at(living), "a", "/runs/a"), trainers=tuple(trainers))
    found = show_status.status(show_status.Target.of("s"))
    assert [(t["name"], t["alive"]) for t in found["trainers"]] == [
        ("trainer-0", True), ("trainer-1", False)
    ]  # fmt: skip
    lines = show_status.show(found)
    assert f"role       trainer-0  process {living.pid}" in lines
    assert f"role       trainer-1  process {dead.pid} (dead)" in lines
    engines = [
        {"slot": s, "group": g, "duty": "active", "state": "serving", "pid": 7}
        for s, g in enumerate(("policy", "judge"))
    ]
    lines = show_status.show({**found, "engines": engines})
    assert "engine     engine-1  judge  active  serving  process 7" in lines
    for told, shown in (("no job", "closed: no job"), ("open", "open")):
        assert f"admission  {shown}" in show_status.show({**found, "admission": told})


@pytest.mark.parametrize("words", [["check", "--quick", "rl_ft_debug.toml"], ["help", "rollout"]])
def test_a_reader_that_has_seen_enough(home, words):
    """`torchtitan check FILE | head -1`."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "torchtitan_rl_ft", *words]
    with open(write, "w") as pipe:
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == ExitCode.DONE and "Broken" not in done.stderr


def test_status_of_all_sessions(home, capsys):
    assert cli.main(["status"]) == ExitCode.DONE
    assert capsys.readouterr().out == "no serving session of this user on this machine\n"
    session("one", unowned_since_boot_s=boot_s())
    broken = session("two")
    broken.record_file.write_text("{")
    assert cli.main(["status"]) == ExitCode.DONE
    one, two = capsys.readouterr().out.splitlines()
    assert one.split() == ["one", "serving", "has", "died"] and "unreadable" in two
    assert [s["session"] for s in status(capsys)] == ["one", "two"]


@pytest.mark.parametrize("command", ["status", "stop"])
def test_what_is_named_must_be_there(home, command, capsys):
    session("known")
    assert cli.main([command, "nothing"]) == ExitCode.CONFIG
    assert "sessions: known" in capsys.readouterr().err
    (home / "empty").mkdir()
    assert cli.main([command, str(home / "empty")]) == ExitCode.CONFIG
    assert "config.resolved.json" in capsys.readouterr().err


def test_stop_wants_to_know_what(capsys):
    assert cli.main(["stop"]) == ExitCode.CONFIG
    assert "torchtitan status" in capsys.readouterr().err


# Stop -----------------------------------------------------------------------------------------


@pytest.mark.scenario("Z-1")
def test_stop_hits_nobody_elses_process(capsys, sleeper):
    """All recorded pids belong to others by now: they began later."""
    supervisor, serving, engine = sleeper(), sleeper(), sleeper()
    folder = session(
        owner=Owner(*at(supervisor, earlier_s=9.0), "a", "/runs/a"),
        serving=ServingAt(*at(serving, earlier_s=9.0), "http://127.0.0.1:9", ""),
        warden=ProcessId(engine.pid, 1.0),
    )
    record_engine(folder, engine, earlier_s=9.0)
    assert cli.main(["stop", "s"]) == ExitCode.DONE
    assert capsys.readouterr().out == "session s: nothing is running\n"
    assert [p.poll() for p in (supervisor, serving, engine)] == [None] * 3
    assert not folder.path.exists()


def test_stop_ends_a_background_job_and_a_stubborn_one_too(capsys, sleeper, monkeypatch):
    monkeypatch.setattr(show_status, "HURRY_S", 0.3)
    monkeypatch.setattr(show_status, "CLEANUP_TIMEOUT_S", 0.3)
    background = sleeper("trap '' INT; exec sleep 600")  # as a shell starts it
    stubborn = sleeper("trap '' INT TERM; while :; do sleep 0.1; done")
    for name, started in (("background", background), ("stubborn", stubborn)):
        session(name, owner=Owner(*at(started), "a", "/runs/a"))
        assert cli.main(["stop", name]) == ExitCode.DONE
        assert capsys.readouterr().out == f"ended the job (process {started.pid})\n"
    assert background.wait(1) == -signal.SIGTERM and stubborn.wait(1) == -signal.SIGKILL


def test_stop_leaves_another_hosts_session_alone(capsys):
    folder = session(serving=ServingAt(1, 1.0, "elsewhere", "http://x", ""))
    assert cli.main(["stop", "s"]) == ExitCode.CONFIG
    assert "elsewhere" in capsys.readouterr().err and folder.record_file.exists()
    folder = session("t", owner=Owner(1, 1.0, "elsewhere", "a", "/runs/a"))
    assert cli.main(["stop", "t"]) == ExitCode.CONFIG
    assert "elsewhere" in capsys.readouterr().err and folder.record_file.exists()


# The supervisor's side ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exit_code", "argv", "kept"),
    [
        (ExitCode.DONE, (), False),
        (ExitCode.CONFIG, (), False),
        (ExitCode.NUMERIC, (), False),
        (ExitCode.FAILED, (), True),
        (ExitCode.REQUEUE, (), True),
        (ExitCode.INTERRUPTED, (), False),
        (ExitCode.INTERRUPTED, ("--rollout.keep_serving",), True),
        (ExitCode.DONE, ("--rollout.keep_serving",), False),
        (ExitCode.FAILED, ("--rollout.retain_ttl", "0"), False),
        (ExitCode.FAILED, ("--rollout.debug_mode", "rollout_only"), False),
    ],
)
def test_what_is_kept_after_which_end(home, exit_code, argv, kept):
    assert kept_after(exit_code, job(home, GOOD, *argv)) is kept


@pytest.mark.row("F3")
@pytest.mark.row("F10")
@pytest.mark.parametrize("host", [HERE, "elsewhere"], ids=["alive", "unknown"])
def test_a_session_of_a_living_or_unknown_job_is_not_taken(home, sleeper, host):
    """Also when its serving role has died; and nothing of it is touched."""
    supervisor = sleeper()
    pid, start_time, _ = at(supervisor)
    folder = session(owner=Owner(pid, start_time, host, "a", "/runs/a"))
    before = folder.record_file.read_bytes()
    mine = Session(job(home, GOOD, "--rollout.session_id", "s"))
    with pytest.raises(ConfigError, match="belongs to the job in /runs/a"):
        mine.take_over()
    assert folder.record_file.read_bytes() == before and supervisor.poll() is None


def test_a_dead_session_is_forgotten_with_its_files(home):
    folder = session()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    me = ProcessId.of(dead.pid)
    dead.wait()
    segment = home / "segment"
    segment.write_text("x")
    record = {
        "slot": 0, "group": "policy", "url": "", "fingerprint": "", "bootstrap_port": None,
        "processes": [{"pid": me.pid, "start_time": me.start_time, "log": ""}],
        "members": [], "scratch": str(home / "scratch"), "shared_memory": [str(segment)],
        "duty": "active",
    }  # fmt: skip
    folder.engines.write_text(json.dumps({"0": record}))
    Session(job(home, GOOD, "--rollout.session_id", "s")).forget_dead()
    assert not segment.exists() and not folder.path.exists()


def test_what_lives_of_a_session(sleeper):
    engine, serving, other = sleeper("sleep 600 & wait"), sleeper(), sleeper()
    folder = session(serving=ServingAt(*at(serving), "", ""))
    record_engine(folder, engine)
    found = {p.pid for p in living_processes(folder)}
    assert {engine.pid, serving.pid} <= found and other.pid not in found
    folder.engines.write_text("{")
    with pytest.raises(SessionUnreadable):
        living_processes(folder)


@pytest.mark.parametrize("command", ["status", "stop"])
def test_unreadable_records_of_engines_are_one_error(home, capsys, command):
    """The serving role that knew them has died."""
    session().engines.write_bytes(b"")
    assert cli.main([command, "s"]) == ExitCode.CONFIG
    (line,) = capsys.readouterr().err.splitlines()
    assert "engines.json cannot be read" in line and "remove the file" in line


def test_a_directory_with_the_name_of_a_session(home, capsys):
    session()
    (home / "s").mkdir()
    assert status(capsys, "s")["session"] == "s"
