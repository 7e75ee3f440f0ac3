"""Faults drawn at random, and faults of one run that come again in another."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from config_jobs import GOOD, job

from torchtitan_rl_ft import cli
from torchtitan_rl_ft.chaos import job_plan
from torchtitan_rl_ft.chaos.draws import drawn
from torchtitan_rl_ft.chaos.job_plan import JobPlan
from torchtitan_rl_ft.chaos.plan import parse_deed
from torchtitan_rl_ft.chaos.schedule import Planned, Schedule, keyed
from torchtitan_rl_ft.chaos.trace import Recorded, load, record
from torchtitan_rl_ft.config.sections import ChaosSection
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.observability.jsonl import read_jsonl

DEEDS = [parse_deed("kill any trainer"), parse_deed("stop rollout for 3 s")]


def draw(n: int, mtbf_s: float = 60.0, seed: int = 0) -> list[Planned]:
    return list(itertools.islice(drawn(DEEDS, mtbf_s, seed), n))


def test_draws_are_exponential_and_alike_for_equal_seeds() -> None:
    found = draw(4000)
    assert found == draw(4000) != draw(4000, seed=1)
    times = [p.fault.moment.after_s for p in found]
    assert times == sorted(times) and len({p.key for p in found}) == 4000
    gaps = sorted(b - a for a, b in itertools.pairwise([0.0, *times]))
    assert sum(gaps) / 4000 == pytest.approx(60, rel=0.05)
    assert gaps[2000] == pytest.approx(60 * 0.6931, rel=0.08)  # the median of an exponential
    share = sum(p.fault.target == "any trainer" for p in found) / 4000
    assert share == pytest.approx(0.5, abs=0.04)
    # Twice as often: the same faults in half the time.
    half = draw(4000, 30.0)
    assert [p.fault.deed() for p in half] == [p.fault.deed() for p in found]
    assert half[-1].fault.moment.after_s == pytest.approx(times[-1] / 2, rel=1e-4)


def event(kind: str, mono_s: float, **fields: Any) -> dict[str, Any]:
    told_by = {"run": "run", "role": "rollout", "name": "rollout", "attempt": 1, "pid": 1}
    return {"wall_s": mono_s, "mono_s": mono_s, **told_by, "kind": kind, **fields}


def test_drawn_faults_come_by_the_clock_of_training() -> None:
    [first, second] = draw(2)
    found = Schedule(keyed([]), 0.0, drawn(DEEDS, 60.0, 0))
    found.see(event("run", 100.0, phase="start"))
    assert found.due(1e6) == []
    found.see(event("commit", 150.0, step=1))
    at_s = [150.0 + p.fault.moment.after_s for p in (first, second)]
    assert found.due(at_s[0] - 0.01) == []
    assert [d.key for d in found.due(at_s[0] + 0.01)] == [first.key]
    # A job that was away goes on with the rest.
    found.see(event("exit", at_s[0] + 0.01))
    found.see(event("run", at_s[0] + 500.01, phase="resume"))
    assert [d.key for d in found.due(at_s[0] + 500.1)] == [first.key]
    assert [d.key for d in found.due(at_s[1] + 500.1)] == [first.key, second.key]


def injected(mono_s: float, line: str, subject: str) -> dict[str, Any]:
    return event("chaos", mono_s, phase="inject", cause=line, data={"subject": subject})


RUN = [
    event("run", 1.0, phase="start"),
    injected(2.0, "kill engine-0", "engine-0"),
    event("run", 10.0, phase="start"),
    injected(13.5, "kill serving after 3 s", "serving"),
    event("commit", 20.0, step=1),
    event("commit", 21.0, step=2),
    injected(21.4, "kill any trainer at step 2 plus 0.4 s", "trainer-1"),
    event("chaos", 22.0, phase="lift", cause="x", data={"subject": "trainer-1"}),
    event("run", 23.0, phase="end"),
    event("run", 50.0, phase="resume"),
    injected(52.0, "slow rollout 50 % for 2 s", "rollout"),
    event("commit", 53.0, step=3),
    injected(53.0, "fail trainer-0 all-reduce at step 3", "trainer-0"),
]
FAULTS = [
    Recorded("kill serving", None, 3.5, 0, 3.5),
    Recorded("kill trainer-1", 1.4, 11.4, 2, 0.4),
    Recorded("slow rollout 50 % for 2 s", 5.0, 2.0, 2, 2.0),
    Recorded("fail trainer-0 all-reduce", 6.0, 3.0, 3, 0.001),
]


def test_a_run_tells_what_hit_it_and_when() -> None:
    assert record(RUN) == FAULTS
    assert [f.fault("time").line for f in FAULTS] == [
        "kill serving after 3.500 s",
        "kill trainer-1 after 1.400 s of training",
        "slow rollout 50 % for 2 s after 5.000 s of training",
        "fail trainer-0 all-reduce after 6.000 s of training",
    ]
    assert [f.fault("step").line for f in FAULTS] == [
        "kill serving after 3.500 s",
        "kill trainer-1 at step 2 plus 0.400 s",
        "slow rollout 50 % for 2 s at step 2 plus 2.000 s",
        "fail trainer-0 all-reduce at step 3 plus 0.001 s",
    ]


def events_file(folder: Path, torn: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "events.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in RUN) + torn)
    return path


def test_a_trace_is_recorded_and_replayed(tmp_path: Path, capsys: Any) -> None:
    path = events_file(tmp_path / "former", torn='{"wall_s": 1, "mo')
    trace = tmp_path / "trace.json"
    for source in (path, path.parent):
        assert cli.main(["chaos", "--record", str(source), str(trace)]) == ExitCode.DONE
        assert capsys.readouterr().out == f"4 faults of {path} are in {trace}\n"
        assert load(trace) == load(path) == FAULTS
    for file, by in itertools.product((trace, path), ("time", "step")):
        plan = JobPlan.of(ChaosSection(replay=str(file), replay_by=by))
        assert plan.faults == [f.fault(by) for f in FAULTS]
        assert plan.failing_sums() and not plan.engines_behind_proxy()


def test_a_replayed_run_is_recorded_alike() -> None:
    """Injected as late as 30 ms, at the times of another job."""
    again = Schedule(keyed([f.fault("step") for f in FAULTS]), 0.0)
    lines, struck, now = [], set(), 100.0
    script = [
        event("run", 100.0, phase="start"),
        event("commit", 120.0, step=1),
        event("commit", 123.0, step=2),
        event("commit", 130.0, step=3),
    ]
    while now < 135.0:
        while script and script[0]["mono_s"] <= now:
            lines.append(script.pop(0))
            again.see(lines[-1])
        for due in again.due(now):
            if due.key not in struck:
                struck.add(due.key)
                lines.append(injected(now, due.fault.line, due.fault.target))
        now += 0.03
    found = record(lines)
    assert [f.deed for f in found] == [f.deed for f in FAULTS]
    assert [f.step for f in found] == [f.step for f in FAULTS]
    for one, other in zip(found, FAULTS, strict=True):
        assert one.step_s == pytest.approx(other.step_s, abs=0.04)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: [Errno 2]"),
        ("", "holds no injected fault"),
        ('{"kind": "commit", "mono_s": 1, "step": 1}\n', "holds no injected fault"),
        ('{"format": "x", "faults": []}', "its format is 'x', known is"),
        ('{"format": "torchtitan_rl_ft fault trace 1", "faults": [{"deed": "kill x"}]}', "missing"),
        (
            '{"format": "torchtitan_rl_ft fault trace 1", "faults": [{"deed": "kill trainer-1", '
            '"after_s": -1, "start_s": 1, "step": 1, "step_s": 1}]}',
            "expected a number of seconds",
        ),
    ],
)
def test_a_file_that_is_no_trace(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "trace.json"
    if text is not None:
        file.write_text(text)
    [problem] = job_plan.problems(job(tmp_path, GOOD + f'[chaos]\nreplay = "{file}"\n'))
    assert problem.startswith(f"chaos.replay = '{file}' (")
    assert message in problem


def test_a_trace_of_a_larger_job(tmp_path: Path) -> None:
    lines = [event("run", 1.0, phase="start"), injected(2.0, "kill any trainer", "trainer-6")]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = job(tmp_path, GOOD + f'[chaos]\nreplay = "{tmp_path / "events.jsonl"}"\n')
    [problem] = job_plan.problems(found)
    assert "'kill trainer-6 after 1.000 s': there is no trainer-6 in this job" in problem


def test_a_run_does_not_repeat_itself(tmp_path: Path) -> None:
    found = job(tmp_path, GOOD + '[chaos]\nreplay = "PLACE"\n')
    own = found.run_folder.path / "events.jsonl"
    found = job(tmp_path, GOOD + f'[chaos]\nreplay = "{own}"\n')
    [problem] = job_plan.problems(found)
    assert "a run cannot repeat its own faults" in problem


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "nothing was injected into the run"),
        ([injected(1.0, "melt trainer-1 at step 2", "trainer-1")], "does not know: 'melt' is not"),
    ],
)
def test_nothing_to_record(tmp_path: Path, capsys: Any, lines: list[Any], message: str) -> None:
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = tmp_path / "trace.json"
    assert cli.main(["chaos", "--record", str(tmp_path), str(trace)]) == ExitCode.CONFIG
    assert message in capsys.readouterr().err
    assert not trace.exists() and read_jsonl(tmp_path / "events.jsonl") == lines
    assert cli.main(["chaos", "--record", str(tmp_path / "no"), str(trace)]) == ExitCode.CONFIG
