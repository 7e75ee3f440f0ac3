"""The trace of a run: valid by the format whatever the events are like, and true to them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.trace_events import Invalid, check, load
from torchtitan_rl_ft.cli import main
from torchtitan_rl_ft.observability import sample_trace
from torchtitan_rl_ft.observability.events import Event, Kind, read_events
from torchtitan_rl_ft.observability.outages import outages
from torchtitan_rl_ft.observability.trace import TraceReport, write_trace

WALL_S = 1.7e9


class History:
    """Lines of events.jsonl, made by hand."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.mono_s, self.wall_s = 100.0, WALL_S

    def later(self, seconds: float) -> History:
        self.mono_s += seconds
        self.wall_s += seconds
        return self

    def tell(self, name: str, kind: Kind, pid: int = 1, **fields: Any) -> History:
        known = {k: fields.pop(k) for k in ("phase", "cause", "step", "version") if k in fields}
        if "subject" in fields:
            fields["pid"] = pid
        self.events.append(
            Event(
                wall_s=self.wall_s,
                mono_s=self.mono_s,
                run="r",
                role=name.split("-")[0],
                name=name,
                attempt=1,
                pid=pid,
                kind=kind,
                data=fields,
                **known,
            )
        )
        return self.later(0.001)

    def start(self, phase: str = "start") -> History:
        self.tell("supervisor", Kind.RUN, phase=phase)
        self.tell("supervisor", Kind.SPAWN, subject="rollout", pid=1)
        return self.tell("supervisor", Kind.SPAWN, subject="trainer-0", pid=20)

    def step(self, step: int, batch: int, groups: list[int], **trace: Any) -> History:
        for g in groups:
            self.later(0.1)
            told = traced(self.mono_s, **trace) if trace else None
            self.tell("rollout", Kind.ACCEPT, version=step, group=g, trace=told)
        self.tell("rollout", Kind.SEAL, step=step, batch=batch, groups=groups)
        for phase in ("quorum", "forward_backward", "report"):
            self.tell("trainer-0", Kind.PHASE, pid=20, phase=phase, step=step)
        return self.later(0.2).tell("rollout", Kind.COMMIT, step=step, batch=batch)

    def write(self, path: Path, metrics: Iterable[dict[str, Any]] = ()) -> TraceReport:
        return write_trace(path, self.events, metrics, {"run": "r"})


def traced(end_s: float, samples: int = 2, **over: Any) -> dict[str, Any]:
    legs = [
        [["engine-0", 0.5, 20.0, 40.0, 12, 5.0], ["engine-1", 45.0, None, 60.0, 4, None]]
        for _ in range(samples)
    ]
    return {
        "started_s": end_s - 0.09,
        "at_ms": [1.0, 70.0, 85.0],
        "failed": 0,
        "rewards": [0.5] * samples,
        "legs": legs,
        **over,
    }


def named(path: Path, phase: str) -> list[str]:
    return [e["name"] for e in load(path)["traceEvents"] if e["ph"] == phase]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


def test_a_sample_is_followed_from_engine_to_engine_into_its_step(path: Path) -> None:
    history = History().start().step(1, 1, [1, 2], samples=2)
    report = history.write(path, [{"step": 1, "batch": 1, "reward/mean": 0.5}])
    assert (report.samples, report.steps) == (4, 1)
    check(path)
    spans = [e for e in load(path)["traceEvents"] if e["ph"] in "be" and e["id"] == "2.1"]
    opened = [e["name"] for e in spans if e["ph"] == "b"]
    assert opened == [
        *("sample", "engine-0", "queue", "prefill", "decode", "moved", "engine-1", "generate"),
        *("reward", "buffer", "sealed", "train"),
    ]
    first = {}
    for e in spans:
        first.setdefault((e["ph"], e["name"]), e["ts"])
    assert first["b", "prefill"] - first["b", "queue"] == 5_000
    assert first["b", "decode"] - first["b", "engine-0"] == 19_500
    assert first["e", "sample"] == first["e", "train"]
    arrows = [e for e in load(path)["traceEvents"] if e["ph"] in "stf"]
    assert [e["ph"] for e in arrows] == ["s", "t", "f"] * 2
    counters = [e for e in load(path)["traceEvents"] if e["ph"] == "C"]
    assert {"reward", "buffer"} <= {e["name"] for e in counters}


def test_lives_and_superseded_steps_are_marked(path: Path) -> None:
    history = History().start().step(1, 1, [1], samples=1).step(2, 2, [2], samples=1)
    history.later(5).start("resume")  # its supervisor was killed
    history.tell("rollout", Kind.SUPERSEDE, pid=9, from_step=2, to_step=1, cause="no holder")
    history.tell("rollout", Kind.COMMIT, pid=9, step=2, batch=2)
    history.tell("supervisor", Kind.RUN, phase="end", cause="complete")
    report = history.write(path)
    check(path)
    assert (report.lives, report.superseded, report.steps) == (2, 1, 3)
    assert {"batch 2 again", "step 2 again"} <= set(named(path, "X"))
    assert "train again" in named(path, "b")
    assert any("trained again" in name for name in named(path, "i"))
    ends = [e["args"] for e in load(path)["traceEvents"] if e["ph"] == "E" and "args" in e]
    assert {"outcome": "its supervisor was killed"} in ends


def test_a_wall_clock_that_is_set_moves_nothing(path: Path) -> None:
    history = History().start().step(1, 1, [1])
    history.wall_s -= 7200
    report = history.step(2, 2, [2]).write(path)
    check(path)
    steps = [e for e in load(path)["traceEvents"] if e["ph"] == "X" and "step" in e["name"]]
    assert report.wall_jumps == 1 and report.clocks == 1
    assert steps[-1]["ts"] + steps[-1]["dur"] < 2e6
    assert any("the wall clock was set by -7200" in name for name in named(path, "i"))


def test_a_monotonic_clock_that_begins_anew_goes_on_by_the_wall_clock(path: Path) -> None:
    history = History().start().step(1, 1, [1])
    history.mono_s, history.wall_s = 3.0, history.wall_s + 600
    report = history.start("resume").step(2, 2, [2]).write(path)
    check(path)
    steps = [e for e in load(path)["traceEvents"] if e["ph"] == "X" and "step" in e["name"]]
    assert report.clocks == 2
    assert steps[-1]["ts"] + steps[-1]["dur"] == pytest.approx(600.6e6, abs=0.2e6)


def test_a_late_line_of_another_process_is_no_new_clock(path: Path) -> None:
    history = History().start().step(1, 1, [1])
    history.later(-20).tell("trainer-0", Kind.PHASE, pid=20, phase="quorum", step=2)
    report = history.later(20).step(2, 2, [2]).write(path)
    check(path)
    assert report.clocks == 1


def test_what_is_not_over_is_ended_and_said(path: Path) -> None:
    history = History().start().step(1, 1, [1], samples=1)
    history.later(0.1)
    history.tell("rollout", Kind.ACCEPT, group=2, trace=traced(history.mono_s, samples=1))
    history.later(0.1)
    history.tell("rollout", Kind.ACCEPT, group=3, trace=traced(history.mono_s, samples=1))
    history.tell("rollout", Kind.DROP, group=3, cause="too old")
    history.write(path)
    check(path)
    events = load(path)["traceEvents"]
    assert {e["id"] for e in events if e["ph"] == "b" and e["name"] == "not trained"} == {"2.0"}
    assert {e["id"] for e in events if e["ph"] == "b" and e["name"] == "dropped"} == {"3.0"}
    assert {"unfinished": True} in [e["args"] for e in events if e["ph"] == "E" and "args" in e]


@pytest.mark.row("K1")
def test_an_outage_is_a_slice_with_its_phases(path: Path) -> None:
    history = History().start().step(1, 1, [1])
    died = {"subject": "trainer-0", "phase": "fault", "cause": "SIGKILL"}
    history.tell("supervisor", Kind.EXIT, pid=20, **died)
    history.later(1).tell("supervisor", Kind.SPAWN, subject="trainer-0", pid=21)
    history.later(2).tell("trainer-0", Kind.PHASE, pid=21, phase="attach", step=2)
    history.later(1).tell("trainer-0", Kind.QUORUM, pid=21, step=2)
    history.later(1).tell("trainer-0", Kind.PHASE, pid=21, phase="report", step=2)
    report = history.write(path)
    check(path)
    [outage] = outages(history.events)
    events = load(path)["traceEvents"]
    [pid] = [e["pid"] for e in events if e.get("args") == {"name": "faults"}]
    slices = [e for e in events if e["pid"] == pid and e["ph"] in "BE"]
    assert report.faults == 1 and slices[0]["name"] == outage.cause
    inside = zip(slices[1:-1:2], slices[2:-1:2], strict=True)
    took_us = {b["name"]: e["ts"] - b["ts"] for b, e in inside}
    phase_us = {p: s * 1e6 for p, s in outage.phase_s.items() if s > 0}
    assert took_us == pytest.approx(phase_us, abs=2)
    whole_us = slices[-1]["ts"] - slices[0]["ts"]
    assert sum(took_us.values()) == whole_us == pytest.approx(outage.total_s * 1e6, abs=2)


@pytest.mark.row("K1")
def test_an_outage_tells_what_the_report_tells(path: Path) -> None:
    """Of what was in flight too, with lines that come late."""
    history = History().start().step(1, 1, [1, 2])
    history.tell("rollout", Kind.SEAL, step=2, batch=2, samples=8, groups=[3, 4])
    history.later(0.1).tell("rollout", Kind.ISSUE, groups=3, first=5, last=7)
    history.tell("rollout", Kind.ACCEPT, group=5)
    history.later(0.5).tell("supervisor", Kind.EXIT, 1, subject="rollout", phase="fault", cause="x")
    history.later(0.5).tell("supervisor", Kind.SPAWN, 9, subject="rollout")
    history.later(-0.6).tell("trainer-0", Kind.PHASE, pid=20, phase="quorum", step=2)
    history.later(0.8).tell("rollout", Kind.ACCEPT, pid=9, group=6)
    history.write(path)
    check(path)
    [outage] = outages(history.events)
    assert outage.samples_replayed == 2 * 4
    [told] = [e for e in load(path)["traceEvents"] if e.get("args", {}).get("role") == "rollout"]
    assert told["args"] == {**outage.to_json(), "over": outage.done_s is not None}


def test_of_steps_that_were_trained_only_the_last_groups_are_remembered(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_trace, "MOST_TRAINED", 4)
    history = History().start()
    for step in range(1, 5):
        history.step(step, step, [2 * step, 2 * step + 1], samples=1)
    history.tell("rollout", Kind.SUPERSEDE, from_step=4, to_step=0)
    for step in range(1, 5):
        history.later(0.1).tell("rollout", Kind.COMMIT, step=step, batch=step)
    history.write(path)
    check(path)
    again = [n for n in named(path, "X") if n.startswith("batch") and n.endswith("again")]
    assert again == ["batch 3 again", "batch 4 again"]


@pytest.mark.parametrize(
    "trace",
    [
        {},
        {"started_s": "x"},
        traced(100.2, at_ms=[5.0, 1.0, 2.0]),
        traced(100.2, at_ms=[1.0]),
        traced(1e9),
        traced(-1e9),
        traced(100.2, legs=[[["engine-0", 50.0, 10.0, 5.0, 1, 99.0]]], rewards=[float("nan")]),
        traced(100.2, legs=[[]], rewards=[]),
        traced(100.2, legs=[[['e"\n', 0, 1, 2, 3, None]]]),
    ],
)
def test_timing_that_cannot_be_is_left_out_or_bounded(path: Path, trace: dict[str, Any]) -> None:
    history = History().start()
    history.later(0.2).tell("rollout", Kind.ACCEPT, group=1, trace=trace)
    history.step(1, 1, [1])
    history.write(path)
    check(path)


def test_events_that_lack_everything_are_no_crash(path: Path) -> None:
    history = History()
    for kind in Kind:
        for name in ("rollout", "engine-0", "trainer-0"):
            history.tell(name, kind)
            history.later(-0.0005).tell(name, kind, pid=7, subject="engine-0", phase="fault")
    history.write(path)
    check(path)


def test_the_command_tells_of_torn_lines(tmp_path: Path, capsys: Any) -> None:
    history = History().start().step(1, 1, [1], samples=3)
    lines = [e.to_line() for e in history.events]
    torn = [*lines[:4], lines[4][:30] + b"\n", b"not json\n", *lines[4:], lines[-1][:-9]]
    (tmp_path / "events.jsonl").write_bytes(b"".join(torn))
    assert main(["report", str(tmp_path), "--trace"]) == 0
    said = capsys.readouterr().out
    assert "2 lines of events.jsonl are torn" in said and "3 samples" in said
    assert check(tmp_path / "trace.json.gz")["X"] >= 3
    assert main(["report", str(tmp_path), "--json", "--trace", str(tmp_path / "t.json")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["unread_lines"] == 2 and told["file"].endswith("t.json")
    check(tmp_path / "t.json")


def test_what_cannot_be_written_or_read_is_one_error(tmp_path: Path, capsys: Any) -> None:
    assert main(["report", str(tmp_path), "--trace"]) == 2
    assert "no job ran there" in capsys.readouterr().err
    (tmp_path / "events.jsonl").touch()
    assert main(["report", "--trace", str(tmp_path)]) == 2
    assert main(["report", str(tmp_path), "--trace", str(tmp_path / "no" / "x.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--trace"]) == 0
    check(tmp_path / "trace.json.gz")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["events.jsonl", "trace.json.gz"]


def test_the_checker_finds_what_is_wrong(path: Path) -> None:
    history = History().start().step(1, 1, [1], samples=1)
    history.write(path)
    trace = load(path)
    for spoiled in spoil(trace["traceEvents"]):
        path.write_text(json.dumps({**trace, "traceEvents": spoiled}))
        with pytest.raises(Invalid):
            check(path)


def spoil(events: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    for phase in "EeMsf":  # one of them is missing
        at = next(i for i, e in enumerate(events) if e["ph"] == phase and "sort" not in str(e))
        yield events[:at] + events[at + 1 :]
    at = next(i for i, e in enumerate(events) if e["ph"] == "E")
    yield [*events[:at], {**events[at], "ts": 0}, *events[at + 1 :]]
    yield [{**e, "dur": -1} if e["ph"] == "X" else e for e in events]


@pytest.mark.timeout(120)
def test_100k_samples_take_seconds_and_little_memory(tmp_path: Path) -> None:
    """Memory is that of the groups which are not trained yet, not of the run."""
    import tracemalloc

    def lives(steps: int) -> Iterator[Event]:
        history = History().start()
        for step in range(1, steps + 1):
            first = 100 * step
            history.step(step, step, list(range(first, first + 63)), samples=16)
            yield from history.events
            history.events.clear()

    steps = 10  # 10k samples here; benchmarks/run_trace.py has the rest
    start_s = time.process_time()
    report = write_trace(tmp_path / "t.json.gz", lives(steps), [], {})
    took_s = time.process_time() - start_s
    assert report.samples == steps * 63 * 16
    assert took_s < 20
    tracemalloc.start()
    write_trace(tmp_path / "t.json.gz", lives(2), [], {})
    small = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    write_trace(tmp_path / "t.json.gz", lives(8), [], {})
    large = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert large < small + 4e6


def test_events_that_were_read_are_those_that_were_written(tmp_path: Path) -> None:
    history = History().start().step(1, 1, [1], samples=1)
    file = tmp_path / "events.jsonl"
    file.write_bytes(b"".join(e.to_line() for e in history.events))
    assert [e.kind for e in read_events(file)] == [e.kind for e in history.events]
