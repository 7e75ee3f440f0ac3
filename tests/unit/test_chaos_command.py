"""`torchtitan chaos`, the command, against stand-ins for a running job."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from config_jobs import GOOD, job
from test_chaos_injector import Run, stopped, until

from torchtitan_rl_ft import cli
from torchtitan_rl_ft.chaos.memory import Memory, to_json
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.observability.events import Kind
from torchtitan_rl_ft.run_folder import ProcessId, RoleAddress

SLEEPER = "print(flush=True); import time; time.sleep(600)"


class RunningJob(Run):
    """A run folder whose supervisor is up, with two trainers and the rollout role."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        job(path.parent, GOOD, "--job.dump_folder", str(path)).write()
        self.start()
        self.victims = {n: self.spawn(n, SLEEPER) for n in ("trainer-0", "trainer-1", "rollout")}
        supervisor = self.spawn("supervisor", SLEEPER)
        self.folder.announce(
            RoleAddress(
                "supervisor", "", supervisor.pid, supervisor.start_time, 1, socket.gethostname()
            )
        )
        self.log.emit(Kind.SEAL, step=4)
        self.log.emit(Kind.COMMIT, step=4)

    def command(self, *lines: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "torchtitan_rl_ft", "chaos", str(self.folder.path)]
        pipe = subprocess.PIPE
        found = subprocess.Popen([*command, *lines], stdout=pipe, stderr=pipe, text=True)
        self.started.append(found)  # type: ignore[arg-type]
        return found

    def end(self) -> None:
        for started in self.started:
            started.kill()
            started.wait()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningJob]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    found = RunningJob(tmp_path / "run")
    yield found
    found.end()
    found.log.close()


def test_now_and_at_a_moment_and_over_when_all_is_lifted(run: RunningJob) -> None:
    rollout, trainer = run.victims["rollout"], run.victims["trainer-1"]
    command = run.command("kill trainer-1 at step 5", "stop rollout for 0.5 s")
    until(lambda: stopped(rollout))
    assert trainer.alive()
    run.log.emit(Kind.COMMIT, step=5)
    out, err = command.communicate(timeout=50)
    assert (command.returncode, err) == (ExitCode.DONE, "")
    assert not trainer.alive() and not stopped(rollout)
    lines = out.splitlines()
    assert lines[0].startswith(f"injected: stop rollout for 0.5 s: rollout (pid {rollout.pid}), ")
    assert f"injected: kill trainer-1 at step 5: trainer-1 (pid {trainer.pid}), " in out
    assert "lifted: stop rollout for 0.5 s: rollout" in lines
    # Enough to have them again, and no trace of the command.
    assert [(e.role, e.data["subject"]) for e in run.seen()] == [
        ("chaos", "rollout"),
        ("chaos", "trainer-1"),
    ]
    assert cli.main(["chaos", "--record", str(run.folder.path), str(run.folder.path / "x")]) == 0
    assert list(run.folder.path.glob("chaos*")) == []


def test_ctrl_c_lifts_what_is_held(run: RunningJob) -> None:
    rollout = run.victims["rollout"]
    command = run.command("stop rollout", "kill trainer-0 at step 9")
    until(lambda: stopped(rollout))
    command.send_signal(signal.SIGINT)
    out, _ = command.communicate(timeout=50)
    assert command.returncode == ExitCode.INTERRUPTED
    assert "lifted: stop rollout: rollout" in out
    assert not stopped(rollout) and run.victims["trainer-0"].alive()
    assert list(run.folder.path.glob("chaos*")) == []


def test_what_a_killed_command_held_is_lifted_by_the_next(run: RunningJob) -> None:
    rollout, trainer = run.victims["rollout"], run.victims["trainer-1"]
    strange = run.folder.path / "chaos-command-notes.json"
    strange.write_text("of a person")
    killed = run.command("stop rollout")
    until(lambda: stopped(rollout))
    killed.kill()
    killed.wait()
    command = run.command("kill trainer-1")
    out, _ = command.communicate(timeout=50)
    assert command.returncode == ExitCode.DONE
    assert not stopped(rollout) and not trainer.alive()
    assert list(run.folder.path.glob("chaos*")) == [strange]


def test_the_jobs_own_injector_is_left_alone(run: RunningJob) -> None:
    rollout = run.victims["rollout"]
    own = Memory(run.folder)
    own.hold("stop trainer-0 #1", name="trainer-0", stopped=to_json([rollout]))
    command = run.command("kill trainer-1")
    command.communicate(timeout=50)
    assert command.returncode == ExitCode.DONE
    assert Memory(run.folder).held == own.held


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("kil trainer-1", "'kil trainer-1': 'kil' is not a kind of fault"),
        ("kill trainer-1 at", "the line ends where step, rollout or phase"),
        ("kill trainer-7", "'kill trainer-7': there is no trainer-7 in this job, which has 2"),
        ("kill rollot", "unknown target 'rollot'; did you mean 'rollout'?"),
        ("kill trainer-1 at step 4", "'kill trainer-1 at step 4': that moment has passed"),
        ("kill trainer-1 at rollout 4", "that moment has passed"),
        ("kill trainer-1 at step 101", "training.steps = 100, so step 101 never comes"),
        ("kill standby-0", "this job has no standby trainer"),
    ],
)
def test_a_wrong_line_hits_nobody(
    run: RunningJob, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    code = cli.main(["chaos", str(run.folder.path), "kill trainer-0", line])
    assert code == ExitCode.CONFIG
    assert f"torchtitan: error: {line!r}: " in (err := capsys.readouterr().err)
    assert message in err
    assert all(v.alive() for v in run.victims.values()) and run.seen() == []
    assert list(run.folder.path.glob("chaos*")) == []


def test_what_this_job_cannot_suffer_is_told(run: RunningJob) -> None:
    command = run.command("fail trainer-1 all-reduce", "stop trainer-0 for 0.1 s")
    _, err = command.communicate(timeout=50)
    assert command.returncode == ExitCode.FAILED
    assert "fail trainer-1 all-reduce: trainer-1 (pid" in err
    assert "was not started with process groups that can fail" in err
    assert [e.data["subject"] for e in run.seen()] == ["trainer-0"]


def test_a_job_that_has_ended(run: RunningJob, capsys: pytest.CaptureFixture[str]) -> None:
    waiting = run.command("kill trainer-1 at step 9")
    for name in ("supervisor", "trainer-0"):
        kill(run, name)
    _, err = waiting.communicate(timeout=50)
    assert waiting.returncode in (ExitCode.FAILED, ExitCode.CONFIG)
    assert "has ended" in err
    assert cli.main(["chaos", str(run.folder.path), "kill trainer-1"]) == ExitCode.CONFIG
    assert "no job runs in" in capsys.readouterr().err
    assert cli.main(["chaos", str(run.folder.path.parent), "kill trainer-1"]) == ExitCode.CONFIG
    assert "is not the run folder of a job" in capsys.readouterr().err


def kill(run: RunningJob, name: str) -> None:
    for event in run.seen(Kind.SPAWN, None):
        if event.data["subject"] == name:
            [found] = [p for p in run.started if p.pid == event.data["pid"]]
            found.kill()
            found.wait()


def test_how_it_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chaos", "--record", "x", "y", "z"]) == ExitCode.CONFIG
    assert "--record takes one file" in capsys.readouterr().err
    assert cli.main(["chaos", "x", "kill rollout", "--chaos.seed=3"]) == ExitCode.CONFIG
    assert "name none" in capsys.readouterr().err
    assert ProcessId.current().alive()
