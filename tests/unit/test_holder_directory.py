"""The directory of holders: who gives which part of a version to whom, and when nobody does."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_rl_ft.serving.directory import (
    FIRST_WAIT_S,
    LONGEST_WAIT_S,
    SILENT_S,
    Directory,
    Held,
    Lease,
    NotWanted,
    Replaced,
    Report,
    Superseded,
)
from torchtitan_rl_ft.weights.holder.settings import Key
from torchtitan_rl_ft.weights.pieces import Piece, Range, intersect, merge, subtract

NBYTES = 1200
ALL: list[Range] = [(0, NBYTES)]
V1, V2, V3 = Key(1, "a"), Key(2, "b"), Key(3, "c")


def told(
    name: str,
    *held: Held,
    pid: int = 1,
    start_time: float = 1.0,
    host: str = "h",
) -> Report:
    kind = "relay" if name.startswith("relay") else "source"
    return Report(name, kind, f"http://{name}", pid, start_time, host, held)


def part(key: Key, *ranges: Range, layout: str = "L", digest: str = "0") -> Held:
    pieces = tuple(Piece(start, end, digest * 32) for start, end in ranges)
    return Held(key, layout, whole=False, pieces=pieces)


def whole(key: Key, layout: str = "L") -> Held:
    return Held(key, layout, whole=True)


def opened(*keys: Key, limit_s: float = 60.0) -> Directory:
    directory = Directory(lease_limit_s=limit_s)
    for key in keys or (V1,):
        directory.want(key, "L", NBYTES)
    return directory


def givers(leases: list[Lease]) -> dict[str, list[Range]]:
    return {x.giver: list(x.ranges) for x in leases}


# Who gives --------------------------------------------------------------------------------------


def test_shards_come_from_the_ranks_that_hold_them_each_byte_once() -> None:
    """Two groups of two ranks: any group's will do."""
    directory = opened()
    for group in (0, 1):
        directory.report(told(f"source-{group}.0", part(V1, (0, 500))), 0.0)
        directory.report(told(f"source-{group}.1", part(V1, (500, NBYTES))), 0.0)
    directory.report(told("relay-0"), 0.0)
    directory.report(told("relay-1"), 0.0)
    first = directory.lease("relay-0", V1, ALL, 0.0)
    assert givers(first) == {"source-0.0": [(0, 500)], "source-0.1": [(500, NBYTES)]}
    second = directory.lease("relay-1", V1, ALL, 0.0)
    assert givers(second) == {"source-1.0": [(0, 500)], "source-1.1": [(500, NBYTES)]}
    assert directory.lease("relay-2", V1, ALL, 0.0) == []


def test_a_whole_relay_goes_before_sources_and_the_least_used_first() -> None:
    directory = opened()
    directory.report(told("source-0", part(V1, (0, NBYTES))), 0.0)
    for relay in ("relay-0", "relay-1", "relay-2"):
        directory.report(told(relay, *([] if relay == "relay-2" else [whole(V1)])), 0.0)
    seen = []
    for _ in range(4):
        (lease,) = directory.lease("relay-2", V1, ALL, 0.0)
        seen.append(lease.giver)
        directory.returned(lease.id, True, 0.0)
    assert seen == ["relay-0", "relay-1", "relay-0", "relay-1"]


def test_what_is_asked_again_is_not_being_given() -> None:
    """The answer to a request may be lost: its leases must not hold the givers up."""
    directory = opened()
    directory.report(told("source-0", part(V1, (0, NBYTES))), 0.0)
    directory.report(told("relay-0"), 0.0)
    (lost,) = directory.lease("relay-0", V1, ALL, 0.0)
    (again,) = directory.lease("relay-0", V1, ALL, 0.0)
    assert again.id != lost.id
    assert directory.leases() == [again]
    assert directory.lease("relay-0", V1, [(0, 10)], 0.0), "part of it as well"


def test_parts_under_way_stay_when_the_rest_is_asked_for() -> None:
    directory = opened()
    directory.report(told("source-0.0", part(V1, (0, 500))), 0.0)
    directory.report(told("relay-0"), 0.0)
    directory.lease("relay-0", V1, ALL, 0.0)
    directory.report(told("source-0.1", part(V1, (500, NBYTES))), 0.0)
    directory.lease("relay-0", V1, [(500, NBYTES)], 0.0)
    assert {x.giver for x in directory.leases()} == {"source-0.0", "source-0.1"}


def test_nobody_gives_what_was_not_published_or_is_of_another_layout() -> None:
    directory = opened()
    directory.report(told("relay-0"), 0.0)
    with pytest.raises(NotWanted):
        directory.lease("relay-0", V2, ALL, 0.0)
    directory.report(told("source-0", part(V1, (0, NBYTES), layout="other")), 0.0)
    assert directory.lease("relay-0", V1, ALL, 0.0) == []
    assert not directory.can_be_had(V1, 0.0)


def test_a_source_that_contradicts_another_gives_nothing_of_that_version() -> None:
    directory = opened()
    directory.report(told("relay-0"), 0.0)
    directory.report(told("source-0", part(V1, (0, 600), (600, NBYTES))), 0.0)
    directory.report(
        told("source-1", part(V1, (0, 600)), part(V2, (0, NBYTES)), pid=2),
        0.0,
    )
    assert directory.conflicts() == []
    directory.report(told("source-1", part(V1, (0, 600), digest="1"), pid=2), 0.0)
    assert directory.conflicts() == [("source-1", V1, "source-0")]
    leases = directory.lease("relay-0", V1, ALL, 0.0)
    assert {x.giver for x in leases} == {"source-0"}
    # The same process of the first one, started anew, may tell other sums.
    directory.report(told("source-0", part(V1, (0, 600), digest="2"), pid=9, start_time=2.0), 0.0)
    assert ("source-0", V1, "source-0") not in directory.conflicts()


# Who does not -----------------------------------------------------------------------------------


def test_a_silent_holder_is_asked_for_nothing_and_holds_nobody_up() -> None:
    directory = opened()
    directory.report(told("source-0", part(V1, (0, NBYTES))), 0.0)
    directory.report(told("relay-0"), 0.0)
    directory.report(told("relay-1"), 0.0)
    directory.lease("relay-0", V1, ALL, 0.0)
    late_s = SILENT_S + 0.1
    directory.report(told("relay-1"), late_s)
    assert directory.lease("relay-1", V1, ALL, late_s) == [], "source-0 is silent"
    directory.report(told("source-0", Held(V1, "L", False)), late_s)
    (lease,) = directory.lease("relay-1", V1, ALL, late_s)
    assert lease.giver == "source-0", "its lease of silent relay-0 is over"


def test_a_holder_that_failed_is_not_given_again_for_a_while_that_doubles() -> None:
    directory = opened()
    directory.report(told("source-0", part(V1, (0, NBYTES))), 0.0)
    now_s = 0.0

    def alive() -> None:
        directory.report(told("source-0", Held(V1, "L", False)), now_s)
        directory.report(told("relay-0"), now_s)

    waits = []
    for _ in range(9):
        alive()
        (lease,) = directory.lease("relay-0", V1, ALL, now_s)
        directory.returned(lease.id, False, now_s)
        failed_s = now_s
        while not directory.lease("relay-0", V1, ALL, now_s):
            now_s += 0.125
            alive()
        waits.append(now_s - failed_s)
    doubling = [FIRST_WAIT_S * 2**i for i in range(9)]
    assert waits == [min(LONGEST_WAIT_S, w) for w in doubling]
    (lease,) = directory.leases()
    directory.returned(lease.id, True, now_s)
    (lease,) = directory.lease("relay-0", V1, ALL, now_s)
    directory.returned(lease.id, False, now_s)
    now_s += FIRST_WAIT_S
    assert directory.lease("relay-0", V1, ALL, now_s), "a success begins anew"


@pytest.mark.row("M4")
def test_a_broken_receiver_keeps_no_holder_from_the_others() -> None:
    directory = opened()
    directory.report(told("source-0", part(V1, (0, NBYTES))), 0.0)
    for relay in ("relay-0", "relay-1", "relay-2"):
        directory.report(told(relay), 0.0)
    (lease,) = directory.lease("relay-0", V1, ALL, 0.0)
    directory.returned(lease.id, False, 0.0)
    assert directory.lease("relay-0", V1, ALL, 0.0) == []
    (lease,) = directory.lease("relay-1", V1, ALL, 0.0)
    directory.returned(lease.id, False, 0.0)
    assert directory.lease("relay-2", V1, ALL, 0.0) == [], "it fails several: its own fault"
    assert directory.lease("relay-2", V1, ALL, FIRST_WAIT_S)


def test_a_lease_has_a_limit() -> None:
    directory = opened(limit_s=3.0)
    directory.report(told("source-0", part(V1, (0, NBYTES))), 0.0)
    for relay in ("relay-0", "relay-1"):
        directory.report(told(relay), 0.0)
    directory.lease("relay-0", V1, ALL, 0.0)
    assert directory.lease("relay-1", V1, ALL, 3.0) == []
    (lease,) = directory.lease("relay-1", V1, ALL, 3.1)
    assert lease.giver == "source-0"


@pytest.mark.parametrize("again", ["gone", "another process"])
def test_a_process_that_ended_gives_and_takes_nothing(again: str) -> None:
    directory = opened()
    directory.report(told("source-0", part(V1, (0, NBYTES))), 0.0)
    directory.report(told("relay-0"), 0.0)
    directory.report(told("relay-1"), 0.0)
    (lease,) = directory.lease("relay-0", V1, ALL, 0.0)
    if again == "gone":
        directory.gone("relay-0")
    else:
        directory.report(told("relay-0", pid=7, start_time=2.0), 0.0)
    assert directory.returned(lease.id, True, 0.0) is None
    assert directory.lease("relay-1", V1, ALL, 0.0)
    directory.report(told("source-0", pid=7, start_time=2.0), 0.0)
    assert not directory.can_be_had(V1, 0.0), "the new process holds nothing"


def test_an_older_process_of_the_same_name_is_told_so() -> None:
    directory = opened()
    directory.report(told("source-0", pid=2, start_time=5.0), 0.0)
    with pytest.raises(Replaced):
        directory.report(told("source-0", pid=1, start_time=4.0), 0.0)
    directory.report(told("source-0", pid=1, start_time=4.0, host="other"), 0.0)


# Versions ---------------------------------------------------------------------------------------


def test_a_version_is_superseded_by_a_later_one_that_a_relay_holds() -> None:
    directory = opened(V1, V2)
    directory.report(told("source-0", part(V1, (0, NBYTES)), part(V2, (0, NBYTES))), 0.0)
    directory.report(told("relay-0"), 0.0)
    (lease,) = directory.lease("relay-0", V1, ALL, 0.0)
    directory.returned(lease.id, True, 0.0)
    directory.report(told("relay-1", whole(V2)), 0.0)
    with pytest.raises(Superseded):
        directory.lease("relay-0", V1, ALL, 0.0)
    assert directory.lease("relay-0", V2, ALL, 0.0)
    directory.want(V1, "L", NBYTES)  # it is current again
    assert directory.lease("relay-0", V1, ALL, 0.0)


def test_what_cannot_be_had_gives_way_to_what_was_wanted_later() -> None:
    directory = opened(V1)
    directory.report(told("relay-0"), 0.0)
    assert directory.lease("relay-0", V1, ALL, 0.0) == [], "its trainer may come back"
    directory.want(V2, "L", NBYTES)
    with pytest.raises(Superseded):
        directory.lease("relay-0", V1, ALL, 0.0)


def test_what_is_kept_and_known() -> None:
    directory = opened(V1, V2)
    answer = directory.report(told("relay-0", whole(V1)), 0.0, needed=[Key(0, "z")])
    assert answer.keep == [Key(0, "z"), V1, V2], "read here, newest there is, newest wanted"
    assert answer.known == [V1]
    answer = directory.report(told("source-0", Held(V2, "L", False)), 0.0, needed=[Key(0, "z")])
    assert (answer.keep, answer.known) == ([V2], []), "its pieces are to be told"
    answer = directory.report(told("source-0", part(V2, (0, NBYTES))), 0.0)
    assert answer.known == [V2]
    answer = directory.report(told("source-0", Held(V2, "L", False)), 0.0)
    assert answer.known == [V2]
    assert directory.can_be_had(V2, 0.0)


def test_leases_of_another_version_are_over_when_a_receiver_goes_on() -> None:
    """It may have died, or been told of the newer one, before it gave them back."""
    directory = opened(V1, V2)
    directory.report(told("source-0", part(V1, (0, NBYTES)), part(V2, (0, NBYTES))), 0.0)
    directory.report(told("relay-0"), 0.0)
    directory.report(told("relay-1"), 0.0)
    assert directory.lease("relay-0", V1, ALL, 0.0)
    assert not directory.lease("relay-1", V2, ALL, 0.0)
    [lease] = directory.lease("relay-0", V2, ALL, 0.0)
    assert directory.leases() == [lease]


def test_what_a_relay_has_by_its_last_report() -> None:
    directory = opened(V1, V2)
    directory.report(told("relay-0", whole(V1), whole(V2)), 0.0)
    assert directory.held("relay-0") == {V1, V2}
    directory.report(told("relay-0", whole(V2)), 0.0)
    assert directory.held("relay-0") == {V2}
    assert directory.held("relay-1") == set()


# Growth -----------------------------------------------------------------------------------------


def rounds_to_all(receivers: int, sources: int) -> int:
    """Transfers that all take one unit of time; who was served tells it at once."""
    directory = opened()
    for i in range(sources):
        directory.report(told(f"source-{i}", part(V1, (0, NBYTES))), 0.0)
    waiting = [f"relay-{i}" for i in range(receivers)]
    for name in waiting:
        directory.report(told(name), 0.0)
    rounds = 0
    while waiting:
        rounds += 1
        now_s = rounds * 0.001
        got = []
        for name in waiting:
            if leases := directory.lease(name, V1, ALL, now_s):
                assert merge(r for x in leases for r in x.ranges) == ALL
                got.append((name, leases))
        held = [x.giver for x in directory.leases()]
        assert len(held) == len(set(held))
        for name, leases in got:
            for lease in leases:
                directory.returned(lease.id, True, now_s)
            directory.report(told(name, whole(V1)), now_s)
            waiting.remove(name)
    return rounds


@pytest.mark.parametrize("sources", [1, 2])
@pytest.mark.parametrize("receivers", [1, 2, 3, 4, 7, 8, 16, 63, 64])
def test_receivers_are_served_in_logarithmically_many_rounds(receivers: int, sources: int) -> None:
    assert rounds_to_all(receivers, sources) == math.ceil(math.log2(receivers / sources + 1))


# Anything, in any order ---------------------------------------------------------------------------

RELAYS = ["relay-0", "relay-1", "relay-2"]
SOURCES = {"source-0.0": (0, 700), "source-0.1": (700, NBYTES), "source-1.0": (0, NBYTES)}
NAMES = [*RELAYS, *SOURCES]
KEYS = [V1, V2]

moves = st.one_of(
    st.tuples(st.just("tell"), st.sampled_from(NAMES), st.sampled_from(KEYS)),
    st.tuples(st.just("restart"), st.sampled_from(NAMES), st.sampled_from(KEYS)),
    st.tuples(st.just("lease"), st.sampled_from(RELAYS), st.sampled_from(KEYS)),
    st.tuples(st.just("return"), st.integers(0, 20), st.booleans()),
    st.tuples(st.just("wait"), st.sampled_from([0.1, 1.0, 6.0]), st.just(0)),
    st.tuples(st.just("want"), st.sampled_from(KEYS), st.just(0)),
    st.tuples(st.just("gone"), st.sampled_from(NAMES), st.just(0)),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(moves, max_size=60))
def test_no_holder_ever_has_two_leases_nor_gives_what_it_has_not(
    steps: list[tuple[str, str, object]],
) -> None:
    directory, now_s, pid = opened(V1), 0.0, 1
    pids: dict[str, int] = {}
    had: dict[str, dict[Key, list[Range]]] = {}
    heard_s: dict[str, float] = {}
    missing: dict[tuple[str, Key], list[Range]] = {}
    out: dict[str, Lease] = {}

    def tell(name: str) -> None:
        held = tuple(
            whole(key) if name in RELAYS else part(key, *ranges)
            for key, ranges in had.get(name, {}).items()
        )
        process = pids.setdefault(name, 1)
        directory.report(told(name, *held, pid=process, start_time=float(process)), now_s)
        heard_s[name] = now_s

    for what, first, second in steps:
        if what == "wait":
            now_s += float(first)
        elif what == "want":
            directory.want(first, "L", NBYTES)  # type: ignore[arg-type]
        elif what == "gone":
            directory.gone(first)
            heard_s.pop(first, None)
        elif what in ("tell", "restart"):
            if what == "restart":
                pid += 1
                pids[first] = pid
                had.pop(first, None)
                missing = {k: v for k, v in missing.items() if k[0] != first}
                out = {i: x for i, x in out.items() if first not in (x.giver, x.receiver)}
            if first in SOURCES:
                had.setdefault(first, {})[second] = [SOURCES[first]]  # type: ignore[index]
            tell(first)
        elif what == "lease":
            key = second
            wants = missing.get((first, key), list(ALL))  # type: ignore[arg-type]
            under_way = [
                r for x in out.values() if (x.receiver, x.key) == (first, key) for r in x.ranges
            ]
            wants = subtract(wants, under_way)
            if not wants:
                continue
            try:
                granted = directory.lease(first, key, wants, now_s)  # type: ignore[arg-type]
            except (Superseded, NotWanted):
                continue
            taken: list[Range] = []
            for lease in granted:
                assert lease.giver != first
                assert now_s - heard_s[lease.giver] <= SILENT_S
                ranges = list(lease.ranges)
                assert not intersect(ranges, taken), "no byte twice"
                taken += ranges
                assert not subtract(ranges, wants), "nothing that was not asked for"
                assert not subtract(ranges, had[lease.giver][key])  # type: ignore[index]
                out[lease.id] = lease
        elif what == "return" and out:
            lease = list(out.values())[int(first) % len(out)]
            del out[lease.id]
            directory.returned(lease.id, bool(second), now_s)
            if second:
                at = (lease.receiver, lease.key)
                missing[at] = subtract(missing.get(at, list(ALL)), lease.ranges)
                if not missing[at]:
                    had.setdefault(lease.receiver, {})[lease.key] = list(ALL)
        valid = {x.id: x for x in directory.leases()}
        assert len({x.giver for x in valid.values()}) == len(valid)
        out = {i: x for i, x in out.items() if i in valid}
