"""Observed MTBF and the optimum save interval, against hand computations."""

import math

import pytest

from torchtitan_rl_ft.observability.events import Event, Kind
from torchtitan_rl_ft.observability.save_interval import (
    advice_lines,
    optimum_interval_s,
    save_advice,
)


def event(at_s, kind, name="supervisor", pid=1, **fields):
    base = {"wall_s": 1e9 + at_s, "mono_s": at_s, "run": "r", "name": name, "attempt": 1}
    return Event(**{**base, "role": name.partition("-")[0], "pid": pid, "kind": kind, **fields})


def died(at_s, subject):
    return event(at_s, Kind.EXIT, phase="fault", data={"subject": subject})


def phase(at_s, name, what, step):
    return event(at_s, Kind.PHASE, name, phase=what, step=step)


def test_the_formula():
    assert optimum_interval_s(2.0, 100.0) == pytest.approx(20.0)


def test_nothing_seen_advises_nothing():
    assert save_advice([]) is None
    found = save_advice([event(0.0, Kind.RUN, phase="start"), event(9.0, Kind.COMMIT, step=1)])
    assert (found.mtbf_s, found.save_cost_s, found.interval_s) == (None, None, None)
    assert advice_lines(found) == ["MTBF: no fault in 9 s"]


def test_from_faults_saves_and_steps_of_all_lives():
    first = [
        event(0.0, Kind.RUN, phase="start"),
        *(event(10.0 + 2 * k, Kind.COMMIT, "rollout", step=k) for k in range(4)),
        # Both groups ask; one saves, for 0.5 s.
        phase(17.0, "trainer-0", "checkpoint", 4),
        phase(17.0, "trainer-1", "checkpoint", 4),
        phase(17.01, "trainer-1", "waiting_for_batch", 4),
        phase(17.5, "trainer-0", "waiting_for_batch", 4),
        event(17.6, Kind.CHECKPOINT, "rollout", step=3),
        # Asked for, not saved.
        phase(18.0, "trainer-0", "checkpoint", 5),
        phase(27.0, "trainer-0", "quorum", 5),
        died(30.0, "trainer-1"),
        died(35.0, "engine-0"),
        event(40.0, Kind.COMMIT, "rollout", step=4),
    ]
    # The supervisor was killed; the clock begins anew.
    # At the end of the second life every process was signalled.
    second = [
        event(5.0, Kind.RUN, phase="resume"),
        died(64.0, "serving"),
        event(64.2, Kind.STOP, "rollout", cause="SIGTERM"),
        event(65.0, Kind.RUN, phase="end"),
    ]
    found = save_advice([*first, *second])
    assert found.wall_s == 100.0
    assert found.faults == {"trainer": 1, "engine": 1, "supervisor": 1}
    assert found.mtbf_s == pytest.approx(100 / 3)
    assert (found.save_cost_s, found.state_mtbf_s, found.step_s) == (0.5, 50.0, 2.0)
    assert found.interval_s == pytest.approx(math.sqrt(2 * 0.5 * 50.0))
    assert found.interval_steps == 4
    assert advice_lines(found) == [
        "MTBF 33 s (engine 1, supervisor 1, trainer 1 in 100 s)",
        "a save costs 0.50 s, trainers fail every 50 s: save every 7 s (checkpoint.interval 4)",
    ]
