"""Lines of several processes, put in the order of the clock."""

from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl_ft.observability.event_order import DISORDER_S, InOrder
from torchtitan_rl_ft.observability.events import Event, Kind


def event(mono_s, n, kind=Kind.PHASE):
    return Event(wall_s=0.0, mono_s=mono_s, run="r", role="rollout", name="rollout", attempt=1,
                 pid=n, kind=kind)  # fmt: skip


def order(events):
    made = InOrder()
    return [e for given_ in events for e in made.add(given_)] + list(made.rest())


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 0.99 * DISORDER_S)), max_size=40))
def test_a_line_that_comes_late_is_put_where_it_belongs(moments):
    """Each is written a while after it happened."""
    by_time = sorted(moments)
    events = [event(at_s, n) for n, (at_s, _) in enumerate(by_time)]
    written = sorted(events, key=lambda e: e.mono_s + by_time[e.pid][1])
    assert [e.mono_s for e in order(written)] == [e.mono_s for e in events]
    assert sorted(e.pid for e in order(written)) == list(range(len(events)))


def test_a_life_is_in_order_for_itself():
    """The clock of the next one may begin anew."""
    first, begin, second = event(500.0, 1), event(3.0, 2, Kind.RUN), event(2.9, 3)
    made = InOrder()
    assert list(made.add(first)) == []
    assert list(made.add(begin)) == [first, begin]
    assert list(made.add(second)) == [] and list(made.rest()) == [second]


def test_what_is_old_enough_is_not_kept_back():
    made = InOrder()
    assert list(made.add(event(1.0, 1))) == []
    assert [e.pid for e in made.add(event(1.0 + DISORDER_S, 2))] == [1]
