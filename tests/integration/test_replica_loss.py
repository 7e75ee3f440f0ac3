"""Trainer groups are killed at every point of a step; the others go on, and all end up equal."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from ettr_by_hand import strict_by_hand
from trainer_run import TrainerRun, assert_each_step_once, assert_groups_equal, steps_of

from torchtitan_rl_ft.journal.checkpoints import flaw
from torchtitan_rl_ft.observability.ettr import measure
from torchtitan_rl_ft.observability.events import read_events

pytestmark = pytest.mark.timeout(400)

STALL_LIMIT_S = 12.0
"""Heartbeat timeout 1 s, join timeout 1 s, and a loaded machine."""

GROUP_TIMEOUT_MS = 50_000
"""Nobody waits for the collectives' timeout."""

SLOWLY = ("--slow-s", "0.05")
"""Fewer steps while a group starts: what they leave behind is read again and again."""

PAIRS = (
    ("waiting_for_batch", "quorum"),
    ("forward_backward", "reduce"),
    ("optimizer", "commit"),
    ("report", "publish"),
    ("checkpoint", "reduce"),
)
"""Where the first of three groups is killed, and where the second one then is."""


def stall_s(run: TrainerRun, killed_s: float, left: int) -> float:
    """From the kill until the first commit of `left` groups."""

    def first() -> list[float]:
        commits = run.events("commit")
        after = [e for e in commits if e["mono_s"] > killed_s]
        return [e["mono_s"] for e in after if e["data"]["participants"] == left]

    run.wait_for(first, f"a commit of the {left} groups that are left")
    return first()[0] - killed_s


def wait_all(run: TrainerRun, steps: int = 5) -> None:
    """Until all groups have trained the last steps."""

    def all_in() -> bool:
        rows = run.metrics()[-steps:]
        return len(rows) == steps and all(r["participants"] == run.groups for r in rows)

    run.wait_for(all_in, "all groups to train")


def savers(run: TrainerRun) -> list[int]:
    return [e["data"]["saved_by"] for e in run.events("checkpoint")]


def wait_checkpoint(run: TrainerRun) -> None:
    before = len(savers(run))
    run.wait_for(lambda: len(savers(run)) > before, "a checkpoint")


@pytest.fixture(scope="module")
def three_groups(tmp_path_factory) -> Iterator[tuple[TrainerRun, list[tuple[str, int, float]]]]:
    """A run in which two of three groups were killed, one after the other, at each point, and
    started again. With it the stalls: point, groups left, seconds."""
    keys = {
        "fault_tolerance__process_group_timeout_ms": GROUP_TIMEOUT_MS,
        "checkpoint__interval": 10,
        "checkpoint__keep_latest_k": 0,
    }
    stalls = []
    path = tmp_path_factory.mktemp("three_groups") / "run"
    with TrainerRun(path, steps=100_000, groups=3, forked=True, **keys) as run:
        run.start_all(host_args=SLOWLY)
        for first, second in PAIRS:
            wait_all(run)
            wait_checkpoint(run)
            # The group that saves goes first: the duty has to move.
            saver = savers(run)[-1]
            other = (saver + 1) % 3
            survivor = run.processes[f"trainer-{3 - saver - other}"][0]
            stalls.append((first, 2, stall_s(run, run.kill_at(saver, first), 2)))
            stalls.append((second, 1, stall_s(run, run.kill_at(other, second), 1)))
            wait_checkpoint(run)
            assert savers(run)[-1] not in (saver, other)
            run.start(f"trainer-{saver}", f"trainer-{other}")
            wait_all(run)
            assert survivor.poll() is None
        yield run, stalls


@pytest.mark.row("G1")
@pytest.mark.scenario("Q-3")
def test_the_groups_that_are_left_commit_the_same_step(three_groups):
    run, stalls = three_groups
    assert {point for point, _, _ in stalls} >= {point for pair in PAIRS for point in pair}
    assert max(seconds for _, _, seconds in stalls) < STALL_LIMIT_S, stalls
    assert_each_step_once(run)
    trained = [e["data"]["batch"] for e in run.events("commit")]
    assert len(trained) == len(set(trained))
    assert not run.events("supersede")


@pytest.mark.row("G3")
@pytest.mark.scenario("R-1")
def test_groups_that_came_back_are_healed_and_bitwise_equal(three_groups):
    run, _ = three_groups
    healed = {e["name"] for e in run.events("heal")}
    assert healed == {"trainer-0", "trainer-1", "trainer-2"}
    assert_groups_equal(run, (0, 1, 2), at_least=5 * len(PAIRS))


@pytest.mark.row("G7")
@pytest.mark.scenario("R-2")
def test_the_duty_of_saving_moves_and_each_checkpoint_is_complete(three_groups):
    run, _ = three_groups
    assert len(set(savers(run))) > 1
    written = [e["data"]["path"] for e in run.events("checkpoint")]
    assert len(written) == len(set(written))
    for event in run.events("checkpoint"):
        path, token = run.run.path / event["data"]["path"], event["data"]["token"]
        assert event["step"] % 10 == 0
        assert flaw(path, event["step"], token) is None


@pytest.mark.row("K1")
def test_each_kill_has_a_record_and_the_ratio_is_what_a_count_by_hand_says(three_groups):
    run, stalls = three_groups
    events = list(read_events(run.run.events))
    found = measure(events)
    assert len(found.outages) == len(stalls) and all(o.role == "trainer" for o in found.outages)
    for outage in found.outages:
        assert outage.done_s is not None and min(outage.phase_s.values()) >= 0.0
        assert sum(outage.phase_s.values()) == pytest.approx(outage.done_s - outage.began_s)
        assert outage.samples_lost == 0
    by_hand = strict_by_hand(events, events[0].mono_s + found.wall_s)
    assert found.strict.ratio == pytest.approx(by_hand, rel=0.01)


@pytest.mark.row("G1")
@pytest.mark.row("G3")
@pytest.mark.scenario("R-2")
def test_groups_of_two_ranks_survive_the_loss_of_either_rank(tmp_path):
    keys = {
        "fault_tolerance__process_group_timeout_ms": GROUP_TIMEOUT_MS,
        "checkpoint__enable": "false",
    }
    keys["rollout__journal"] = "false"  # checked only: the host keeps a journal
    with TrainerRun(tmp_path / "run", steps=100_000, groups=2, ranks=2, forked=True, **keys) as run:
        run.start_all(host_args=SLOWLY)
        survivors = [p.pid for p in run.processes["trainer-0"]]
        for rank, point in ((0, "reduce"), (1, "commit")):
            wait_all(run)
            killed_s = run.kill_at(1, point, rank=rank)
            assert stall_s(run, killed_s, 1) < STALL_LIMIT_S
            run.start("trainer-1")
            wait_all(run)
        assert [p.pid for p in run.processes["trainer-0"] if p.poll() is None] == survivors
        assert_each_step_once(run)
        for rank in range(2):
            assert_groups_equal(run, (0, 1), at_least=10, rank=rank)
        assert sum(e["name"] == "trainer-1" for e in run.events("heal")) >= 2


@pytest.mark.row("G2")
def test_below_min_replica_size_nothing_changes_until_a_group_returns(tmp_path):
    """The run ends bit by bit as one in which nobody was killed."""
    keys = {"fault_tolerance__min_replica_size": 2, "fault_tolerance__join_timeout_ms": 200}
    ends = []
    for name, disturbed in (("calm", False), ("disturbed", True)):
        with TrainerRun(tmp_path / name, steps=12, groups=2, forked=True, **keys) as run:
            run.start_all()
            if disturbed:
                run.kill_at(1, "reduce", step=6)
                run.wait_for(lambda: phase_of(run, 0) == "quorum", "the wait for a quorum")
                time.sleep(3)  # the lighthouse has given the lost group up by then
                assert (len(run.metrics()), phase_of(run, 0)) == (5, "quorum")
                run.start("trainer-1")
            assert run.wait_exit("trainer-0") == [0], run.logs()
            assert run.wait_exit("trainer-1") == [0], run.logs()
            assert steps_of(run) == list(range(1, 13))
            assert all(row["participants"] == 2 for row in run.metrics())
            assert_groups_equal(run, (0, 1), at_least=7)
            own = ("token", "draws")  # of this run and of this process
            held = run.probe(0).items()
            ends.append({s: {k: v for k, v in h.items() if k not in own} for s, h in held})
    assert ends[0] == ends[1]


def phase_of(run: TrainerRun, group: int) -> str:
    return [e["phase"] for e in run.events("phase") if e["name"] == f"trainer-{group}"][-1]
