"""Lines that nobody should have written into events.jsonl or metrics.jsonl: counted, and skipped by
all who read, who go on with what follows."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from fakes.told_run import STEPS, ToldRun

from torchtitan_rl_ft.chaos import trace as fault_trace
from torchtitan_rl_ft.chaos.plan import parse
from torchtitan_rl_ft.chaos.schedule import Schedule, keyed
from torchtitan_rl_ft.observability import prometheus
from torchtitan_rl_ft.observability.ettr import measure
from torchtitan_rl_ft.observability.events import Kind, first_line, read_event, read_events
from torchtitan_rl_ft.observability.health import HealthLimits, health
from torchtitan_rl_ft.observability.json_text import parse as parse_json
from torchtitan_rl_ft.observability.json_text import text_of
from torchtitan_rl_ft.observability.jsonl import JsonlTail
from torchtitan_rl_ft.observability.live_ettr import LiveEttr, measured_json
from torchtitan_rl_ft.observability.metric_rows import read_metrics
from torchtitan_rl_ft.observability.notices import Notices
from torchtitan_rl_ft.observability.outages import outages
from torchtitan_rl_ft.observability.recovery_spans import RecoverySpans
from torchtitan_rl_ft.observability.run_follower import RunFollower
from torchtitan_rl_ft.observability.run_state import RunState
from torchtitan_rl_ft.observability.status_text import run_rows
from torchtitan_rl_ft.observability.summary import render, summarise
from torchtitan_rl_ft.observability.trace import write_trace
from torchtitan_rl_ft.run_folder import RunFolder


def event(**other: Any) -> str:
    fields = {"wall_s": 1.0, "mono_s": 2.0, "run": "r", "role": "trainer", "name": "trainer-0"}
    return json.dumps({**fields, "attempt": 1, "pid": 5, "kind": "phase", "phase": "x", **other})


ODD = {
    "deep": "[" * 100_000,
    "deep data": event()[:-1] + ', "data": ' + '{"a":' * 50_000 + "1" + "}" * 50_001,
    "endless clock": event(mono_s=float("inf")),
    "clock of another sort": event(mono_s=[1.0]),
    "clock too large": event(mono_s=10**400),
    "wall clock too large": event(wall_s=10**400),
    "step too large": event(step=10**400),
    "too many digits": event(step=0).replace('"step": 0', '"step": 1' + "0" * 5000),
    "no name": event(name=None),
    "no role": event(role=3),
    "no object": "[1, 2]",
    "no kind": event(kind="unheard of"),
    "data of another sort": event(data=[1]),
    "NUL": "\0" * 5000,
}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = ToldRun(RunFolder(tmp_path / "run-1"))
    run.write()
    whole = run.folder.events.read_text().splitlines()
    middle = len(whole) // 2
    lines = [*whole[:middle], *ODD.values(), *whole[middle:]]
    run.folder.events.write_text("\n".join(lines) + "\n")
    with open(run.folder.metrics, "a") as f:
        f.write('{"step": NaN}\n[3]\n{"step": 1' + "0" * 400 + "}\n" + "[" * 100_000 + "\n")
        f.write(f'{{"step": {STEPS}, "loss": Infinity, "reward/mean": 1{"0" * 400}, "x": [1]}}\n')
    return run.folder


def events_of(folder: RunFolder) -> list[Any]:
    return list(read_events(folder.events))


def test_each_is_counted_and_all_others_are_read(folder: RunFolder) -> None:
    unread: list[bytes] = []
    found = list(read_events(folder.events, unread.append))
    assert len(unread) == len(ODD)
    follower = RunFollower(folder, RunState(2 * STEPS, 2, 2))
    told: list[Any] = []
    follower.listen(told.append, lambda row: None)
    follower.poll()
    assert follower.unreadable == len(ODD) and len(told) == len(found)
    assert follower.state.step == STEPS
    assert follower.state.metrics["step"] == STEPS and follower.state.metrics["loss"] is None
    assert text_of(follower.state.to_json(1e5)) and text_of(follower.state.events_after(0))
    assert [text for line in told for text in Notices().of(line)]


def test_live_ettr_is_that_of_the_others(folder: RunFolder) -> None:
    whole = measure(events_of(folder))
    live = LiveEttr(folder.events, window_s=30.0, every_s=2.0)
    measured = live.measure_all()
    assert whole is not None and measured.ettr is not None and measured.problem is None
    assert measured.ettr.strict.ratio == pytest.approx(whole.strict.ratio)
    json.loads(text_of(measured_json(measured)))
    follower = RunFollower(folder, RunState(2 * STEPS, 2, 2))
    follower.poll()
    state = follower.state
    limits = HealthLimits(1.0, 1.0)
    collector = prometheus.RunCollector(
        state, lambda: measured, lambda: health(state, 1.0, limits), lambda: 1.0, "run-1"
    )
    assert b"rl_ft_ettr_strict" in prometheus.exposition(collector)
    assert run_rows(state, measured, 1.0)


def test_summary_and_trace_are_those_of_the_others(folder: RunFolder, tmp_path: Path) -> None:
    rows = list(read_metrics(folder.metrics))
    found = summarise(
        events_of(folder), rows, outcome="x", total_steps=STEPS, transport="disk", unread=range(14)
    )
    assert found.steps == STEPS and "14 lines" in found.notes[0]
    assert render(found, "run-1")
    path = tmp_path / "trace.json.gz"
    write_trace(path, events_of(folder), rows, {"run": "run-1"})
    json.loads(gzip.decompress(path.read_bytes()))
    assert {o.role for o in outages(events_of(folder))} == {"engine", "trainer"}


def test_faults_are_injected_and_recorded_all_the_same(folder: RunFolder) -> None:
    schedule = Schedule(keyed([parse("kill engine-1 at step 2")]), 0.0)
    lines = JsonlTail(folder.events, parse=read_event).read()
    for line in lines:
        schedule.see(line)
    assert len(schedule.due(1e9)) == 1
    assert fault_trace.record(lines) == []


def test_spans_of_recoveries_go_on(folder: RunFolder) -> None:
    text = folder.events.read_text()
    folder.events.write_text("")
    spans = RecoverySpans(folder.events, "run-1")
    folder.events.write_text(text)
    assert {span.name for span in [*spans.read(), *spans.read()]} >= {"recovery"}


def test_a_name_that_is_no_utf_8_is_shown(tmp_path: Path) -> None:
    run = ToldRun(RunFolder(tmp_path / "run-1"))
    run.write()
    run.tell("rollout", Kind.WARN, cause="no such file: /data/\udcff.txt \U0001f600")
    (found,) = [e for e in events_of(run.folder) if e.kind is Kind.WARN]
    assert found.cause == "no such file: /data/?.txt \U0001f600"
    found.cause.encode()


def test_metrics_that_were_removed_are_followed_anew(tmp_path: Path) -> None:
    run = ToldRun(RunFolder(tmp_path / "run-1"))
    run.write()
    follower = RunFollower(run.folder, RunState(2 * STEPS, 2, 2))
    follower.poll()
    run.folder.metrics.unlink()
    run.metrics(STEPS + 1, **{"reward/mean": 0.25})
    follower.poll()
    assert follower.state.metrics["step"] == STEPS + 1
    assert follower.state.curves["reward"].values[-1] == 0.25


def test_a_cause_steers_no_terminal() -> None:
    cause = "  bad\x1b]0;owned\x07 \t reward\x9b2J \x00\nand more"
    assert first_line(cause) == "bad?]0;owned? reward?2J ?"
    assert first_line("grün ✓ 数") == "grün ✓ 数" and first_line(None) == ""


def test_text_has_no_number_without_end() -> None:
    assert text_of({"a": [float("nan"), (float("inf"), 1.5)]}) == '{"a": [null, [null, 1.5]]}'
    assert parse_json(b'{"a": NaN, "b": -Infinity}') == {"a": None, "b": None}
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(b"[" * 100_000)
