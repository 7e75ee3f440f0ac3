"""Whose place is lent, and that a loan outlives the serving role. Pure but for the file."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl_ft.run_folder import ProcessId
from torchtitan_rl_ft.serving.adoption import LENT, inherit
from torchtitan_rl_ft.serving.duties import TAKES_VERSIONS, Duty
from torchtitan_rl_ft.serving.engine_records import EngineRecord, ProcessRecord
from torchtitan_rl_ft.serving.lending import Candidate, NotLent, choose
from torchtitan_rl_ft.serving.loans import Loan, Loans, LoansCorrupt

A, S, X, Q = Duty.ACTIVE, Duty.STANDBY, Duty.EXTERNAL, Duty.QUARANTINED


@pytest.mark.parametrize(
    ("candidates", "floor", "lent"),
    [
        # The last of equals, so that slot 0 stays what it is.
        ([Candidate(0, A, True, True), Candidate(1, A, True, True)], 1, 1),
        ([Candidate(0, A, True, True, 2), Candidate(1, A, True, True, 5)], 1, 0),
        # A place without a living engine costs nothing ...
        ([Candidate(0, A, True, False), Candidate(1, A, True, True)], 1, 0),
        # ... and a standby's less than that.
        ([Candidate(0, A, True, False), Candidate(1, A, True, True), Candidate(2, S, True, True)],
         1, 2),
        ([Candidate(0, A, True, True), Candidate(1, S, True, True)], 1, 1),
        # Those of others keep the floor.
        ([Candidate(0, A, True, True), Candidate(1, X, False, True)], 1, 0),
    ],
)  # fmt: skip
def test_chosen(candidates: list[Candidate], floor: int, lent: int) -> None:
    assert choose(candidates, floor) == lent


@pytest.mark.parametrize(
    ("candidates", "floor", "reason"),
    [
        ([Candidate(0, A, True, True)], 1, "1 engines are up, and rollout.min_engines is 1"),
        ([Candidate(0, A, True, True), Candidate(1, A, True, False)], 2, "1 engines are up"),
        ([Candidate(0, X, False, True), Candidate(1, Q, False, False)], 0, "no engine"),
    ],
)
def test_not_lent(candidates: list[Candidate], floor: int, reason: str) -> None:
    with pytest.raises(NotLent, match=reason):
        choose(candidates, floor)


@given(
    st.lists(
        st.tuples(st.sampled_from([A, S, X, Q]), st.booleans(), st.booleans(), st.integers(0, 3)),
        min_size=1,
        max_size=8,
    ),
    st.integers(0, 4),
)
def test_the_floor_is_kept(given_: list[tuple[Duty, bool, bool, int]], floor: int) -> None:
    candidates = [
        Candidate(i, duty, lendable and duty in (A, S), live, busy)
        for i, (duty, lendable, live, busy) in enumerate(given_)
    ]
    try:
        lent = choose(candidates, floor)
    except NotLent:
        return
    assert candidates[lent].lendable
    left = [c for c in candidates if c.live and c.duty in TAKES_VERSIONS and c.index != lent]
    assert len(left) >= floor or candidates[lent].duty is S


def test_loans_come_back_as_they_were_made(tmp_path: Path) -> None:
    path = tmp_path / "loans.json"
    loans = Loans(path)
    assert loans.read() == {}
    loans.put(Loan(1, "job", "trainer-1"))
    loans.put(Loan(0, "job", ""))
    again = Loans(path)
    assert again.read() == {0: Loan(0, "job", ""), 1: Loan(1, "job", "trainer-1")}
    held = again.read()
    again.remove(held[0])
    assert list(Loans(path).read()) == [1]
    anew = Loan(0, "job", "")
    again.put(anew)
    again.remove(held[0])  # late: the place has been lent again
    assert list(Loans(path).read()) == [0, 1]
    again.remove(anew)
    path.unlink()
    again.save()
    assert list(Loans(path).read()) == [1]


@pytest.mark.parametrize("text", ["{", '[{"slot": 0}]', "[3]"])
def test_loans_that_cannot_be_read_say_what_to_do(tmp_path: Path, text: str) -> None:
    path = tmp_path / "loans.json"
    path.write_text(text)
    with pytest.raises(LoansCorrupt, match=r"loans\.json cannot be read .* remove the file"):
        Loans(path).read()


def test_no_engine_is_taken_over_where_a_trainer_may_be() -> None:
    """The role that lent the place may have died before the engine's end."""
    me = ProcessId.current()
    process = ProcessRecord(me, Path("/log"))
    record = EngineRecord(0, "u", "f", (process,), frozenset({me}), Path("/s"), frozenset())
    found = inherit([record], {0: "f"}, lent={0})
    assert found.rejected == [(record, LENT)] and not found.adopted
