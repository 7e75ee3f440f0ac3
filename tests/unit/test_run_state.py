"""What the console, `torchtitan status`, the status page and /metrics know of a run."""

from __future__ import annotations

import json
import math

import pytest

from torchtitan_rl_ft.observability.curve import Curve
from torchtitan_rl_ft.observability.ettr import measure
from torchtitan_rl_ft.observability.events import EventLog, Kind, read_events
from torchtitan_rl_ft.observability.health import HealthLimits, health
from torchtitan_rl_ft.observability.live_ettr import LiveEttr, measured_json
from torchtitan_rl_ft.observability.run_follower import RunFollower
from torchtitan_rl_ft.observability.run_state import (
    MOST_EVENTS,
    MOST_ROUTINE,
    RunState,
    drop_reason,
)
from torchtitan_rl_ft.observability.status_text import run_rows
from torchtitan_rl_ft.run_folder import RunFolder

LIMITS = HealthLimits(start_s=100.0, stall_s=50.0)


def line(kind, name="supervisor", at_s=0.0, **fields):
    return {"kind": str(kind), "name": name, "mono_s": at_s, "wall_s": 1e9 + at_s, **fields}


def about(kind, subject, at_s=0.0, name="supervisor", **fields):
    data = fields.pop("data", {})
    return line(kind, name, at_s, data={"subject": subject, **data}, **fields)


def state(*lines, groups=2, engines=2):
    made = RunState(total_steps=8, groups=groups, engines=engines)
    for one in lines:
        made.add_event(one)
    return made


RUN = line(Kind.RUN, phase="start", pid=1)
COMMIT = line(Kind.COMMIT, "rollout", 20.0, step=1)


def engine(name, old, new, at_s=0.0, **fields):
    return about(Kind.TRANSITION, name, at_s, "serving", data={"old": old, "new": new}, **fields)


# Roles and engines ----------------------------------------------------------------------------


def test_a_role_that_dies_and_comes_back():
    made = state(
        RUN,
        about(Kind.SPAWN, "trainer-1", 1.0, data={"pid": 7}),
        line(Kind.PHASE, "trainer-1", 2.0, phase="quorum", step=3, pid=7),
    )
    trainer = made.members.roles["trainer-1"]
    assert (trainer.state, trainer.pid, trainer.phase, trainer.step) == ("up", 7, "quorum", 3)
    killed = {"cause": "killed by SIGKILL", "phase": "fault"}
    made.add_event(about(Kind.EXIT, "trainer-1", 3.0, **killed))
    assert (trainer.state, trainer.pid, trainer.phase) == ("ended", None, None)
    made.add_event(about(Kind.RESTART, "trainer-1", 3.0, cause="killed by SIGKILL"))
    assert (trainer.state, trainer.restarts) == ("restarting", 1)
    made.add_event(about(Kind.SPAWN, "trainer-1", 4.0, data={"pid": 8}))
    found = made.to_json(10.0)
    assert found["faults"] == 1 and found["restarts"] == {"trainer": 1}
    (told,) = [r for r in found["roles"] if r["name"] == "trainer-1"]
    assert told["reason"] == "killed by SIGKILL" and told["pid"] == 8 and told["age_s"] == 6.0


def test_an_engine_that_is_found_broken_and_then_ends_is_one_fault():
    broken = {"cause": "the detokenizer ended"}
    made = state(RUN, about(Kind.SPAWN, "engine-1"), about(Kind.FAULT, "engine-1", **broken))
    made.add_event(about(Kind.EXIT, "engine-1", phase="fault", **broken))
    assert made.faults == 1
    made.add_event(about(Kind.SPAWN, "engine-1"))
    made.add_event(about(Kind.EXIT, "engine-1", phase="fault", **broken))
    assert made.faults == 2
    made.add_event(about(Kind.FAULT, "rollout", cause="the disk is full"))
    made.add_event(about(Kind.EXIT, "rollout", phase="fault", cause="killed by SIGKILL"))
    assert made.faults == 4


def test_a_group_is_up_when_its_process_has_started():
    made = state(RUN, about(Kind.SPAWN, "trainer-0"), about(Kind.SPAWN, "trainer-1"))
    made.add_event(line(Kind.PHASE, "trainer-0", phase="attach"))
    assert made.to_json(1.0)["groups"] == {"up": 1, "total": 2} and made.groups_alive == 2


def test_the_restart_of_a_rank_and_a_promotion_count_for_their_group():
    made = state(
        RUN,
        about(Kind.SPAWN, "standby-0", data={"pid": 5}),
        about(Kind.SPAWN, "trainer-0", data={"pid": 6}),
        about(Kind.RESTART, "trainer-0.1", cause="exit code 1"),
        about(Kind.PROMOTE, "trainer-0", data={"standby": "standby-0"}),
        about(Kind.SPAWN, "trainer-0", data={"pid": 5}, phase="promoted"),
    )
    assert made.members.roles["trainer-0"].restarts == 2
    assert "standby-0" not in made.members.roles


def test_roles_that_were_started_by_hand_are_known():
    made = state(
        line(Kind.READY, "lighthouse", pid=3, data={"url": "http://x"}),
        line(Kind.PHASE, "trainer-0", phase="quorum", step=1, pid=4),
    )
    assert {n: r.pid for n, r in made.members.roles.items()} == {"lighthouse": 3, "trainer-0": 4}


def test_engines_through_versions_loans_and_the_death_of_serving():
    made = state(
        RUN,
        about(Kind.SPAWN, "engine-0", name="serving", data={"pid": 9}),
        engine("engine-0", "starting", "stale"),
        engine("engine-0", "installing", "serving", version=1),
    )
    one = made.members.engines["engine-0"]
    assert (one.state, one.version, made.engines_serving) == ("serving", 1, 1)
    made.add_event(about(Kind.LEND, "engine-0", phase="lend", cause="to trainer-0"))
    assert (one.state, made.engines_serving) == ("lent", 0)
    made.add_event(engine("engine-0", "installing", "serving", version=2))
    made.add_event(about(Kind.EXIT, "serving", cause="killed", phase="fault"))
    assert (one.state, made.engines_serving, one.version) == ("unknown", 0, 2)


def test_another_life_keeps_engines_only_when_they_live_on():
    served = [RUN, engine("engine-0", "installing", "serving", version=3)]
    assert not state(*served, RUN).members.engines
    kept = state(*served, line(Kind.RUN, phase="reattach")).members.engines["engine-0"]
    assert (kept.state, kept.version, kept.restarts) == ("unknown", 3, 0)


@pytest.mark.row("K2")
def test_the_quorum_and_its_changes():
    def quorum(at_s, quorum_id, step, *members):
        data = {"quorum_id": quorum_id, "participants": len(members), "members": list(members)}
        return line(Kind.QUORUM, "trainer-0", at_s, step=step, data=data)

    made = state(RUN, quorum(1.0, 1, 1, "a", "b"), quorum(2.0, 1, 2, "a", "b"))
    assert made.to_json(11.0)["quorum"] == {
        "quorum_id": 1, "members": ["a", "b"], "participants": 2, "step": 2, "age_s": 10.0
    }  # fmt: skip
    made.add_event(quorum(3.0, 2, 3, "a"))
    assert made.members.quorum_changes == 2 and made.members.quorum.members == ["a"]


# Counts ---------------------------------------------------------------------------------------


@pytest.mark.row("K3")
def test_batches_ahead_and_drops_by_reason():
    made = state(RUN, COMMIT, *(line(Kind.SEAL, "rollout", step=s) for s in (2, 3, 4)))
    assert made.buffered_batches == 3
    for age in (3, 4):
        made.add_event(line(Kind.DROP, cause=f"too old: policy age {age}", data={"group": age}))
    dropped = {"batch": 3, "groups": [7, 8]}
    made.add_event(line(Kind.DROP, cause="not finite", step=3, data=dropped))
    assert made.dropped == {"too old": 2, "not finite": 2} and made.buffered_batches == 2
    made.add_event(line(Kind.SUPERSEDE, data={"from_step": 1, "to_step": 0}))
    assert made.buffered_batches == 3
    for n in range(100):  # reasons that nobody has foreseen stay few
        made.add_event(line(Kind.DROP, cause="odd " + "x" * n, data={"group": n}))
    assert len(made.dropped) <= 21 and made.dropped["other"] > 50


def test_reasons_have_no_numbers():
    assert drop_reason("too old: policy age 3, at most 2") == "too old"
    assert drop_reason("engine-7 said no") == "engine-N said no"
    assert drop_reason(None) == "unknown"


def test_events_are_kept_for_people_and_hold_no_line_of_a_log():
    data = {"last_lines": ["SECRET"], "subject": "trainer-0", "log": "/logs/x"}
    made = state(RUN, line(Kind.EXIT, phase="fault", cause="exit code 1\nSECRET", data=data))
    for name in ("stale", "installing"):
        made.add_event(engine("engine-0", "serving", name))  # at every step
    found = made.events_after(1)
    assert found["last"] == 2 and found["missed"] == 0
    (told,) = found["events"]
    assert told["name"] == "trainer-0" and told["cause"] == "exit code 1"
    assert "SECRET" not in json.dumps(made.to_json(0.0)) + json.dumps(made.events_after(0))


def test_steps_in_which_all_is_well_do_not_push_out_a_fault():
    made = state(RUN, line(Kind.WARN, cause="before"))
    for step in range(1, 1000):
        made.add_event(line(Kind.COMMIT, "rollout", step=step))
        made.add_event(line(Kind.PUBLISH, "serving", step=step, version=step + 1))
    made.add_event(line(Kind.WARN, cause="after"))
    found = made.events_after(0)
    assert [e["n"] for e in found["events"]] == sorted(e["n"] for e in found["events"])
    assert [e["cause"] for e in found["events"] if "cause" in e] == ["before", "after"]
    assert len(found["events"]) == MOST_ROUTINE + 3 and found["last"] == 2001
    assert found["missed"] == found["last"] - len(found["events"])


def test_memory_is_bounded():
    made = state(RUN)
    for n in range(3 * MOST_EVENTS):
        made.add_event(line(Kind.WARN, cause="x" * 10_000))
        made.add_event(line(Kind.PHASE, f"trainer-{n}", phase="quorum"))
        made.add_metrics({"step": n, "reward/mean": 0.5})
    found = made.events_after(0)
    assert len(found["events"]) == MOST_EVENTS and found["missed"] == 2 * MOST_EVENTS + 1
    assert len(json.dumps(found)) < 500 * MOST_EVENTS
    assert len(made.curves["reward"].steps) <= 256


def test_a_curve_is_thinned_and_keeps_its_mean():
    curve = Curve(most=8)
    for step in range(1, 101):
        curve.add(step, float(step))
    assert 4 <= len(curve.steps) <= 8 and curve.steps[-1] == 100
    assert curve.values == sorted(curve.values) and curve.values[0] < 16
    curve.add(50, 1.0)  # those after it were superseded
    assert curve.steps[-1] == 50 and max(curve.steps) == 50


def test_what_is_no_number_in_json_is_left_out():
    made = state(RUN)
    made.add_metrics({"step": 1, "loss": math.nan, "reward/mean": math.inf, "lr": 0.1})
    found = made.to_json(0.0)
    assert found["metrics"] == {"step": 1, "lr": 0.1} and found["curves"]["loss"] == []
    json.dumps(found, allow_nan=False)


def test_lines_of_another_version_and_torn_ones_are_counted(tmp_path):
    log = EventLog(tmp_path / "events.jsonl", run="r", role="supervisor", name="supervisor")
    log.emit(Kind.RUN, phase="start")
    with open(tmp_path / "events.jsonl", "ab") as f:
        f.write(b'{"kind":"of tomorrow"}\n{"kind":"seal","step":"two"}\n[1]\nnonsense\n')
        f.write(b'{"kind":"quorum","data":[]}\n{"kind":"run","pha')  # torn, a line is added to it
    log.emit(Kind.COMMIT, step=3)
    log.close()
    follower = RunFollower(RunFolder(tmp_path), state())
    seen = []
    follower.listen(seen.append, seen.append)
    follower.poll()
    assert follower.state.step == 3 and follower.unreadable == 5
    assert [one["kind"] for one in seen] == ["run", "commit"]


# Health ---------------------------------------------------------------------------------------


@pytest.mark.row("K4")
@pytest.mark.parametrize(
    ("lines", "at_s", "ok", "found", "reason"),
    [
        ([RUN], 99.0, True, "starting", "engines starting"),
        ([RUN], 101.0, False, "stalled", "no engine serves"),
        ([RUN, engine("engine-0", "starting", "stale")], 50.0, True, "starting", "engines up"),
        ([RUN, COMMIT], 60.0, True, "ok", "training"),
        ([RUN, COMMIT], 71.0, False, "stalled", "nothing was done for 51 s, since step 1"),
        ([RUN, COMMIT, line(Kind.ACCEPT, "rollout", 60.0)], 100.0, True, "ok", "training"),
        ([RUN, COMMIT, line(Kind.WARN, at_s=60.0)], 100.0, False, "stalled", "no trainer group"),
        (
            [RUN, COMMIT, about(Kind.EXIT, "serving", 60.0, cause="exit code 1", phase="fault")],
            100.0,
            False,
            "stalled",
            "serving is ended: exit code 1",
        ),
        ([RUN, COMMIT, RUN], 99.0, True, "starting", "engines starting"),
        (
            [RUN, COMMIT, line(Kind.RUN, phase="end", cause="complete")],
            21.0,
            False,
            "ended",
            "comp",
        ),
    ],
)
def test_health(lines, at_s, ok, found, reason):
    verdict = health(state(*lines), at_s, LIMITS)
    assert (verdict.ok, verdict.state) == (ok, found) and reason in verdict.reason


def test_a_clock_that_jumps_back_ends_nothing():
    assert health(state(RUN, COMMIT), -5.0, LIMITS).ok
    assert state(RUN, COMMIT).to_json(-5.0)["elapsed_s"] == 0.0


# ETTR, and lines of text ----------------------------------------------------------------------


def run_of(path, *, end=True):
    """An engine that was lost, and three steps."""
    told = [
        ("supervisor", Kind.RUN, {"phase": "start"}),
        ("serving", Kind.TRANSITION, {"subject": "engine-0", "old": "stale", "new": "serving"}),
        ("rollout", Kind.ISSUE, {"groups": 1, "first": 1, "last": 1}),
    ]
    for step in (1, 2, 3):
        told += [
            ("trainer", Kind.PHASE, {"phase": "forward_backward", "step": step}),
            ("trainer", Kind.PHASE, {"phase": "commit", "step": step}),
            ("rollout", Kind.COMMIT, {"step": step}),
            ("trainer", Kind.PHASE, {"phase": "waiting_for_batch", "step": step + 1}),
        ]
        if step == 2:
            lost = {"subject": "engine-0", "phase": "fault", "cause": "<b>killed</b>"}
            told += [
                ("serving", Kind.EXIT, lost),
                ("serving", Kind.SPAWN, {"subject": "engine-0", "pid": 1}),
                ("serving", Kind.TRANSITION, {"subject": "engine-0", "new": "serving"}),
            ]
    told += [("supervisor", Kind.RUN, {"phase": "end", "cause": "complete"})] if end else []
    for role, kind, fields in told:
        name = "trainer-0" if role == "trainer" else role
        log = EventLog(path, run="r", role=role, name=name)
        log.emit(kind, **fields)
        log.close()


@pytest.mark.row("K1")
def test_live_ettr_is_that_of_the_whole_file(tmp_path):
    path = tmp_path / "events.jsonl"
    run_of(path, end=False)
    live = LiveEttr(path, window_s=60.0, every_s=0.001)
    found = live.measure_all()
    assert found.ettr == measure(read_events(path)) and found.ettr is not None
    assert len(found.samples) <= 201
    told = measured_json(found)
    (outage,) = told["outages"]
    assert outage["name"] == "engine-0" and outage["cause"] == "<b>killed</b>"
    assert 0 <= outage["at_s"] <= outage["end_s"]
    assert sum(outage["phase_s"].values()) == pytest.approx(outage["end_s"] - outage["at_s"])
    json.dumps(told, allow_nan=False)
    run_of(path)  # another life
    assert live.measure_all().ettr == measure(read_events(path))


def test_an_ettr_that_cannot_be_measured_is_told_once(tmp_path, monkeypatch):
    run_of(tmp_path / "events.jsonl")
    live = LiveEttr(tmp_path / "events.jsonl", window_s=60.0, every_s=1.0)
    monkeypatch.setattr(live, "measure", lambda: 1 / 0)
    live.look()
    live._thread.join()
    assert live.measured.problem == "ZeroDivisionError: division by zero"
    live.look()
    assert not live.looking


def test_the_lines_of_status(tmp_path):
    run_of(tmp_path / "events.jsonl")
    follower = RunFollower(RunFolder(tmp_path), state(groups=1, engines=1))
    follower.poll()
    follower.state.add_metrics({"step": 3, "reward/mean": 0.25})
    measured = LiveEttr(tmp_path / "events.jsonl", window_s=60.0, every_s=1.0).measure_all()
    rows = run_rows(follower.state, measured, follower.state.last_mono_s)
    text = {label: line for label, line in rows if label}
    assert text["run"].startswith("complete, step 3 of 8, 0 s")
    assert text["reward"].startswith("0.250") and text["faults"] == "1, no restarts"
    assert text["ETTR"].startswith("strict 0.") and text["outages"].startswith("engine-0: <b>kil")
    assert run_rows(state(), measured, 0.0) == []
