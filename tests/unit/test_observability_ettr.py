"""ETTR, first form, against hand computations."""

import pytest

from torchtitan_rl_ft.observability.ettr import ettr
from torchtitan_rl_ft.observability.events import Event, Kind


def event(at_s, kind, **fields):
    base = {"wall_s": 1e9 + at_s, "mono_s": at_s, "run": "r", "role": "x", "name": "x"}
    return Event(**{**base, "attempt": 1, "pid": 1, "kind": kind, **fields})


START = event(100.0, Kind.RUN, phase="start")
WORK = event(110.0, Kind.ISSUE)


def commit(at_s, step):
    return event(at_s, Kind.COMMIT, step=step)


def test_no_commit_has_no_ratio():
    assert ettr([START, WORK]) is None


def test_undisturbed_run_loses_only_its_startup():
    found = ettr([START, WORK, commit(112.0, 1), commit(114.0, 2), commit(116.0, 3)])
    assert (found.wall_s, found.startup_s, found.productive_s) == (16.0, 10.0, 6.0)
    assert (found.lost_s, found.step_s, found.steps) == (0.0, 2.0, 3)
    assert found.ratio == pytest.approx(6 / 16)
    assert found.after_startup == 1.0


@pytest.mark.parametrize("kind", [Kind.FAULT, Kind.RESTART, Kind.REFUSE, Kind.HEAL])
def test_excess_of_a_disturbed_step_is_lost(kind):
    disturbance = event(115.0, kind)
    found = ettr([START, WORK, commit(112.0, 1), commit(114.0, 2), disturbance, commit(121.0, 3)])
    assert (found.productive_s, found.lost_s) == (6.0, 5.0)


def test_step_that_was_disturbed_but_quick_counts_as_it_is():
    found = ettr([START, WORK, commit(114.0, 1), event(115.0, Kind.FAULT), commit(117.0, 2)])
    assert (found.productive_s, found.lost_s) == (7.0, 0.0)


def test_superseded_steps_count_once():
    events = [START, WORK, commit(112.0, 1), commit(114.0, 2), commit(116.0, 3)]
    events += [event(117.0, Kind.SUPERSEDE, data={"from_step": 3, "to_step": 1})]
    events += [commit(120.0, 2), commit(122.0, 3)]
    found = ettr(events)
    # 2 s each for steps 1, 2 (disturbed: the median) and 3; the 4 s done twice and 2 s are lost.
    assert (found.steps, found.productive_s, found.lost_s) == (3, 6.0, 6.0)


def test_only_the_last_life_counts():
    earlier = [START, WORK, commit(112.0, 1), event(113.0, Kind.RUN, phase="end")]
    later = [event(500.0, Kind.RUN, phase="resume"), event(505.0, Kind.BEGIN), commit(506.0, 2)]
    found = ettr(earlier + later)
    assert (found.wall_s, found.startup_s, found.productive_s, found.steps) == (6.0, 5.0, 1.0, 1)


def test_order_of_lines_does_not_matter():
    events = [START, WORK, commit(112.0, 1), event(113.0, Kind.FAULT), commit(117.0, 2)]
    shuffled = [events[i] for i in (0, 3, 1, 4, 2)]
    assert ettr(shuffled) == ettr(events)


def test_parts_sum_to_the_wall_time():
    events = [START, WORK, commit(113.0, 1), event(114.0, Kind.FAULT), commit(121.0, 2)]
    found = ettr(events)
    assert found.startup_s + found.productive_s + found.lost_s == pytest.approx(found.wall_s)
