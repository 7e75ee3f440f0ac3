"""Pure decisions about slots: who is promoted, when a replacement joins, what is adopted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl_ft.config.sections import RolloutSection
from torchtitan_rl_ft.run_folder import ProcessId
from torchtitan_rl_ft.serving.adoption import inherit, inherited_duties
from torchtitan_rl_ft.serving.duties import Boundary, Duty, Place, Promotion, promotions
from torchtitan_rl_ft.serving.engine_records import (
    EngineRecord,
    EngineRecords,
    Memory,
    ProcessRecord,
    RecordsCorrupt,
)
from torchtitan_rl_ft.serving.groups import slot_plans

A, S, Q = Duty.ACTIVE, Duty.STANDBY, Duty.QUARANTINED


@pytest.mark.row("C12")
@pytest.mark.parametrize(
    ("places", "promoted"),
    [
        # Nobody is lost: nobody moves.
        ([Place(0, A), Place(1, S, ready=True)], []),
        # A lost engine is replaced by the lowest standby that is up.
        ([Place(0, A, lost=True), Place(1, A), Place(2, S, ready=True)], [(0, 2)]),
        ([Place(0, A, lost=True), Place(1, S), Place(2, S, ready=True)], [(0, 2)]),
        ([Place(0, A, lost=True), Place(1, S)], []),
        # Two losses, one standby.
        ([Place(0, A, lost=True), Place(1, A, lost=True), Place(2, S, ready=True)], [(0, 2)]),
        # A slot that is given up takes one that still starts, if there is no better.
        ([Place(0, A, usable=False), Place(1, S)], [(0, 1)]),
        ([Place(0, A, usable=False), Place(1, S), Place(2, S, ready=True)], [(0, 2)]),
        ([Place(0, A, usable=False), Place(1, S, usable=False)], []),
        ([Place(0, Q, usable=False), Place(1, A), Place(2, S, ready=True)], []),
        # Groups keep to themselves.
        ([Place(0, A, lost=True, group="a"), Place(1, S, ready=True, group="b")], []),
    ],
)
def test_promotions(places: list[Place], promoted: list[tuple[int, int]]) -> None:
    assert promotions(places) == [Promotion(*p) for p in promoted]


@st.composite
def pools(draw: st.DrawFn) -> list[Place]:
    size = draw(st.integers(1, 8))
    duties = draw(st.lists(st.sampled_from([A, S, Q]), min_size=size, max_size=size))
    flags = st.booleans()
    return [
        Place(i, d, lost=draw(flags), ready=draw(flags), usable=draw(flags))
        for i, d in enumerate(duties)
    ]


@given(pools())
def test_a_promotion_never_takes_a_working_engine_out(places: list[Place]) -> None:
    found = promotions(places)
    by_index = {p.index: p for p in places}
    for promotion in found:
        replaced, promoted = by_index[promotion.replaced], by_index[promotion.promoted]
        assert replaced.duty is A and (replaced.lost or not replaced.usable)
        assert promoted.duty is S and promoted.usable
        assert promoted.ready or not replaced.usable
    assert len({p.promoted for p in found}) == len({p.replaced for p in found}) == len(found)


@pytest.mark.row("C3")
@pytest.mark.parametrize(
    ("refill", "version", "others", "start", "join"),
    [
        ("at_once", 7, 1, True, True),
        ("at_boundary", 7, 1, True, False),
        ("at_boundary", 8, 1, True, True),
        ("before_update", 7, 1, False, False),
        ("before_update", 8, 1, True, True),
        # Too few are left: the next version would never come.
        ("at_boundary", 7, 0, True, True),
        ("before_update", 7, 0, True, True),
    ],
)
def test_boundaries(refill: str, version: int, others: int, start: bool, join: bool) -> None:
    boundary = Boundary(refill, lost_at=7)
    assert boundary.may_start(version, others, floor=1) is start
    assert boundary.may_join(version, others, floor=1) is join


# Records ----------------------------------------------------------------------------------------


def record(slot: int, of: ProcessId, **fields: object) -> EngineRecord:
    return EngineRecord(
        **{
            "slot": slot,
            "url": "http://127.0.0.1:1",
            "fingerprint": "f",
            "processes": (ProcessRecord(of, Path("/log")),),
            "members": frozenset({of}),
            "scratch": Path("/scratch"),
            "shared_memory": frozenset({Path("/dev/shm/psm_x")}),
            **fields,
        }  # type: ignore[arg-type]
    )


def test_living_engines_that_fit_are_adopted() -> None:
    me = ProcessId.current()
    stranger = ProcessId(os.getpid(), me.start_time - 10)  # our pid, another process
    records = [
        record(0, me),
        record(1, stranger),
        record(2, me, fingerprint="g"),
        record(7, me),
    ]
    found = inherit(records, {0: "f", 1: "f", 2: "f", 3: "f"})
    assert list(found.adopted) == [0]
    assert {r.slot: reason for r, reason in found.rejected} == {
        1: "it has ended meanwhile",
        2: "it would be started with another command line now",
        7: "there is no such slot any more",
    }
    assert not found.memory_lent


def test_memory_that_engines_have_given_up_stays_the_trainers() -> None:
    """One that may still hold it, or not, is ended: no start can take it either."""
    me = ProcessId.current()
    found = inherit([record(0, me, memory=Memory.RELEASED), record(1, me)], {0: "f", 1: "f"})
    assert sorted(found.adopted) == [0, 1] and found.memory_lent
    found = inherit([record(0, me, memory=Memory.RELEASING)], {0: "f"})
    assert not found.adopted and found.memory_lent
    assert "whether it has cannot be told" in found.rejected[0][1]


@pytest.mark.parametrize(
    ("adopted", "expected"),
    [
        ({}, [A, A, S]),
        ({0: A, 1: A, 2: S}, [A, A, S]),
        ({0: A, 1: S, 2: A}, [A, S, A]),  # a promotion is not undone
        ({0: A, 2: A}, [A, S, A]),  # the lost one stands by
        ({0: A, 2: S}, [A, A, S]),  # ... unless there is one: that takes over at once
        ({0: A, 1: A, 2: A}, [A, A, S]),  # counts are as configured
        ({0: S, 1: S, 2: S}, [A, A, S]),
    ],
)
def test_adopted_engines_keep_their_duties(adopted: dict[int, Duty], expected: list[Duty]) -> None:
    plans = slot_plans(RolloutSection(engines=2, standby_engines=1))
    me = ProcessId.current()
    records = {slot: record(slot, me, duty=str(duty)) for slot, duty in adopted.items()}
    assert list(inherited_duties(plans, records).values()) == expected


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "engines.json"
    assert EngineRecords(path).read() == []
    written = [record(i, ProcessId.current()) for i in (0, 10)]
    records = EngineRecords(path)
    for each in written:
        records.put(each)
    assert EngineRecords(path).read() == written
    records.remove(0)
    assert EngineRecords(path).read() == written[1:]
    later = EngineRecords(path)
    later.keep([written[0]])
    assert EngineRecords(path).read() == written[:1]


@pytest.mark.parametrize("text", ["{", "[]", '{"0": {"slot": 0}}', '{"0": 3}'])
def test_records_that_cannot_be_read_say_what_to_do(tmp_path: Path, text: str) -> None:
    path = tmp_path / "engines.json"
    path.write_text(text)
    with pytest.raises(RecordsCorrupt, match=r"engines\.json cannot be read .* remove the file"):
        EngineRecords(path).read()
