"""Recoveries of groups from events."""

import pytest

from torchtitan_rl_ft.observability.events import Event, Kind
from torchtitan_rl_ft.observability.healing import recoveries
from torchtitan_rl_ft.observability.summary import render, summarise


def event(mono_s, kind, name="trainer-1", pid=7, **fields):
    data = {k: v for k, v in fields.items() if k not in ("phase", "step", "cause")}
    known = {k: v for k, v in fields.items() if k in ("phase", "step", "cause")}
    return Event(
        wall_s=1000.0 + mono_s,
        mono_s=mono_s,
        run="run",
        role="trainer",
        name=name,
        attempt=1,
        pid=pid,
        kind=kind,
        data=data,
        **known,
    )


def exit_of(mono_s, name="trainer-1"):
    return event(mono_s, Kind.EXIT, "supervisor", 1, phase="fault", subject=name)


def heal(mono_s, pid=7, **times):
    data = {"quorum_s": 0.5, "transfer_s": 2.0, "load_s": 0.1, "bytes": 5, "from_step": 0} | times
    return event(mono_s, Kind.HEAL, pid=pid, step=12, **data)


@pytest.mark.scenario("R-6")
def test_a_group_that_was_killed_and_came_back():
    (found,) = recoveries(
        [
            event(9.0, Kind.PHASE, pid=6, phase="reduce", step=12),
            event(10.0, Kind.CHAOS, "chaos", 2, phase="inject", subject="trainer-1"),
            exit_of(10.2),
            event(15.2, Kind.PHASE, phase="quorum", step=1),
            heal(17.8),
            event(17.9, Kind.PHASE, phase="forward_backward", step=13),
            event(18.1, Kind.PHASE, phase="report", step=13),
        ]
    )
    assert found.phase_s == pytest.approx(
        {
            "detection": 0.2,
            "start": 5.0,
            "quorum": 0.5,
            "transfer": 2.0,
            "load": 0.1,
            "first_step": 0.3,
        }
    )
    assert found.total_s == pytest.approx(8.1)
    assert sum(found.phase_s.values()) == pytest.approx(found.total_s, rel=0.05)
    assert found.line().startswith("trainer-1 at step 12: 8.10 s (detection 0.20, start 5.00,")


def test_a_group_that_healed_without_a_restart_and_one_that_has_not_committed_yet():
    again = [
        exit_of(1.0),
        event(5.0, Kind.PHASE, phase="quorum", step=1),
        heal(5.5),
        event(6.0, Kind.PHASE, phase="report", step=13),
        event(9.0, Kind.PHASE, phase="quorum", step=14),
        heal(9.1, quorum_s=0.05, transfer_s=0.04, load_s=0.01),
        event(9.3, Kind.PHASE, phase="report", step=15),
        exit_of(10.0),
        event(15.0, Kind.PHASE, pid=8, phase="quorum", step=1),
        heal(15.5, pid=8),
    ]
    first, second = recoveries(again)
    assert first.phase_s["start"] == pytest.approx(4.0)
    assert (second.phase_s["detection"], second.phase_s["start"]) == (0.0, 0.0)
    assert second.total_s == pytest.approx(0.3)


def test_an_end_that_nobody_told_is_not_that_of_an_earlier_process():
    told = [
        exit_of(1.0),
        event(5.0, Kind.PHASE, phase="quorum", step=1),
        heal(5.5),
        event(6.0, Kind.PHASE, phase="report", step=13),
        event(900.0, Kind.PHASE, pid=8, phase="quorum", step=1),
        heal(900.5, pid=8),
        event(901.0, Kind.PHASE, pid=8, phase="report", step=14),
    ]
    assert [r.total_s for r in recoveries(told)] == pytest.approx([5.0, 1.0])


def test_the_summary_shows_the_last_ones():
    events = [event(0.0, Kind.RUN, "supervisor", 1, phase="start")]
    for i in range(5):
        start_s = 100.0 * (i + 1)
        events += [
            exit_of(start_s),
            event(start_s + 5, Kind.PHASE, pid=20 + i, phase="quorum", step=1),
            heal(start_s + 6, pid=20 + i),
            event(start_s + 7, Kind.PHASE, pid=20 + i, phase="report", step=13),
        ]
    summary = summarise(events, [], outcome="done", total_steps=5, transport="")
    lines = [line for line in render(summary, "run") if "trainer-1 at step" in line]
    assert len(lines) == 3 and lines[0].startswith("healed")
    assert any("2 more" in line for line in render(summary, "run"))
