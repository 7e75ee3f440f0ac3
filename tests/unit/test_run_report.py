"""`torchtitan report RUN`: what a run came to: one that runs, has ended, or was killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from config_jobs import GOOD, job

from torchtitan_rl_ft import cli
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.observability.events import EventLog, Kind
from torchtitan_rl_ft.run_folder import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run folder whose job was killed after two of 100 steps."""
    resolved = job(tmp_path, GOOD, "--job.dump_folder", str(tmp_path / "run"))
    resolved.write()
    folder = resolved.run_folder
    events = EventLog(folder.events, run="run", role="supervisor", name="supervisor")
    events.emit(Kind.RUN, phase="start")
    for step in (1, 2):
        events.emit(Kind.COMMIT, step=step)
    events.close()
    rows = [{"step": 1, "reward/mean": 0.25}, {"step": 2, "reward/mean": 0.75}]
    folder.metrics.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


def report(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert cli.main(["report", *argv]) == ExitCode.DONE
    return capsys.readouterr().out


def test_a_crashed_run(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    out = report(capsys, str(run.path))
    assert "outcome    ended without a word: its supervisor was killed" in out
    assert "steps      2 of 100" in out
    assert "reward     0.500 -> 0.500" in out
    assert not (run.path / "journal").exists()  # reading makes nothing


def test_a_running_and_an_ended_one(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    run.register("supervisor", "")
    assert json.loads(report(capsys, str(run.path), "--json"))["outcome"] == "running"
    run.unregister("supervisor")
    events = EventLog(run.events, run="run", role="supervisor", name="supervisor")
    events.emit(Kind.RUN, phase="end", cause="complete", exit_code=0)
    events.close()
    found = json.loads(report(capsys, "--json", str(run.path)))
    assert found["outcome"] == "complete (exit code 0)"
    assert (found["steps"], found["first_reward"], found["rewards"]) == (2, 0.5, [0.25, 0.75])


def test_a_log_with_torn_and_foreign_lines_and_a_clock_that_was_set(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    events = EventLog(run.events, run="run", role="trainer", name="trainer-0")
    for kind in Kind:  # as a version might write it that has other data
        events.emit(kind, phase="report", subject="trainer-0", fault="new", path=7, groups="all")
    events.close()
    last = run.events.read_bytes().splitlines()[-1]
    line = json.loads(last)
    strange = [
        line | {"kind": "of another version"},
        line | {"mono_s": "soon"},
        line | {"data": [1]},
        line | {"wall_s": float("inf")},
        line | {"mono_s": 10**400},
        line | {"wall_s": line["wall_s"] - 3600, "kind": "warn"},
    ]
    with open(run.events, "ab") as f:
        f.writelines(json.dumps(s).encode() + b"\n" for s in strange)
        f.write(last[:40] + b"\n" + last[:30])
    out = report(capsys, str(run.path))
    assert "note       6 lines of the events are torn or of another version" in out
    assert "the wall clock was set by -3600.0 s" in out
    found = json.loads(report(capsys, str(run.path), "--json"))
    assert len(found["notes"]) == 2 and found["ettr"]["steps"] == 2
    assert found["ettr"]["strict"]["ratio"] == 0.0


def test_a_job_that_never_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job(tmp_path, GOOD, "--job.dump_folder", str(tmp_path / "run")).write()
    assert "outcome    never started" in report(capsys, str(tmp_path / "run"))


def test_a_folder_without_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path)]) == ExitCode.CONFIG
    assert "config.resolved.json does not exist: start the job" in capsys.readouterr().err


def test_accounts_and_a_trace_are_two_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as e:
        cli.main(["report", "--ledger", "--trace", "--json", str(tmp_path)])
    assert e.value.code == ExitCode.CONFIG
    assert "--trace: not allowed with argument --ledger" in capsys.readouterr().err
