"""Pure decisions of serving: start budget, choice of an engine, answers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl_ft.serving.budget import LONGEST_DELAY_S, StartBudget
from torchtitan_rl_ft.serving.router import choose

# Budget -----------------------------------------------------------------------------------------


def test_the_first_restart_is_immediate_then_delays_double() -> None:
    budget = StartBudget(max_starts=6, window_s=100)
    delays = []
    for second in range(6):
        delays.append(budget.delay_s(second))
        budget = budget.started(second)
    assert delays == [0.0, 0.0, 0.5, 1.0, 2.0, 4.0]
    assert budget.delay_s(6) is None
    assert budget.delay_s(100.5) is not None  # the first start has left the window


@given(st.lists(st.floats(0, 50), max_size=40), st.integers(1, 8), st.floats(1, 100))
def test_never_more_starts_than_allowed_in_a_window(
    gaps: list[float], max_starts: int, window_s: float
) -> None:
    budget, now, starts = StartBudget(max_starts, window_s), 0.0, []
    for gap in gaps:
        now += gap
        delay = budget.delay_s(now)
        if delay is None:
            continue
        assert 0 <= delay <= LONGEST_DELAY_S
        budget = budget.started(now)
        starts.append(now)
        assert sum(now - s < window_s for s in starts) <= max_starts


# Choice -----------------------------------------------------------------------------------------


@dataclass
class Candidate:
    slot: int
    in_flight: int


@pytest.mark.parametrize(
    ("loads", "avoid", "chosen"),
    [
        ([], set(), None),
        ([3], set(), 0),
        ([3, 1, 2], set(), 1),
        ([2, 2, 2], set(), 0),
        ([3, 1, 2], {1}, 2),
        ([3, 1], {0, 1}, 1),  # none other is left
    ],
)
def test_choice(loads: list[int], avoid: set[int], chosen: int | None) -> None:
    engines = [Candidate(i, load) for i, load in enumerate(loads)]
    found = choose(engines, avoid)
    assert (found.slot if found else None) == chosen
