"""The language of faults, and when they are due."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from config_jobs import GOOD, job

from torchtitan_rl_ft import cli
from torchtitan_rl_ft.chaos import failing_reduce, job_plan
from torchtitan_rl_ft.chaos.plan import (
    NOW,
    Fault,
    FaultInvalid,
    FaultKind,
    Moment,
    When,
    parse,
    parse_command,
    parse_deed,
)
from torchtitan_rl_ft.chaos.role import made_ready
from torchtitan_rl_ft.chaos.schedule import Schedule, keyed
from torchtitan_rl_ft.config import checks
from torchtitan_rl_ft.config.resolve import Resolved, resolve
from torchtitan_rl_ft.exit_codes import ExitCode

K = FaultKind
KINDS = "kill, stop, slow, blackhole, fail, fill"


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("kill engine-1 at step 2", (K.KILL, "engine-1", Moment(When.STEP, 2))),
        ("kill engine-0.scheduler after 3 s", (K.KILL, "engine-0.scheduler", "after 3")),
        ("stop serving for 3 s at step 4", (K.STOP, "serving", Moment(When.STEP, 4), 0.0, 3.0)),
        ("stop trainer-1 at rollout 3", (K.STOP, "trainer-1", Moment(When.ROLLOUT, 3))),
        ("slow engine-0 50 % for 5 s after 10 s", (K.SLOW, "engine-0", "after 10", 0.5, 5.0)),
        ("slow engine-0 12.5% for 5s after 10s", (K.SLOW, "engine-0", "after 10", 0.125, 5.0)),
        ("blackhole any engine at step 1", (K.BLACKHOLE, "any engine", Moment(When.STEP, 1))),
        (
            "blackhole rollout for 0.5 s at phase seal",
            (K.BLACKHOLE, "rollout", Moment(When.PHASE, phase="seal"), 0.0, 0.5),
        ),
        (
            "kill any trainer at phase reduce of trainer-0",
            (K.KILL, "any trainer", Moment(When.PHASE, phase="reduce", of="trainer-0")),
        ),
        (
            "kill trainer-1 at step 3 plus 0.4 s",
            (K.KILL, "trainer-1", Moment(When.STEP, 3, plus_s=0.4)),
        ),
        (
            "kill trainer-1 at phase reduce plus 1s",
            (K.KILL, "trainer-1", Moment(When.PHASE, phase="reduce", plus_s=1.0)),
        ),
        (
            "kill serving at phase reduce of trainer-0 plus 2 s",
            (K.KILL, "serving", Moment(When.PHASE, phase="reduce", of="trainer-0", plus_s=2.0)),
        ),
        (
            "fail trainer-1 all-reduce at step 3",
            (K.FAIL, "trainer-1", Moment(When.STEP, 3)),
        ),
        (
            "fail any trainer all-reduce for 2 s at step 3",
            (K.FAIL, "any trainer", Moment(When.STEP, 3), 0.0, 2.0),
        ),
        (
            "fill disk of rollout for 5 s at step 3",
            (K.FILL, "rollout", Moment(When.STEP, 3), 0.0, 5.0),
        ),
        (
            "stop any standby at step 3",
            (K.STOP, "any standby", Moment(When.STEP, 3)),
        ),
        (
            "blackhole standby-1 for 5 s at step 3",
            (K.BLACKHOLE, "standby-1", Moment(When.STEP, 3), 0.0, 5.0),
        ),
        ("kill relay-1 at step 3", (K.KILL, "relay-1", Moment(When.STEP, 3))),
        (
            "stop any relay for 2 s at step 3",
            (K.STOP, "any relay", Moment(When.STEP, 3), 0.0, 2.0),
        ),
        (
            "kill source of trainer-1 at step 3",
            (K.KILL, "source of trainer-1", Moment(When.STEP, 3)),
        ),
        (
            "stop source of trainer-0.1 for 2 s at phase publish",
            (K.STOP, "source of trainer-0.1", Moment(When.PHASE, phase="publish"), 0.0, 2.0),
        ),
        (
            "kill source of any trainer at step 3",
            (K.KILL, "source of any trainer", Moment(When.STEP, 3)),
        ),
        (
            "kill trainer-1 after 12.5 s of training",
            (K.KILL, "trainer-1", Moment(When.TRAINING, after_s=12.5)),
        ),
    ],
)
def test_lines_are_understood(line: str, fault: tuple[Any, ...]) -> None:
    kind, target, moment, *rest = fault
    if isinstance(moment, str):
        moment = Moment(When.AFTER, after_s=float(moment.split()[1]))
    assert parse(line) == Fault(line, kind, target, moment, *rest)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "",
            f"the line ends where a kind of fault ({KINDS}) should follow",
        ),
        (
            "kil engine-1 at step 2",
            f"'kil' is not a kind of fault ({KINDS}); did you mean 'kill'?",
        ),
        ("kill enigne-1 at step 2", "unknown target 'enigne-1'; did you mean 'engine-0'?"),
        ("kill trainer-1.server at step 2", "only engines have parts"),
        ("kill engine-1.gpu at step 2", "'engine-1.gpu' names none of"),
        ("kill any at step 2", "unknown target 'any at'"),
        ("kill engine-1", "the line ends where a moment (at, after) should follow"),
        ("kill engine-1 at step two", "step is followed by a number from 1, found 'two'"),
        ("kill engine-1 at step 0", "step is followed by a number from 1, found '0'"),
        ("kill engine-1 for 3 s at step 2", "kill has no duration"),
        ("kill engine-1 at step 2 now", "nothing may follow the moment, found 'now'"),
        ("stop serving for 3 at step 2", "expected 's', found 'at'"),
        ("stop serving for 0 s at step 2", "a time is above 0 s"),
        ("slow engine-0 for 5 s at step 2", "expected the share of time that it is stopped"),
        ("slow engine-0 100 % for 5 s at step 2", "a share is above 0 % and below 100 %"),
        ("slow engine-0 50 % at step 2", "slow needs a duration, like: for 5 s"),
        ("blackhole trainer-0 at step 2", "no client finds 'trainer-0' anew"),
        ("fail engine-1 all-reduce at step 2", "'engine-1' takes part in no sum over the groups"),
        ("fail trainer-1 at step 2", "expected 'all-reduce', found 'at'"),
        ("fail trainer-1 all-gather at step 2", "expected 'all-reduce', found 'all-gather'"),
        ("fill rollout for 5 s at step 2", "expected 'disk', found 'rollout'"),
        ("fill disk of rollout at step 2", "fill needs a duration, like: for 5 s"),
        ("kill standby-0.server at step 2", "only engines have parts"),
        ("kill relay-0.server at step 2", "only engines have parts"),
        ("blackhole relay-0 at step 2", "no client finds 'relay-0' anew"),
        ("kill source at step 2", "expected 'of', found 'at'"),
        ("kill source of engine-0 at step 2", "trainers have sources, like trainer-1"),
        ("kill source of any engine at step 2", "expected 'trainer', found 'engine'"),
        ("blackhole source of trainer-0 at step 2", "a source can be killed, stopped and slowed"),
        ("kill engine-1 before step 2", "'before' is not a moment (at, after)"),
        ("kill engine-1 at step 2 plus 1", "the line ends where 's' should follow"),
        ("kill engine-1 at step 2 plus 0 s", "a time is above 0 s"),
        ("kill engine-1 after 2 s plus 1 s", "nothing may follow the moment, found 'plus'"),
        ("kill engine-1 after 2 s of trainin", "expected 'training', found 'trainin'"),
    ],
)
def test_a_bad_line_says_what_and_how_to_mend_it(line: str, message: str) -> None:
    with pytest.raises(FaultInvalid) as invalid:
        parse(line)
    assert message in str(invalid.value)
    assert "a line reads like 'kill engine-1 at step 2' (docs/faults.md)" in str(invalid.value)


@pytest.mark.parametrize(
    "line",
    [
        "kill any trainer",
        "stop serving for 3 s",
        "slow engine-0.scheduler 12.5 % for 5 s",
        "blackhole rollout",
        "fail trainer-1 all-reduce",
        "fail trainer-1 all-reduce for 0.5 s",
        "fill disk of rollout for 5 s",
        "kill source of any trainer",
        "stop relay-0 for 2 s",
    ],
)
def test_a_deed_has_no_moment(line: str) -> None:
    found = parse_deed(line)
    assert found.moment == NOW and found.deed() == line
    assert parse_command(line) == found
    whole = parse_command(f"{line} at step 2")
    assert whole == parse(f"{line} at step 2") and whole.deed() == line
    assert parse_deed(found.deed(found.target.replace("any trainer", "trainer-7"))).moment == NOW
    with pytest.raises(FaultInvalid, match="no moment belongs here, found 'at step 2'"):
        parse_deed(f"{line} at step 2")
    with pytest.raises(FaultInvalid, match="a line reads like 'kill engine-1' "):
        parse_command(f"{line} at step two")


# In a job ---------------------------------------------------------------------------------------


def faults_of(tmp_path: Path, *lines: str, text: str = "", enable: bool = True) -> Any:
    listed = ", ".join(f'"{line}"' for line in lines)
    section = f"[chaos]\nenable = {str(enable).lower()}\nfaults = [{listed}]\n"
    return job(tmp_path, GOOD + text + section)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "kill engine-2 at step 1",
            "there is no engine-2 in this job, which has 2 (from engine-0)",
        ),
        ("stop trainer-2 at step 1", "there is no trainer-2 in this job, which has 2"),
        ("kill serving at step 101", "training.steps = 100, so step 101 never comes"),
        ("kill standby-0 at step 1", 'no standby trainer (recovery.standby = "none")'),
        ("kill gateway at step 1", 'this job has no gateway (rollout.router = "own")'),
        ("stop inspector at step 1", "this job has no inspector"),
        ("kill relay-1 at step 1", "there is no relay-1 in this job, which has 1 (from relay-0)"),
        ("kill source of trainer-2 at step 1", "there is no trainer-2 in this job, which has 2"),
        ("kill source of trainer-0.1 at step 1", "so there is no source of trainer-0.1"),
    ],
)
def test_faults_that_a_job_cannot_suffer(tmp_path: Path, line: str, message: str) -> None:
    [problem] = job_plan.problems(faults_of(tmp_path, "kill engine-1 at step 1", line))
    assert problem.startswith(f"chaos.faults[1] = {line!r} (")
    assert "job.toml:" in problem
    assert message in problem


@pytest.mark.parametrize("whom", ["relay-0", "any relay", "source of trainer-0"])
def test_a_job_whose_weights_go_over_the_disk_has_no_holders(tmp_path: Path, whom: str) -> None:
    text = 'weight_transport = "disk"\n'
    [problem] = job_plan.problems(faults_of(tmp_path, f"kill {whom} at step 1", text=text))
    assert '(rollout.weight_transport = "disk")' in problem


@pytest.mark.parametrize(
    ("mode", "line"),
    [
        ('debug_mode = "train_only"', "kill engine-0 at step 1"),
        ('load_debug_rollout_data = "{rollout_id}.npz"', "stop serving at step 1"),
        ('debug_mode = "rollout_only"', "kill any trainer at rollout 1"),
        ('debug_mode = "rollout_only"', "kill source of any trainer at rollout 1"),
        ('debug_mode = "train_only"', "stop relay-0 at step 1"),
    ],
)
def test_a_debug_mode_has_fewer_victims(tmp_path: Path, mode: str, line: str) -> None:
    [problem] = job_plan.problems(faults_of(tmp_path, line, text=mode + "\n"))
    assert " runs no " in problem


def test_a_black_hole_puts_engines_behind_proxies(tmp_path: Path) -> None:
    plain = faults_of(tmp_path, "kill engine-0 at step 1")
    assert made_ready(plain) is plain
    folder = tmp_path / "run"
    found = made_ready(
        resolve(
            [
                *("--job.config_file", str(tmp_path / "job.toml")),
                *("--job.dump_folder", str(folder), "--chaos.enable"),
                *("--chaos.faults", '["blackhole engine-0 at step 1"]'),
            ]
        )
    )
    python = found.sections.rollout.engine_python
    assert Path(python).parent.parent == folder
    assert os.access(python, os.X_OK)
    assert found.origins["rollout.engine_python"].startswith("chaos: ")
    assert made_ready(found) is found  # started again from the run folder
    found.write()
    again = Resolved.read(folder).with_overrides([])  # as the roles take it
    assert again.sections.rollout.engine_python == python


def test_enable_and_faults_go_together(tmp_path: Path) -> None:
    report = checks.check(faults_of(tmp_path))
    assert [p for p in report.problems if "there is nothing to inject" in p]
    report = checks.check(faults_of(tmp_path, "kill engine-1 at step 1", enable=False))
    assert report.problems == []
    assert [w for w in report.warnings if "the faults are not injected" in w]


def of_section(tmp_path: Path, *lines: str) -> Any:
    return job(tmp_path, GOOD + "\n".join(["[chaos]", "enable = true", *lines, ""]))


def test_faults_to_be_drawn(tmp_path: Path) -> None:
    good = of_section(tmp_path, "mtbf_s = 60.0", 'mtbf_faults = ["kill any trainer"]')
    assert checks.check(good).problems == [] and job_plan.problems(good) == []
    for wrong, message in (
        (["mtbf_s = 60.0"], "there is nothing to draw from: chaos.mtbf_s = 60.0 ("),
        (["mtbf_s = -1.0", 'mtbf_faults = ["kill serving"]'], "chaos.mtbf_s must not be negative"),
        (['mtbf_faults = ["kill serving"]'], "there is nothing to inject"),
    ):
        problems = checks.check(of_section(tmp_path, *wrong)).problems
        assert [p for p in problems if message in p], problems
    faults = ["kill serving at step 1", "kill engine-9", "kill any standby", "kill serving"]
    listed = ", ".join(f'"{f}"' for f in faults)
    problems = job_plan.problems(of_section(tmp_path, "mtbf_s = 60.0", f"mtbf_faults = [{listed}]"))
    assert [p.split(" ")[0] for p in problems] == [f"chaos.mtbf_faults[{i}]" for i in range(3)]
    assert "no moment belongs here" in problems[0]
    assert "there is no engine-9" in problems[1] and "no standby trainer" in problems[2]


@pytest.mark.parametrize("key", ["faults", "mtbf_faults"])
def test_a_failing_sum_starts_roles_with_the_wrapper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    made_ready(faults_of(tmp_path, "kill any trainer at step 1"))
    assert os.environ["PYTHONPATH"] == "elsewhere"
    moment = " at step 1" if key == "faults" else ""
    lines = ("mtbf_s = 60.0", f'{key} = ["fail any trainer all-reduce{moment}"]')
    made_ready(of_section(tmp_path, *lines))
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [str(failing_reduce.SITE), "elsewhere"]


@pytest.mark.parametrize("command", [["check", "--quick"], ["run"]])
def test_the_command_names_every_bad_line_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    faults_of(tmp_path, "kil engine-1 at step 2", "kill engine-7 at step 2")
    folder = tmp_path / "run"
    argv = [*command, str(tmp_path / "job.toml"), "--job.dump_folder", str(folder)]
    assert cli.main(argv) == ExitCode.CONFIG
    errors = [x for x in capsys.readouterr().err.splitlines() if "error:" in x]
    assert len(errors) == 2
    assert "chaos.faults[0]" in errors[0] and "chaos.faults[1]" in errors[1]
    assert not folder.exists()


# When -------------------------------------------------------------------------------------------


def schedule(*lines: str) -> Schedule:
    return Schedule(keyed([parse(line) for line in lines]), 0.0)


def event(kind: str, mono_s: float, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "mono_s": mono_s, **fields}


def due(found: Schedule, now_mono_s: float = 1e9) -> list[tuple[str, float]]:
    return [(d.fault.line, d.planned_mono_s) for d in found.due(now_mono_s)]


def test_after_the_commit_of_a_step() -> None:
    line = "kill engine-1 at step 2"
    found = schedule(line)
    found.see(event("commit", 1.0, step=1))
    assert due(found) == []
    found.see(event("commit", 2.0, step=2))
    found.see(event("commit", 3.0, step=3))
    assert due(found) == [(line, 2.0)]


def test_while_a_batch_is_rolled_out() -> None:
    first, second = "kill engine-1 at rollout 1", "kill engine-1 at rollout 2"
    found = schedule(first, second)
    found.see(event("issue", 1.0))
    found.see(event("accept", 2.0))
    found.see(event("seal", 3.0, step=1))
    assert due(found) == [(first, 1.0)]
    found.see(event("accept", 4.0))
    assert due(found) == [(first, 1.0), (second, 4.0)]


def test_at_a_phase_of_anybody_or_somebody() -> None:
    lines = [
        "kill serving at phase reduce",
        "kill serving at phase reduce of trainer-1",
        "kill serving at phase installing of engine-1",
        "kill serving at phase publish",
    ]
    found = schedule(*lines)
    found.see(event("phase", 1.0, phase="reduce", name="trainer-0"))
    found.see(event("transition", 2.0, name="serving", data={"subject": "engine-0", "new": "x"}))
    assert due(found) == [(lines[0], 1.0)]
    found.see(event("phase", 3.0, phase="reduce", name="trainer-1"))
    moved = {"subject": "engine-1", "new": "installing"}
    found.see(event("transition", 4.0, name="serving", data=moved))
    found.see(event("publish", 5.0, name="serving"))
    assert due(found) == list(zip(lines, [1.0, 3.0, 4.0, 5.0], strict=True))


def test_only_the_present_life_counts() -> None:
    lines = ["kill engine-1 at step 2", "kill engine-0 after 5 s"]
    found = schedule(*lines)
    found.see(event("run", 100.0, phase="start"))
    found.see(event("commit", 101.0, step=2))
    assert due(found, 104.9) == [(lines[0], 101.0)]
    assert due(found, 105.0) == [(lines[0], 101.0), (lines[1], 105.0)]
    found.see(event("run", 200.0, phase="resume"))
    assert due(found, 204.0) == []
    found.see(event("commit", 201.0, step=3))
    assert due(found, 205.0) == [(lines[0], 201.0), (lines[1], 205.0)]


def test_a_time_after_a_moment() -> None:
    lines = ["kill engine-1 at step 2 plus 0.4 s", "kill engine-0 at phase reduce plus 2 s"]
    found = schedule(*lines)
    found.see(event("phase", 1.0, phase="reduce"))
    found.see(event("commit", 2.0, step=2))
    assert due(found, 2.3) == []
    assert due(found, 2.5) == [(lines[0], 2.4)]
    assert due(found, 3.0) == [(lines[0], 2.4), (lines[1], 3.0)]


def test_the_time_of_training_goes_on_over_lives() -> None:
    line = "kill engine-1 after 5 s of training"
    found = schedule(line)
    found.see(event("run", 100.0, phase="start"))
    assert due(found) == []
    found.see(event("commit", 110.0, step=1))
    assert due(found, 114.9) == []
    assert due(found, 115.1) == [(line, 115.0)]
    found.see(event("commit", 112.0, step=2))  # and the job dies
    found.see(event("run", 3.0, phase="resume"))  # of another boot of the machine
    assert due(found, 5.9) == []
    assert due(found, 6.1) == [(line, 6.0)]
    found.see(event("run", 50.0, phase="start"))
    assert due(found) == []


def test_a_fault_does_not_set_off_another_by_itself() -> None:
    found = schedule("kill engine-1 at phase inject")
    found.see(event("chaos", 1.0, phase="inject"))
    assert due(found) == []


def test_equal_lines_are_two_faults() -> None:
    lines = ["kill engine-1 at step 2", "kill  engine-1 at step 2", "kill engine-1 at step 3"]
    keys = [p.key for p in keyed([parse(line) for line in lines])]
    assert keys == [
        "kill engine-1 at step 2 #1",
        "kill engine-1 at step 2 #2",
        "kill engine-1 at step 3 #1",
    ]
