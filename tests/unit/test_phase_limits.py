"""When a rank is wedged, and what limits are learned: tables."""

import re
import shutil
import time
from pathlib import Path

import pytest

import torchtitan_rl_ft
from torchtitan_rl_ft.host.phase_file import (
    TRAINER_PHASES,
    PhaseFile,
    PhaseRecord,
    path_of,
    read,
    records,
)
from torchtitan_rl_ft.host.phase_limits import (
    UNLIMITED,
    Limits,
    Observed,
    calculate,
    judge,
    parse_phase_timeouts,
    waiting_limits,
)
from torchtitan_rl_ft.host.regroup import RESTARTING

WAITING = waiting_limits(batch_wait_timeout_s=600, quorum_timeout_s=300, manager_timeout_s=60)
LIMITS = Limits(
    default_s=600,
    silence_s=60,
    waiting_s=WAITING,
    configured_s={"reduce": 20.0, "first_reduce": 90.0},
    learned_s={"reduce": 5.0, "commit": 10.0, "first_commit": 50.0},
)


def record(phase="reduce", **fields):
    fields = {"settled": True, "host": "h", **fields}
    return PhaseRecord(name="trainer-0", rank="0", pid=1, start_time=1.0, phase=phase, **fields)


@pytest.mark.parametrize(
    ("key", "limit"),
    [
        ("reduce", (20.0, "configured")),
        ("first_reduce", (90.0, "configured")),
        ("commit", (10.0, "learned")),
        ("first_commit", (50.0, "learned")),
        ("waiting_for_batch", (660.0, "of a wait")),
        ("first_waiting_for_batch", (660.0, "of a wait")),
        ("quorum", (480.0, "of a wait")),
        ("standby", (UNLIMITED, "of a wait")),
        ("checkpoint", (600, "recovery.phase_timeout_s")),
        ("first_forward_backward", (600, "recovery.phase_timeout_s")),
    ],
)
def test_limit_of_a_phase(key, limit):
    assert LIMITS.of(key) == limit


@pytest.mark.parametrize(
    ("phase", "still_s", "silent_s", "settled", "reason"),
    [
        ("reduce", 19.0, 0.0, True, None),
        ("reduce", 21.0, 0.0, True, "21.0 s in phase reduce"),
        ("reduce", 21.0, 0.0, False, None),  # a first step has its own
        ("waiting_for_batch", 650.0, 1.0, True, None),  # waiting is a state, not a fault
        ("waiting_for_batch", 61.0, 61.0, True, "no sign of life for 61.0 s"),
        ("standby", 1e6, 1.0, False, None),
        ("standby", 61.0, 61.0, False, "no sign of life"),
        ("starting", 599.0, 1.0, False, None),
    ],
)
def test_verdict(phase, still_s, silent_s, settled, reason):
    late = judge(Observed(record(phase, settled=settled), still_s, silent_s), LIMITS)
    assert late is None if reason is None else late.reason.startswith(reason)


@pytest.mark.parametrize(
    ("marks", "beats", "still_s", "silent_s"),
    [(1, 1, 3.0, 3.0), (1, 2, 3.0, 0.0), (2, 1, 0.0, 0.0), (2, 2, 0.0, 0.0)],
)
def test_only_counters_that_stand_still_are_held_against_a_rank(marks, beats, still_s, silent_s):
    before = Observed(record(marks=1, beats=1), 2.0, 2.0)
    after = before.seen(record(marks=marks, beats=beats), 1.0)
    assert (after.still_s, after.silent_s) == (still_s, silent_s)


@pytest.mark.parametrize(
    ("longest_s", "count", "stretch", "limit_s"),
    [
        ({"reduce": 4.0}, 5, {}, {"reduce": 20.0}),
        ({"reduce": 0.01}, 500, {}, {"reduce": 10.0}),  # the floor
        ({"reduce": 4.0}, 4, {}, {}),  # seen too rarely
        ({"reduce": 4.0}, 9, {"reduce": 2.0}, {"reduce": 40.0}),  # it has ended a rank before
        ({"first_reduce": 30.0}, 1, {}, {"first_reduce": 150.0}),
        ({"starting": 12.0}, 1, {}, {"starting": 60.0}),
        ({"quorum": 0.01, "waiting_for_batch": 0.1}, 500, {}, {}),  # never of a legal wait
        ({"first_quorum": 0.01, "standby": 3.0}, 500, {}, {}),
        ({}, 0, {}, {}),
    ],
)
def test_learned_limits(longest_s, count, stretch, limit_s):
    counts = dict.fromkeys(longest_s, count)
    assert calculate(longest_s, counts, waiting=WAITING, stretch=stretch) == limit_s


def test_configured_limits_are_phase_and_seconds():
    assert parse_phase_timeouts(["reduce=20", "first_reduce=1.5"]) == {
        "reduce": 20.0,
        "first_reduce": 1.5,
    }
    for bad in ("reduce", "reduce=", "reduce=-1", "=3", "reduce=soon", "reduce=inf"):
        with pytest.raises(ValueError, match="PHASE=SECONDS"):
            parse_phase_timeouts([bad])


def test_the_phases_that_may_be_limited_are_those_that_a_trainer_enters():
    trainer = Path(torchtitan_rl_ft.__file__).parent / "trainer"
    entered = {
        phase
        for file in trainer.glob("*.py")
        for phase in re.findall(r'enter\("(\w+)"', file.read_text())
    }
    assert entered | {RESTARTING} == set(TRAINER_PHASES)


def test_a_file_tells_phase_and_what_phases_took(tmp_path):
    file = PhaseFile(tmp_path, "trainer-1", "0")
    steps = [
        "waiting_for_batch",
        "quorum",
        "reduce",
        "reduce",
        "report",
        "waiting_for_batch",
        "reduce",
    ]
    for i, phase in enumerate(steps):
        file.enter(phase, 1 + i // 5)
    (found,) = records(tmp_path)
    assert (found.name, found.rank, found.phase, found.step) == ("trainer-1", "0", "reduce", 2)
    assert found.marks == len(steps) and found.settled and found.id.alive()
    assert found.counts == {
        "starting": 1,
        **dict.fromkeys(("first_waiting_for_batch", "first_quorum", "first_reduce"), 1),
        "first_report": 1,
        "waiting_for_batch": 1,
    }
    file.beat()
    assert read(path_of(tmp_path, found.pid)).beats == 1
    file.start_again(generation=1)
    again = read(path_of(tmp_path, found.pid))
    assert (again.phase, again.settled, again.generation) == ("starting", False, 1)
    file.close()
    assert not list(tmp_path.iterdir())
    file.enter("reduce", 1)  # after the end: nothing


def test_a_torn_record_is_none_and_files_of_the_dead_are_removed(tmp_path):
    file = PhaseFile(tmp_path, "trainer-1", "0")
    (whole,) = records(tmp_path)
    data = whole.encode()
    assert PhaseRecord.decode(data) == whole
    assert PhaseRecord.decode(data[:60] + b"9" + data[61:]) is None
    assert PhaseRecord.decode(b"") is None
    dead = record(host=whole.host)
    path_of(tmp_path, 1).write_bytes(dead.encode())
    assert list(records(tmp_path)) == [whole]
    assert not path_of(tmp_path, 1).exists()
    file.close()


def test_telling_a_phase_is_cheap(tmp_path):
    file = PhaseFile(tmp_path, "trainer-1", "0")
    took_s = []
    for i in range(400):
        began = time.perf_counter()
        file.enter(("reduce", "commit", "optimizer", "report", "quorum")[i % 5], i)
        took_s.append(time.perf_counter() - began)
    file.close()
    # The middle one: what it costs, not what a busy machine adds. A step has some ten.
    assert sorted(took_s)[len(took_s) // 2] < 200e-6


def test_a_phase_file_that_is_removed_by_hand_is_there_again_at_the_next_beat(tmp_path):
    file = PhaseFile(tmp_path / "phases", "trainer-0", "0")
    file.enter("reduce", 3)
    shutil.rmtree(tmp_path / "phases")
    file.beat()
    (record,) = records(tmp_path / "phases")
    assert (record.name, record.phase, record.step) == ("trainer-0", "reduce", 3)
    file.close()
    assert not list((tmp_path / "phases").iterdir())
