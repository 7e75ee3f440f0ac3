"""Progress and summary, from lines alone."""

import asyncio
import dataclasses
import io
import json
import os
import shutil
import threading
import time
import weakref
from pathlib import Path

import pytest
from rich.console import Console

from tests.unit.run_events import Log
from torchtitan_rl_ft.host.writable import writable
from torchtitan_rl_ft.observability import jsonl
from torchtitan_rl_ft.observability.console import (
    PHASE_REPEAT_S,
    PlainReporter,
    ProgressConsole,
    step_line,
)
from torchtitan_rl_ft.observability.ettr import measure
from torchtitan_rl_ft.observability.events import Event, EventLog, Kind, read_events
from torchtitan_rl_ft.observability.jsonl import JsonlTail, read_jsonl
from torchtitan_rl_ft.observability.notices import notice
from torchtitan_rl_ft.observability.reward_curve import (
    resample,
    save_png,
    sparkline,
    terminal_curve,
)
from torchtitan_rl_ft.observability.run_follower import RunFollower
from torchtitan_rl_ft.observability.run_state import RunState
from torchtitan_rl_ft.observability.summary import render, summarise
from torchtitan_rl_ft.run_folder import RunFolder


def line(kind, name="supervisor", mono_s=0.0, **fields):
    return {"kind": str(kind), "name": name, "mono_s": mono_s, **fields}


def view(*lines):
    made = RunState(total_steps=8, groups=2, engines=2)
    for one in lines:
        made.add_event(one)
    return made


def spawn(subject):
    return line(Kind.SPAWN, data={"subject": subject})


def engine(slot, new):
    return line(Kind.TRANSITION, "serving", data={"subject": f"engine-{slot}", "new": new})


RUN = line(Kind.RUN, phase="start")
AGAIN = line(Kind.RUN, phase="reattach")


# Following files ------------------------------------------------------------------------


def test_tail_gives_each_complete_line_once(tmp_path):
    path = tmp_path / "m.jsonl"
    tail = JsonlTail(path)
    assert tail.read() == []
    path.write_bytes(b'{"a":1}\n{"b"')
    assert tail.read() == [{"a": 1}]
    with open(path, "ab") as f:
        f.write(b':2}\nnonsense\n[1]\n{"c":3}\n')
    assert tail.read() == [{"b": 2}, {"c": 3}]
    assert tail.unreadable == 2
    assert tail.read() == []


def test_tail_from_the_end_reads_nothing_of_before(tmp_path):
    path = tmp_path / "m.jsonl"
    assert JsonlTail(path, from_end=True).read() == []
    path.write_bytes(b'{"a":1}\n')
    tail = JsonlTail(path, from_end=True)
    with open(path, "ab") as f:
        f.write(b'{"b":2}\n')
    assert tail.read() == [{"b": 2}]


def test_events_go_on_when_their_file_is_removed_by_hand(tmp_path):
    path = tmp_path / "run" / "events.jsonl"
    log = EventLog(path, run="r", role="serving", name="serving")
    tail = JsonlTail(path, may_begin_anew=True)
    log.emit(Kind.WARN, cause="one " * 100)
    assert len(tail.read()) == 1
    shutil.rmtree(path.parent)
    assert tail.read() == []
    log.emit(Kind.WARN, cause="two")
    assert [line["cause"] for line in tail.read()] == ["two"]
    log.close()


def test_events_survive_the_way_through_the_file(tmp_path):
    log = EventLog(tmp_path / "events.jsonl", run="r", role="serving", name="serving", attempt=2)
    log.emit(Kind.PUBLISH, version=3, step=2, slots=[0, 1])
    log.emit(Kind.WARN, cause="slow")
    log.close()
    with open(tmp_path / "events.jsonl", "ab") as f:
        f.write(b'[1]\n{"kind":"of another version"}\n{"kind":"warn"}\n')
        f.write(b'{"kind":"run"')  # torn
    first, second = read_events(tmp_path / "events.jsonl")
    assert (first.kind, first.version, first.step, first.attempt) == (Kind.PUBLISH, 3, 2, 2)
    assert first.data == {"slots": [0, 1]} and second.cause == "slow" and second.step is None


def test_a_torn_event_costs_no_other_one(tmp_path):
    path = tmp_path / "events.jsonl"
    log = EventLog(path, run="r", role="serving", name="serving")
    log.emit(Kind.WARN, cause="first")
    with open(path, "ab") as f:
        f.write(path.read_bytes()[:40])  # a full disk
    log.emit(Kind.WARN, cause="second")
    with open(path, "ab") as f:
        f.write(b"nonsense\n")
    log.emit(Kind.WARN, cause="third")
    log.close()
    assert [e.cause for e in read_events(path)] == ["first", "second", "third"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_an_event_that_cannot_be_written_is_an_error():
    log = EventLog(Path("/dev/full"), run="r", role="serving", name="serving")
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        log.emit(Kind.WARN, cause="lost")
    log.close()


# State ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "phase"),
    [
        ([RUN], "engines starting"),
        ([RUN, engine(0, "starting")], "engines starting"),
        ([AGAIN], "going on with living engines, trainers starting"),
        ([AGAIN, engine(0, "starting")], "engines starting"),
        ([AGAIN, RUN], "engines starting"),
        (
            [RUN, engine(0, "starting"), engine(0, "stale")],
            "engines up, trainers starting: waiting for the initial weights",
        ),
        ([RUN, engine(0, "serving")], "rolling out the first batch"),
        (
            [RUN, engine(0, "serving"), line(Kind.SEAL, "rollout", step=1)],
            "first batch sealed, trainers starting",
        ),
        (
            [RUN, engine(0, "serving"), line(Kind.SEAL, "rollout"), line(Kind.QUORUM, "trainer-0")],
            "first step",
        ),
        ([RUN, line(Kind.COMMIT, "rollout", step=1)], "training"),
        ([RUN, line(Kind.RUN, phase="end", cause="complete")], "complete"),
    ],
)
def test_phase(lines, phase):
    assert view(*lines).phase() == phase


def test_groups_and_engines_follow_the_processes():
    made = view(RUN, spawn("trainer-0"), spawn("trainer-1"), engine(0, "serving"))
    made.add_event(engine(1, "serving"))
    assert (made.groups_alive, made.engines_serving) == (2, 2)
    made.add_event(line(Kind.EXIT, phase="fault", cause="x", data={"subject": "trainer-1"}))
    made.add_event(engine(0, "installing"))  # the next version: still counted
    made.add_event(engine(1, "retired"))
    assert (made.groups_alive, made.engines_serving, made.faults) == (1, 1, 1)
    made.add_event(line(Kind.EXIT, phase="fault", cause="x", data={"subject": "serving"}))
    assert made.engines_serving == 0


def test_superseded_steps_leave_the_curve():
    made = view(RUN)
    for step, reward in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.25)):
        made.add_metrics({"step": step, "reward/mean": reward})
    assert (made.reward_steps, made.rewards) == ([1, 2], [0.1, 0.25])


def test_new_life_forgets_the_processes_of_the_old():
    made = view(RUN, spawn("trainer-0"), line(Kind.RUN, phase="end", cause="stopped"), RUN)
    assert (made.groups_alive, made.outcome) == (0, None)


# Console --------------------------------------------------------------------------------


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def test_plain_lines_are_one_per_step_and_phase():
    clock, said = Clock(), []
    reporter = PlainReporter(said.append, clock)
    made = view(RUN)
    for _ in range(3):
        reporter.update(made, [], [])
    clock.now_s = PHASE_REPEAT_S + 2
    reporter.update(made, [], [])
    reporter.update(made, [], [])
    made.add_event(line(Kind.COMMIT, "rollout", step=1))
    reporter.update(made, ["serving ended"], ["step 1", "step 2"])
    reporter.update(made, [], [])
    assert said == [
        "engines starting",
        "engines starting 12 s",
        "serving ended",
        "step 1",
        "step 2",
    ]


def test_step_line():
    made = view(RUN, spawn("trainer-0"), spawn("trainer-1"), engine(0, "serving"))
    made.add_metrics({"step": 1, "reward/mean": 0.25, "policy_age/mean": 0, "time/step_s": 1.5})
    assert step_line(made) == (
        "step 1/8  reward 0.250  policy age 0.0  groups 2/2  engines 1/2  1.50 s"
    )
    made.add_metrics({"step": 2, "participants": 1.0})
    assert step_line(made) == "step 2/8  groups 1/2  engines 1/2"


def test_notices():
    ended = line(Kind.EXIT, phase="fault", cause="exit code 1", data={"subject": "a", "log": "L"})
    assert notice(ended) == "a ended: exit code 1 (log: L)"
    assert notice({**ended, "phase": "stopped"}) is None
    promoted = {"subject": "trainer-1", "standby": "standby-0"}
    assert notice(line(Kind.PROMOTE, "supervisor", data=promoted)) == (
        "standby-0 takes the place of trainer-1"
    )
    assert notice(line(Kind.FAULT, "serving", cause="no answer", data={"subject": "engine-1"})) == (
        "fault: engine-1: no answer"
    )
    stop = line(Kind.STOP, "rollout", step=7, cause="SIGTERM")
    assert notice(stop) == "the job stops after step 7: SIGTERM"
    assert notice({**stop, "data": {"replica_id": 1}}) == "trainer-1 stops after step 7: SIGTERM"
    assert notice(line(Kind.COMMIT, step=1)) is None


@pytest.mark.parametrize("terminal", [True, False])
def test_console_shows_what_the_files_say(tmp_path, terminal, capsys):
    folder = RunFolder(tmp_path)
    out = io.StringIO()
    rich_console = Console(file=out, force_terminal=terminal, width=100)
    log = EventLog(folder.events, run="r", role="supervisor", name="supervisor")
    log.emit(Kind.FAULT, cause="in an earlier life")
    folder.metrics.write_text(json.dumps({"step": 1, "reward/mean": 0.1}) + "\n")
    log.emit(Kind.RUN, phase="resume")
    console = ProgressConsole(RunFollower(folder, RunState(8, 1, 1)), rich_console)
    log.emit(Kind.FAULT, cause="too   hot\nand more")
    log.emit(Kind.COMMIT, step=2)
    with open(folder.metrics, "a") as f:
        f.write(json.dumps({"step": 2, "reward/mean": 0.5}) + "\n")
    console.poll()
    console._reporter.close()
    shown = out.getvalue() if terminal else capsys.readouterr().out
    assert "step 2/8" in shown and "reward 0.500" in shown
    assert "fault: supervisor: too hot" in shown
    assert "earlier life" not in shown and "step 1/8" not in shown


async def test_a_long_history_holds_nobody_up(tmp_path, capsys, monkeypatch):
    """It is taken in between other work, and what comes meanwhile is shown."""
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 1000)
    folder = RunFolder(tmp_path)
    log = EventLog(folder.events, run="r", role="supervisor", name="supervisor")
    log.emit(Kind.RUN, phase="start")
    for step in range(100):
        log.emit(Kind.COMMIT, step=step, cause="of an earlier life")
    log.emit(Kind.RUN, phase="resume")
    follower = RunFollower(folder, RunState(200, 1, 1))
    catching_up = asyncio.ensure_future(follower.catch_up())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not catching_up.done() and 0 < follower.state.totals[Kind.COMMIT] < 50
    log.emit(Kind.FAULT, cause="too hot")
    log.emit(Kind.RUN, phase="end", cause="x" * 3000)
    async with asyncio.timeout(30):
        await catching_up
    console = ProgressConsole(follower, Console(file=io.StringIO()))
    console.poll()
    assert follower.state.totals[Kind.COMMIT] == 100 and follower.state.outcome is not None
    shown = capsys.readouterr().out
    assert "fault: supervisor: too hot" in shown and "earlier" not in shown


@pytest.mark.parametrize("terminal", [True, False])
def test_a_reader_that_has_stopped_holds_nobody_up(tmp_path, monkeypatch, terminal):
    """A paused pager, a terminal held with Ctrl-S: the supervisor has roles to look after."""
    folder = RunFolder(tmp_path)
    log = EventLog(folder.events, run="r", role="supervisor", name="supervisor")
    log.emit(Kind.RUN, phase="start")
    read, write = os.pipe()
    with open(read, "rb") as reader, open(write, "w") as stalled:
        rich_console = Console(file=stalled, force_terminal=terminal, width=100)
        monkeypatch.setattr("sys.stdout", stalled)
        console = ProgressConsole(RunFollower(folder, RunState(8, 1, 1)), rich_console)
        for n in range(600):  # more than a pipe takes
            log.emit(Kind.STOP, step=n, cause="x" * 150)
            if n % 100 == 0:
                console.poll()
        console.poll()
        assert not writable(stalled)
        console._reporter.close()
        shown = []
        reading = threading.Thread(target=lambda: shown.append(reader.read()))
        reading.start()
        log.emit(Kind.WARN, cause="the last word")
        end = time.monotonic() + 30
        while not writable(stalled):
            assert time.monotonic() < end
            time.sleep(0.01)
        for _ in range(1000):
            console.poll()
            if not console._reporter._waiting:
                break
            time.sleep(0.001)
        stalled.close()
        reading.join(30)
    assert b"the job stops after step 0" in shown[0] and b"the last word" in shown[0]


def test_step_line_leaves_out_what_is_not_known():
    assert step_line(view(RUN)) == "step 0/8  groups 0/2  engines 0/2"


# Debug modes ----------------------------------------------------------------------------


@pytest.mark.row("J1")
def test_a_run_without_trainers_shows_its_rollouts(tmp_path, capsys):
    log = EventLog(tmp_path / "events.jsonl", run="r", role="rollout", name="rollout")
    log.emit(Kind.RUN, phase="start")
    made = RunState(total_steps=2, groups=0, engines=1)
    follower = RunFollower(RunFolder(tmp_path), made)
    console = ProgressConsole(follower, Console(file=io.StringIO()))
    console.poll()
    assert capsys.readouterr().out == "engines starting\n"
    log.emit(Kind.TRANSITION, subject="engine-0", new="stale")
    console.poll()
    assert capsys.readouterr().out == "engines up: waiting for the initial weights\n"
    log.emit(Kind.TRANSITION, subject="engine-0", new="serving")
    console.poll()
    assert capsys.readouterr().out == "rolling out the first batch\n"
    for step in (1, 1, 2):  # a restarted role tells again
        log.emit(Kind.DUMP, step=step, reward=0.5, samples=4, tokens=9)
    console.poll()
    said = ["rollout 1/2  reward 0.500  4 samples  9 tokens"]
    assert capsys.readouterr().out.splitlines() == [*said, said[0].replace("1/2", "2/2")]
    assert made.phase() == "rolling out"


@pytest.mark.row("J2")
def test_a_run_without_engines_shows_none():
    made = RunState(total_steps=2, groups=1, engines=0)
    made.add_event(RUN)
    assert made.phase() == "loading the first dump"
    made.add_event(line(Kind.SEAL, step=1))
    assert made.phase() == "first batch sealed, trainers starting"
    made.add_event(line(Kind.COMMIT, step=1))
    made.add_metrics({"step": 1, "reward/mean": 0.5})
    assert made.phase() == "training" and "engines" not in step_line(made)


# Curve ----------------------------------------------------------------------------------


def test_resample_keeps_the_mean():
    values = [float(i) for i in range(100)]
    assert resample(values, 10) == [4.5 + 10 * i for i in range(10)]
    assert resample([1.0, 2.0], 10) == [1.0, 2.0]


def test_curve_spans_its_axis():
    assert sparkline([0.0, 1.0], 10) == "▁█"
    top, *_, bottom, axis = terminal_curve([0.0, 0.5, 1.0], height=2)
    assert top.endswith("│  █") and bottom.endswith("│ ██") and "3 steps" in axis
    assert top.startswith("  1.00") and bottom.startswith("  0.00")
    assert terminal_curve([]) == []


def test_rewards_outside_of_0_and_1_widen_the_axis():
    assert terminal_curve([-2.0, 3.0], height=4)[0].startswith("  3.00")


def test_png_is_a_picture(tmp_path):
    save_png(tmp_path / "reward.png", [1, 2, 3], [0.1, 0.5, 0.9], "run")
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


# Summary --------------------------------------------------------------------------------


def events_of_a_run():
    def event(at_s, kind, name="rollout", **fields):
        base = {"wall_s": at_s, "mono_s": at_s, "run": "r", "role": name, "attempt": 1, "pid": 1}
        return Event(**{**base, "name": name, "kind": kind, **fields})

    yield event(0.0, Kind.RUN, "supervisor", phase="start")
    yield event(10.0, Kind.ISSUE)
    for step in range(1, 11):
        if step == 7:
            data = {"subject": "serving"}
            yield event(
                16.5, Kind.EXIT, "supervisor", phase="fault", cause="exit code 1", data=data
            )
        yield event(10.0 + step, Kind.COMMIT, step=step)
    yield event(20.5, Kind.DROP, cause="too old")
    yield event(21.0, Kind.EVAL, data={"reward": 0.8, "prompts": 100})
    yield event(22.0, Kind.RUN, "supervisor", phase="end", cause="complete")


def test_summary_of_a_run():
    rows = [
        {"step": s, "reward/mean": s / 10, "time/step_s": 0.5, "time/wait_batch_s": 0.25}
        for s in range(1, 11)
    ]
    found = summarise(
        list(events_of_a_run()), rows, outcome="complete", total_steps=10, transport="disk"
    )
    assert (found.steps, found.wall_s, found.dropped) == (10, 22.0, 1)
    assert found.first_reward == pytest.approx(0.3) and found.last_reward == pytest.approx(0.8)
    assert found.phase_s == {"start-up": 10.0, "step": 5.0, "wait_batch": 2.5}
    assert found.faults == {"serving: exit code 1": 1}
    text = "\n".join(render(found, "/run"))
    for part in (
        "steps      10 of 10 in 22 s",
        "reward     0.300 -> 0.800",
        "held-out   0.800 greedy on 100 prompts",
        "ETTR       strict ",
        "outages    serving: exit code 1: 5.50 s",
        "transport  disk",
        "faults     serving: exit code 1",
        "run folder /run",
    ):
        assert part in text


def test_summary_of_a_resumed_run_times_its_last_life():
    def event(at_s, kind, **fields):
        base = {"wall_s": at_s, "mono_s": at_s, "run": "r", "role": "rollout", "name": "rollout"}
        return Event(**base, attempt=1, pid=1, kind=kind, **fields)

    events = [
        event(0.0, Kind.RUN, phase="start"),
        event(10.0, Kind.COMMIT, step=1),
        event(100.0, Kind.RUN, phase="resume"),
        event(110.0, Kind.ISSUE),
        event(112.0, Kind.COMMIT, step=2),
        event(113.0, Kind.COMMIT, step=3),
    ]
    rows = [
        {"step": 1, "time/step_s": 9.0, "time/wait_batch_s": 8.0},
        {"step": 2, "time/step_s": 7.0, "time/wait_batch_s": 6.0},  # 5 s of it before the prompts
        {"step": 3, "time/step_s": 1.0, "time/wait_batch_s": 0.25},
    ]
    found = summarise(events, rows, outcome="complete", total_steps=3, transport="disk")
    assert found.phase_s == {"start-up": 10.0, "step": 3.0, "wait_batch": 1.25}


@pytest.mark.row("J1")
def test_summary_of_a_run_that_trains_nothing():
    def event(at_s, kind, **fields):
        base = {"wall_s": at_s, "mono_s": at_s, "run": "r", "role": "rollout", "name": "rollout"}
        return Event(**base, attempt=1, pid=1, kind=kind, **fields)

    def dump(at_s, step, reward):
        data = {"path": f"/d/{step}", "samples": 4, "tokens": 9, "reward": reward}
        return event(at_s, Kind.DUMP, step=step, data=data)

    events = [
        event(0.0, Kind.RUN, phase="start"),
        dump(1.0, 1, 0.25),
        dump(2.0, 1, 0.25),  # told again by a restarted role
        dump(3.0, 2, None),
        dump(4.0, 3, 0.75),
    ]
    found = summarise(events, [], outcome="complete", total_steps=3, transport="disk")
    assert found.reward_steps == [1, 3] and found.rewards == [0.25, 0.75]
    text = "\n".join(render(found, "/run"))
    assert "rollouts   3 of 3 in 4 s" in text and "dumps      3 files, /d/1 to /d/3" in text
    assert "(means of the first and last 2 rollouts)" in text
    assert "ETTR" not in text and "steps  " not in text


@pytest.mark.parametrize(
    ("published", "told"),
    [
        ([], "nixl"),
        ([(0, "disk")], "nixl"),
        ([(0, "disk"), (1, "nixl")], "nixl"),
        ([(1, "disk")], "disk"),
    ],
)
def test_the_summary_names_the_transport_of_what_was_trained(published, told):
    """Initial weights are always a folder."""
    who = {"run": "r", "role": "serving", "name": "serving", "attempt": 1, "pid": 1}
    who |= {"wall_s": 1.0, "mono_s": 1.0, "kind": Kind.PUBLISH}
    events = [Event(**who, step=step, data={"transport": by}) for step, by in published]
    found = summarise(events, [], outcome="complete", total_steps=3, transport="nixl")
    assert f"transport  {told}" in "\n".join(render(found, "/run"))


def test_summary_of_a_run_without_a_step():
    found = summarise([], [], outcome="stopped", total_steps=10, transport="disk")
    text = "\n".join(render(found, "/run"))
    assert "none: no step was committed" in text and "not evaluated" in text
    assert "transport" in text


def test_a_summary_tells_what_earlier_lives_were_ended_by():
    log = Log(groups=1, engines=1)
    log.start()
    log.rollout(2.0)
    log.train(3.0)
    log.emit("supervisor", Kind.EXIT, phase="fault", cause="exit code 1", subject="lighthouse")
    log.now_s += 1.0
    log.emit("lighthouse", Kind.READY, url="http://x")
    log.now_s += 5.0
    log.start(startup_s=1.0, phase="reattach")
    log.rollout(2.0)
    log.kill_trainer(0, after_s=1.0, restart_s=4.0, reconnect_s=2.0)
    log.train(3.0)
    found = summarise(log.events, [], outcome="", total_steps=2, transport="")
    assert [o.role for o in found.outages] == ["lighthouse", "supervisor", "trainer"]
    assert [o.role for o in found.ettr.outages] == ["trainer"]
    text = "\n".join(render(found, "/run"))
    assert "earlier    lighthouse: exit code 1: 1.00 s" in text
    assert "           supervisor: its supervisor was killed: 18.00 s" in text


def test_a_summary_holds_no_event_of_a_prompt_group():
    """Of a long run they are nearly all of the memory; ETTR is made of them all the same."""
    log = Log(groups=2, engines=2)
    log.start()
    seen, alive = [], []

    def read():
        for event in log.events:
            mine = dataclasses.replace(event)
            if event.kind is Kind.ACCEPT:
                seen.append(weakref.ref(mine))
                alive.append(sum(one() is not None for one in seen))
            yield mine

    for _ in range(40):
        log.rollout(2.0)
        log.train(3.0)
    found = summarise(read(), [], outcome="", total_steps=40, transport="")
    assert found.ettr == measure(log.events) and found.ettr.strict.ratio > 0.3
    assert len(alive) == 40 and max(alive) < 5
    assert found.wall_s == log.events[-1].mono_s - log.events[0].mono_s


def test_summary_of_a_run_that_publishes_nothing():
    found = summarise([], [], outcome="stopped", total_steps=10, transport="")
    assert "transport" not in "\n".join(render(found, "/run"))


def test_read_jsonl_of_a_missing_file(tmp_path):
    assert read_jsonl(tmp_path / "none.jsonl") == []
