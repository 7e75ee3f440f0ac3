"""Which lines of metrics.jsonl count, of any history of commits and rewinds."""

from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl_ft.observability.metric_rows import committed_rows


def test_of_a_step_trained_again_the_last_row_counts():
    rows = [{"step": 1}, {"step": 2, "x": 1}, {"step": 3}, {"step": 2, "x": 2}]
    assert committed_rows(rows) == [{"step": 1}, {"step": 2, "x": 2}]


@given(st.lists(st.one_of(st.none(), st.integers(0, 6))))
def test_a_row_counts_when_no_later_one_goes_back_to_its_step(steps):
    rows = [{"step": step, "n": n} for n, step in enumerate(steps)]
    wanted = [
        row
        for n, row in enumerate(rows)
        if row["step"] is not None
        and all(later is None or later > row["step"] for later in steps[n + 1 :])
    ]
    assert committed_rows(rows) == wanted
