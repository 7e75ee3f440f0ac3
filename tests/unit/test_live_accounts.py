"""What an arm of benchmarks/ettr_live.py came to, by its events."""

from dataclasses import replace

import pytest

from benchmarks.live.accounts import outage_phases, restart_phases, rewound
from benchmarks.live.driver import Restart
from torchtitan_rl_ft.observability.ettr import measure
from torchtitan_rl_ft.observability.events import Event, Kind
from torchtitan_rl_ft.observability.outage import Outage


def event(mono_s: float, kind: Kind, *, phase=None, step=None, name="supervisor", **data) -> Event:
    common = {"wall_s": mono_s, "run": "r", "role": name, "name": name}
    return Event(
        mono_s=mono_s, kind=kind, phase=phase, step=step, attempt=1, pid=1, data=data, **common
    )


def a_restarted_job() -> list[Event]:
    """Saved at step 2 of 4 when it is hit; a second fault hits while it catches up."""
    return [
        event(0.0, Kind.RUN, phase="start"),
        *(event(float(s), Kind.COMMIT, step=s) for s in (1, 2, 3, 4)),
        event(4.5, Kind.CHAOS, phase="inject", subject="trainer-1"),
        event(5.0, Kind.RUN, phase="resume"),
        event(6.0, Kind.QUORUM),  # trainers are up, and wait for a batch
        event(8.0, Kind.PHASE, phase="rollout", name="rollout"),
        event(9.0, Kind.SEAL, step=3),
        event(10.0, Kind.COMMIT, step=3),
        event(10.2, Kind.CHAOS, phase="inject", subject="trainer-0"),
        event(11.0, Kind.RUN, phase="resume"),
        event(14.0, Kind.PHASE, phase="rollout", name="rollout"),
        event(15.0, Kind.SEAL, step=3),
        event(16.0, Kind.COMMIT, step=3),
        event(17.0, Kind.COMMIT, step=4),
        event(18.0, Kind.COMMIT, step=5),
    ]


RESTARTS = [Restart("trainer-1", 4.6, 4.7), Restart("trainer-0", 10.4, 10.5)]


def test_steps_behind_the_checkpoint_are_superseded_and_counted_once():
    found = rewound(a_restarted_job())
    commits = [(e.mono_s, e.step) for e in found if e.kind is Kind.COMMIT]
    assert commits == [(1.0, 1), (2.0, 2), (16.0, 3), (17.0, 4), (18.0, 5)]
    superseded = [
        (e.mono_s, e.data["from_step"], e.data["to_step"])
        for e in found
        if e.kind is Kind.SUPERSEDE
    ]
    assert superseded == [(5.0, 4, 2), (11.0, 3, 2)]
    assert [e.mono_s for e in found] == sorted(e.mono_s for e in found)


def test_a_life_that_goes_on_at_the_tip_supersedes_nothing():
    events = [
        event(0.0, Kind.RUN, phase="start"),
        event(1.0, Kind.COMMIT, step=1),
        event(2.0, Kind.RUN, phase="resume"),
        event(3.0, Kind.COMMIT, step=2),
    ]
    assert rewound(events) == events


def test_a_life_without_a_commit_changes_nothing():
    events = [
        event(0.0, Kind.RUN, phase="start"),
        event(1.0, Kind.COMMIT, step=1),
        event(2.0, Kind.RUN, phase="resume"),
        event(4.0, Kind.RUN, phase="resume"),
        event(5.0, Kind.COMMIT, step=1),
    ]
    found = rewound(events)
    assert [(e.mono_s, e.step) for e in found if e.kind is Kind.COMMIT] == [(5.0, 1)]


def test_phases_of_a_restart_are_in_sum_the_time_until_it_has_caught_up():
    phases = restart_phases(a_restarted_job(), RESTARTS)["job"]
    names = ["detect", "restart", "reconnect", "redo", "catch_up"]
    assert [list(p) for p in phases] == [names, names]
    # Of the first it counts until the step of before is committed again, whoever interrupts.
    assert list(phases[0].values()) == pytest.approx([0.1, 3.4, 1.0, 1.0, 7.0])
    assert list(phases[1].values()) == pytest.approx([0.2, 3.6, 1.0, 1.0, 1.0])
    assert restart_phases(a_restarted_job(), []) == {}


def test_an_exit_that_nobody_ordered_is_not_charged_from_the_injection_before_it():
    events = [e for e in a_restarted_job() if not (e.kind is Kind.CHAOS and e.mono_s > 10)]
    phases = restart_phases(events, RESTARTS)["job"]
    assert phases[1]["detect"] == 0 and phases[0]["detect"] == pytest.approx(0.1)


def test_of_outages_those_that_were_injected_and_are_over_count():
    def outage(name: str, **more) -> Outage:
        fields = {"detected_s": 1.1, "replaced_s": 1.2, "connected_s": 1.6, "until_s": 2.0}
        role = name.split("-")[0]
        return Outage(role, name, "x", 1.0, **{**fields, **more})

    found = outage_phases(
        [
            outage("trainer-0", injected="kill", done_s=2.0),
            outage("trainer-1", injected="kill"),
            outage("engine-0", done_s=2.0),
        ]
    )
    assert set(found) == {"trainer"} and len(found["trainer"]) == 1
    assert found["trainer"][0] == pytest.approx(
        {"detect": 0.1, "restart": 0.1, "reconnect": 0.4, "redo": 0.4}
    )


def test_the_time_in_which_a_restarted_job_is_dead_is_in_both_ratios():
    """One group, one step before the kill and one after: 2 of 10 s of work, 4 s of them dead."""

    def step(begin_s: float, step: int, pid: int) -> list[Event]:
        phases = ((0.0, "forward_backward"), (0.8, "optimizer"), (0.95, "report"), (1.0, "waiting"))
        told = [event(begin_s - 0.1, Kind.QUORUM, step=step, name="trainer-0")]
        told += [
            event(begin_s + at_s, Kind.PHASE, phase=phase, step=step, name="trainer-0")
            for at_s, phase in phases
        ]
        seal = event(begin_s, Kind.SEAL, step=step, name="rollout")
        commit = event(begin_s + 0.9, Kind.COMMIT, step=step, name="rollout")
        commit.data["shares"] = [["trainer-0", 1, 1]]
        return [seal, *(replace(e, role="trainer", pid=pid) for e in told), commit]

    events = [
        event(0.0, Kind.RUN, phase="start"),
        *step(1.0, 1, pid=2),
        event(2.5, Kind.CHAOS, phase="inject", subject="trainer-0", fault="kill"),
        # Ended by whoever starts it again: nobody tells of it.
        event(6.5, Kind.RUN, phase="resume"),
        *step(9.0, 2, pid=3),
    ]
    events = sorted(events, key=lambda e: e.mono_s)
    found = measure(rewound(events), whole_run=True)
    assert found.wall_s == found.slot_s == pytest.approx(9.9)
    assert found.strict.ratio == pytest.approx((1.0 + 0.9) / 9.9)
    assert found.paper.ratio <= 1 - (9.0 - 2.5) / 9.9
    lost_s = sum(s for causes in found.strict.lost_s.values() for s in causes.values())
    assert lost_s == pytest.approx(9.9 - 1.9)
