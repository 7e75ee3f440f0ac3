"""Engine states: the table, suspicion, and one event for each move."""

from __future__ import annotations

import itertools

import pytest

from torchtitan_rl_ft.observability.events import EventList
from torchtitan_rl_ft.serving.states import LEGAL, EngineState, IllegalTransition, StateMachine

S = EngineState


def machine_in(state: EngineState) -> StateMachine:
    machine = StateMachine("engine-0", EventList())
    machine.state = state
    return machine


@pytest.mark.parametrize(("old", "new"), list(itertools.product(S, S)))
def test_the_table_decides_every_move(old: EngineState, new: EngineState) -> None:
    machine = machine_in(old)
    if new in LEGAL[old]:
        machine.transition(new, "test")
        assert (machine.state, machine.reason) == (new, "test")
    else:
        with pytest.raises(IllegalTransition, match=f"{old} -> {new}"):
            machine.transition(new, "test")
        assert machine.state is old


def test_an_engine_serves_only_after_an_install() -> None:
    reaches_serving = {old for old in S if S.SERVING in LEGAL[old]}
    assert reaches_serving == {S.INSTALLING, S.PAUSED}
    assert all(S.RETIRED in LEGAL[old] for old in S if old is not S.RETIRED)
    assert not LEGAL[S.RETIRED]


@pytest.mark.parametrize("left", [S.STALE, S.STANDBY, S.SERVING, S.PAUSED])
def test_suspicion_returns_to_the_state_it_left(left: EngineState) -> None:
    machine = machine_in(left)
    machine.transition(S.SUSPECT, "probe failed")
    for other in set(S) - {left, S.RETIRED}:
        assert not machine.allows(other)
    machine.clear_suspicion("probe answered")
    assert machine.state is left
    machine.clear_suspicion("again")
    assert machine.state is left


def test_each_move_is_one_event() -> None:
    events = EventList()
    machine = StateMachine("engine-3", events)
    machine.transition(S.STALE, "up")
    machine.transition(S.INSTALLING, "version 4", version=4)
    assert events.events[-1] == {
        "kind": "transition",
        "cause": "version 4",
        "version": 4,
        "subject": "engine-3",
        "old": "stale",
        "new": "installing",
    }
    assert len(events.events) == 2
