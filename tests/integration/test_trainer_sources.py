"""Real trainers whose policies travel over holders: every group's sources have what it committed,
and what becomes of a source never touches training. Serving reads the sources' files
(fakes/source_reader.py)."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from trainer_run import TrainerRun, assert_each_step_once, assert_groups_equal

from torchtitan_rl_ft.run_folder import ProcessId
from torchtitan_rl_ft.trainer.source import sources_run_id
from torchtitan_rl_ft.weights.holder.launch import ADDRESS_FILE
from torchtitan_rl_ft.weights.holder.settings import run_memory

pytestmark = pytest.mark.timeout(400)

OVER_HOLDERS = {"rollout__weight_transport": "nixl", "fault_tolerance__min_replica_size": 1}
SLOWLY = ("--slow-s", "0.05")


class SourcesRun(TrainerRun):
    def __init__(self, path: Path, memory: Path, **keys) -> None:
        given = {**OVER_HOLDERS, **keys}
        super().__init__(path, forked=True, weights__memory_folder=memory, **given)
        self.env["PROBE_POLICY"] = "1"
        self._memory = run_memory(str(memory), sources_run_id(self.run))

    def source(self, name: str) -> ProcessId | None:
        """The living source of a rank ("trainer-0.1")."""
        try:
            found = json.loads((self._memory / name / ADDRESS_FILE).read_text())
        except (FileNotFoundError, ValueError):
            return None
        source = ProcessId(found["pid"], found["start_time"])
        return source if source.alive() else None

    def policies(self, group: int | None = None) -> dict[int, str]:
        """sha256 of the image by step, as all groups' sources had it, or one's."""
        lines = self._lines(self.run.path / "policies.jsonl")
        name = f"trainer-{group}"
        return {x["step"]: x["sha256"] for x in lines if group is None or x["group"] == name}

    def published(self) -> set[int]:
        return {e["step"] for e in self.events("publish")}


def assert_policies_are_what_was_trained(run: SourcesRun, groups: tuple[int, ...]) -> None:
    """Bitwise what DTensor itself gathers on a rank."""
    for group in groups:
        trained = {s: line["policy"] for s, line in run.probe(group).items()}
        held = {s: d for s, d in run.policies(group).items() if s in trained}
        assert held, run.logs()
        assert held == {s: trained[s] for s in held}


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> Iterator[SourcesRun]:
    """Two groups of two ranks, to the end."""
    path = tmp_path_factory.mktemp("run")
    memory = tmp_path_factory.mktemp("memory")
    together = {"fault_tolerance__min_replica_size": 2}
    with SourcesRun(path, memory, steps=8, groups=2, ranks=2, **together) as run:
        run.start_all()
        run.wait_step(8)
        for group in range(2):
            assert run.wait_exit(f"trainer-{group}") == [0, 0], run.logs()
        yield run


def test_every_group_offers_what_it_committed_and_the_whole_model_is_there(calm):
    assert_each_step_once(calm)
    assert_groups_equal(calm, (0, 1), at_least=8)
    assert_policies_are_what_was_trained(calm, (0, 1))
    # A group whose source was still hashing the version before has left one out.
    assert all(len(calm.policies(group)) >= 4 for group in range(2))
    assert max(calm.published()) == 8


def test_nothing_goes_through_the_disk_and_nothing_is_left(calm):
    assert not calm.run.weights.exists() or not any(calm.run.weights.iterdir())
    ranks = [f"trainer-{g}.{r}" for g in range(2) for r in range(2)]
    assert all(calm.source(rank) is None for rank in ranks)
    assert not any((calm._memory / rank).exists() for rank in ranks)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory) -> Iterator[SourcesRun]:
    """Sources die and freeze, a trainer fails, is killed, is replaced; the run goes to its end."""
    path = tmp_path_factory.mktemp("run")
    memory = tmp_path_factory.mktemp("memory")
    in_process = {"recovery__inprocess_restart": True}
    with SourcesRun(path, memory, steps=100_000, groups=2, **in_process) as run:
        run.start_all(host_args=SLOWLY)
        run.wait_step(4)
        yield run
        (run.run.path / "last_step").write_text(str(len(run.metrics()) + 3))
        for group in range(2):
            assert run.wait_exit(f"trainer-{group}") == [0], run.logs()


def living_source(run: SourcesRun, name: str, other_than: ProcessId | None = None) -> ProcessId:
    run.wait_for(lambda: run.source(name) not in (None, other_than), f"a source of {name}")
    found = run.source(name)
    assert found is not None
    return found


def wait_offer(run: SourcesRun, group: int) -> None:
    """Until the group's source holds a version that it commits from now on."""
    step = len(run.metrics())
    run.wait_for(lambda: max(run.policies(group), default=0) > step, f"group {group} to offer")


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_source_that_dies_or_freezes_is_replaced_and_training_goes_on(faulty, signum):
    victim = living_source(faulty, "trainer-0.0")
    trainers = {n: faulty.processes[n][0].pid for n in ("trainer-0", "trainer-1")}
    before = len(faulty.metrics())
    os.kill(victim.pid, signum)
    living_source(faulty, "trainer-0.0", other_than=victim)
    wait_offer(faulty, 0)
    faulty.wait_step(before + 3)
    assert not victim.alive()
    assert {n: faulty.processes[n][0].pid for n in trainers} == trainers
    assert all(faulty.processes[n][0].poll() is None for n in trainers)
    assert_each_step_once(faulty)
    assert_policies_are_what_was_trained(faulty, (0, 1))


def test_a_killed_trainer_takes_its_source_along_and_its_next_life_has_one_of_its_own(faulty):
    old = living_source(faulty, "trainer-1.0")
    faulty.kill("trainer-1")
    end = time.monotonic() + 30
    while old.alive():
        assert time.monotonic() < end
        time.sleep(0.02)
    faulty.start("trainer-1")
    living_source(faulty, "trainer-1.0", other_than=old)
    wait_offer(faulty, 1)
    assert_policies_are_what_was_trained(faulty, (0, 1))


def test_a_group_that_begins_again_in_its_process_has_another_source(faulty):
    old, lives = living_source(faulty, "trainer-1.0"), len(faulty.lives(1))
    faulty.order(1, "reduce", act="fail")
    faulty.wait_for(lambda: len(faulty.lives(1)) == lives + 1, "a restart in process")
    living_source(faulty, "trainer-1.0", other_than=old)
    wait_offer(faulty, 1)
    assert not old.alive()
    assert_policies_are_what_was_trained(faulty, (0, 1))


def test_a_promoted_standby_offers_in_the_name_of_its_group(faulty):
    faulty.start("standby-0")
    faulty.wait_for(lambda: faulty.ready("standby-0"), "the standby")
    assert faulty.source("standby-0.0") is None
    old = living_source(faulty, "trainer-1.0")
    faulty.kill("trainer-1")
    faulty.promote("standby-0", "trainer-1")
    living_source(faulty, "trainer-1.0", other_than=old)
    wait_offer(faulty, 1)
    assert_each_step_once(faulty)
    assert_policies_are_what_was_trained(faulty, (0, 1))


def test_in_semi_sync_the_base_is_what_is_offered(tmp_path):
    keys = {
        "fault_tolerance__semi_sync_method": "diloco",
        "fault_tolerance__sync_steps": 2,
        "fault_tolerance__num_fragments": 1,
    }
    with SourcesRun(tmp_path / "run", tmp_path, steps=4, groups=2, **keys) as run:
        run.start_all()
        for group in range(2):
            assert run.wait_exit(f"trainer-{group}") == [0], run.logs()
        assert_policies_are_what_was_trained(run, (0, 1))
