"""Everything ends and is started again: from which checkpoint, with what, in whatever layout.

One run in five lives, the trainers of each but the last killed in the middle of a step:

    1  one rank, with dropout             checkpoints of steps 3, 6, 9; killed in step 11
    2  the same; step 9 is damaged        from step 6; killed in step 17
    3  FSDP over 2 ranks, micro-batch 4   from step 15; killed in step 23
    4  tensor parallel over 2 ranks       from step 21; killed in step 29
    5  two groups                         from step 27, to the end
"""

import json
import resource
import shutil
import sqlite3
from contextlib import closing

import pytest
from trainer_run import TrainerRun

from torchtitan_rl_ft.journal.checkpoints import MARKER, finder, read_marker
from torchtitan_rl_ft.journal.store import Journal
from torchtitan_rl_ft.observability.events import EventList

pytestmark = pytest.mark.timeout(400)

STEPS = 31
DROPOUT_UNTIL = 14
LAYOUTS = {
    3: {"fault_tolerance__ranks_per_group": 2, "training__local_batch_size": 4},
    4: {
        "fault_tolerance__ranks_per_group": 2,
        "parallelism__tensor_parallel_degree": 2,
        "training__local_batch_size": 8,
    },
    5: {
        "fault_tolerance__ranks_per_group": 1,
        "parallelism__tensor_parallel_degree": 1,
        "fault_tolerance__replica_groups": 2,
        "fault_tolerance__min_replica_size": 2,
    },
}
RESTORED = {2: 6, 3: 15, 4: 21, 5: 27}


class Lives:
    """The run, what each life began with, and what was done to its checkpoints between two."""

    def __init__(self, run: TrainerRun) -> None:
        self.run = run
        self.sealed: list[dict[int, str]] = []
        self.expected_skips: set[str] = set()

    def batches(self) -> dict[int, str]:
        return {e["data"]["batch"]: e["data"]["digest"] for e in self.run.events("seal")}

    def live(self, kill_in_step: int) -> None:
        """All roles start, and die when the trainers are in that step."""
        run = self.run
        run.order(0, "forward_backward", act="kill", step=kill_in_step)
        run.start_all()
        run.wait_for(lambda: run.processes["trainer-0"][0].poll() is not None, "the kill", 150)
        for name in list(run.processes):
            run.kill(name)
        self.sealed.append(self.batches())

    def damage(self) -> None:
        """A changed byte, a save that was cut off, one of another history, tracker files."""
        folder = self.run.run.path / "checkpoint"
        (newest,) = folder.glob("step-9-*")
        (older,) = folder.glob("step-6-*")
        shard = newest / "__0_0.distcp"
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
        torn, other = folder / "step-10-00000000", folder / "step-10-11111111"
        torn.mkdir()
        (torn / "__0_0.distcp").write_bytes(b"x")
        shutil.copytree(older, other)
        marker = json.loads((other / MARKER).read_text())
        (other / MARKER).write_text(json.dumps({**marker, "step": 10, "token": "1" * 64}))
        (folder / "latest_checkpointed_iteration.txt").write_text("10")
        self.expected_skips = {
            f"checkpoint skipped: {newest}: __0_0.distcp is not what was written: its SHA-256"
            " differs",
            f"checkpoint skipped: {torn}: no {MARKER}: it was not finished",
            f"checkpoint skipped: {other}: step 10 of a superseded history",
        }


@pytest.fixture(scope="module")
def lives(tmp_path_factory):
    path = tmp_path_factory.mktemp("lives") / "run"
    keys = {"checkpoint__interval": 3, "checkpoint__keep_latest_k": 2}
    with TrainerRun(path, steps=STEPS, groups=1, **keys) as run:
        lives = Lives(run)
        run.env["PROBE_DROPOUT_UNTIL"] = str(DROPOUT_UNTIL)
        lives.live(11)
        lives.damage()
        lives.live(17)
        for life, kill_in_step in ((3, 23), (4, 29)):
            run.set(**LAYOUTS[life])
            run.ranks = 2
            lives.live(kill_in_step)
        run.set(**LAYOUTS[5])
        run.ranks, run.groups = 1, 2
        run.start_all()
        for group in (0, 1):
            assert run.wait_exit(f"trainer-{group}", 150) == [0], run.logs()
        run.wait_exit("host")
        yield lives


def restored(run):
    """The first `restore` event of each life after the first."""
    steps = {e["step"]: e for e in run.events("restore")}
    return {life: steps[step] for life, step in RESTORED.items()}


@pytest.mark.row("H4")
@pytest.mark.row("E9")
@pytest.mark.scenario("C-4")
def test_the_newest_complete_checkpoint_is_taken_and_the_skipped_ones_are_named(lives):
    assert [e["step"] for e in lives.run.events("restore")][0] == 6
    said = {e["cause"] for e in lives.run.events("warn")}
    assert lives.expected_skips <= said


@pytest.mark.row("E6")
@pytest.mark.scenario("C-1")
@pytest.mark.scenario("C-6")
def test_in_the_same_layout_all_goes_on_bitwise_dropout_and_random_numbers_too(lives):
    """Steps 7 to 10 were trained in both of the first lives, from the same checkpoint."""
    first, second = {}, {}
    for line in lives.run.probes(0):
        if 7 <= line["step"] <= 10:
            (second if line["step"] in first else first)[line["step"]] = line
    assert set(first) == set(second) == {7, 8, 9, 10}
    for step, line in first.items():
        for key in ("parameters", "optimizer", "lr", "scheduler", "draws"):
            assert line[key] == second[step][key], (step, key)
        assert line["token"] != second[step]["token"]
    assert restored(lives.run)[2]["data"]["random_numbers"] == "as saved"


@pytest.mark.row("G8")
def test_torchft_goes_on_where_the_checkpoint_was(lives):
    for life, event in restored(lives.run).items():
        step = RESTORED[life]
        assert event["data"]["torchft"] == {"step": step, "batches_committed": step}
        log = (lives.run.run.path / "trainer-0.0.log").read_text()
        assert f"torchft: step {step}, {step} batches committed" in log
    assert not lives.run.events("heal")  # both groups of the last life restored for themselves
    assert all(line["manager_step"] == line["step"] for line in lives.run.probes(0))


@pytest.mark.row("E6")
@pytest.mark.row("G7")
@pytest.mark.scenario("C-3")
def test_in_every_layout_the_same_sealed_batches_are_trained(lives):
    """FSDP 1 -> 2, tensor parallel 1 -> 2, another micro-batch, one group -> two."""
    run, now = lives.run, lives.batches()
    for then in lives.sealed:
        assert then.items() <= now.items()
    assert len(now) == len(run.events("seal")) == STEPS  # each was sealed once
    with Journal.open(run.run.journal, events=EventList()) as journal:
        assert journal.audit().problems == []
        commits = journal.commits_after(0)
    batches = {}
    for commit in commits:
        batches.setdefault(commit.record.step, set()).add(commit.record.batch_id)
    assert batches == {step: {step} for step in range(1, STEPS + 1)}


@pytest.mark.row("E6")
def test_parameters_go_on_in_another_layout(lives):
    """The first step after each restore was trained before the kill as well, from the same
    parameters: its gradient differs in the order of summation alone."""
    with Journal.open(lives.run.run.journal, events=EventList()) as journal:
        commits = journal.commits_after(0)
    for life in (3, 4, 5):
        step = RESTORED[life] + 1
        before, after = (c.metrics for c in commits if c.record.step == step)
        assert before is not None and after is not None
        assert after["grad_norm"] == pytest.approx(before["grad_norm"], rel=1e-5), life
        assert after["lr"] == before["lr"]
    assert commits[-1].record.participants == 2


def test_random_numbers_are_seeded_anew_in_another_layout_and_it_is_said(lives):
    said = {life: e["data"]["random_numbers"] for life, e in restored(lives.run).items()}
    assert said[3] == "seeded anew for step 15: dp_shard, local_batch_size changed"
    assert said[4] == "seeded anew for step 21: dp_shard, local_batch_size, tp changed"
    assert said[5] == "seeded anew for step 27: replica_groups, tp changed"


@pytest.mark.scenario("C-1")
def test_two_checkpoints_are_kept_and_their_batches(lives):
    folder = lives.run.run.path / "checkpoint"
    found = finder(folder)()
    assert sorted(f.step for f in found) == [30, 31]
    marker = read_marker(next(folder.glob("step-31-*")))
    assert marker.batch is not None and marker.batch["id"] == 31
    assert set(marker.parts) == {"model", "optimizer", "lr_scheduler", "train_state", "rng"}
    assert marker.policy_version is not None and marker.layout["replica_groups"] == 2
    assert freed_through(lives.run) == 30


def freed_through(run) -> int:
    path = run.run.journal / "journal.sqlite"
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)) as db:
        row = db.execute("SELECT value FROM meta WHERE key = 'freed_through'").fetchone()
    return int(row[0]) if row else 0


@pytest.mark.row("E6")
@pytest.mark.row("E7")
def test_batches_stay_until_an_asynchronous_save_is_durable_and_a_full_disk_loses_none(tmp_path):
    keys = {
        "checkpoint__interval": 5,
        "checkpoint__async_mode": "async",
        "optimizer__name": "SGD",
        "recovery__save_optimizer": False,
    }
    with TrainerRun(tmp_path / "run", steps=400, groups=1, **keys) as run:
        gate = run.run.path / "slow-disk"
        gate.touch()
        run.start_all()
        run.wait_step(8)  # training does not wait for the save of step 5
        assert list((run.run.path / "checkpoint").glob("step-5-*"))
        assert not run.events("checkpoint") and freed_through(run) == 0
        run.kill("trainer-0")
        gate.unlink()
        run.start("trainer-0")
        run.wait_for(lambda: run.events("checkpoint"), "a durable save")
        assert {e["data"]["to_step"] for e in run.events("supersede")} == {0}  # the initial weights
        run.wait_for(lambda: freed_through(run) > 0, "the batches that it covers")
        saved = {e["step"] for e in run.events("checkpoint")}
        assert freed_through(run) <= max(saved)

        pid = run.processes["trainer-0"][0].pid
        limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        shard = next((run.run.path / "checkpoint").glob("*/__0_0.distcp")).stat().st_size
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (shard - 1000, limits[1]))
        run.wait_for(
            lambda: [e for e in run.events("fault") if "not written" in e["cause"]],
            "a save that fails",
        )
        at = len(run.metrics())
        run.wait_step(at + 3)  # the run goes on
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
        last = max(e["step"] for e in run.events("checkpoint"))
        run.wait_for(lambda: max(e["step"] for e in run.events("checkpoint")) > last, "a save")
        assert run.processes["trainer-0"][0].pid == pid

        # A checkpoint without an optimizer's state is whole with SGD.
        run.kill_at(0, "forward_backward", step=run.probes(0)[-1]["step"] // 5 * 5 + 13)
        before, n = run.probe(0), len(run.probes(0))
        run.start("trainer-0")
        run.wait_for(lambda: len(run.probes(0)) > n, "a step after the restart")
        step, again = run.events("restore")[-1]["step"], run.probes(0)[n]
        assert again["step"] == again["scheduler"]["last_epoch"] == step + 1
        for key in ("parameters", "lr", "scheduler"):
            assert again[key] == before[step + 1][key]
        for name in list(run.processes):
            run.kill(name)
        with Journal.open(run.run.journal, events=EventList()) as journal:
            assert journal.audit().problems == []
