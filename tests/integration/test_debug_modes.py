"""Debug modes on real parts: roll out once with engines alone, then train from the dumps."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from job_run import SUPERVISOR, Job

from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.journal.store import Journal, NewGroup
from torchtitan_rl_ft.observability.events import EventList, Kind
from torchtitan_rl_ft.rollout.dumps import load_dump
from torchtitan_rl_ft.session_folder import ServingAt, SessionFolder, SessionRecord
from torchtitan_rl_ft.trainer.train_dumps import load_train_dump

pytestmark = pytest.mark.timeout(240)

ROLLOUTS = 3
GROUPS, SAMPLES = 8, 8
SIZES = ("--rl.groups_per_step", str(GROUPS), "--rl.samples_per_prompt", str(SAMPLES))
FAULTS = ["kill engine-0 at rollout 1", "kill rollout at rollout 1"]
SESSION = ("--rollout.session_id", "kept")
"""The session of an earlier job, named by every job here."""


@dataclass
class Beside:
    """What an earlier job has left: a session that is kept, and a journal."""

    job: Job
    files: dict[Path, tuple[bytes, int]]

    @classmethod
    def of(cls, job: Job) -> Beside:
        session = SessionFolder("kept", job.state / "torchtitan_rl_ft" / "sessions")
        serving = ServingAt(4_000_000, 1.0, "another-host", "http://127.0.0.1:1", "")
        session.write(SessionRecord("kept", "rollout.session_id", serving, retain_ttl_s=3600.0))
        folder = job.folder.path.parent / "earlier" / "journal"
        with Journal.open(folder, events=EventList()) as journal:
            journal.issue([NewGroup({"text": "12>"})], None)
        names = [session.record_file, folder / "journal.sqlite", folder / "owner.lock"]
        return cls(job, {f: (f.read_bytes(), f.stat().st_mtime_ns) for f in names})

    def unchanged(self) -> bool:
        now = {f: (f.read_bytes(), f.stat().st_mtime_ns) for f in self.files}
        return now == self.files


@dataclass
class Ended:
    job: Job
    beside: Beside
    exit_code: int
    commands: list[str]
    """Command lines of what ran when the first batch was sealed, or trained."""


def ended(path: Path, *overrides: str) -> Iterator[Ended]:
    with Job(path) as job:
        beside = Beside.of(job)
        job.start(*SIZES, *SESSION, *overrides)
        job.wait_event(Kind.SEAL if "rollout_only" in overrides else Kind.COMMIT, timeout_s=120)
        commands = list(command_lines(job))
        yield Ended(job, beside, job.end(timeout_s=180), commands)


def command_lines(job: Job) -> Iterator[str]:
    root = psutil.Process(job.processes[SUPERVISOR].pid)
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            yield " ".join(process.cmdline())


@pytest.fixture(scope="module")
def rolled_out(tmp_path_factory) -> Iterator[Ended]:
    """Three rollouts, an engine and the role killed in the middle."""
    yield from ended(
        tmp_path_factory.mktemp("rollout-only") / "run",
        *("--rollout.debug_mode", "rollout_only", "--training.steps", str(ROLLOUTS)),
        *("--chaos.enable", "--chaos.faults", json.dumps(FAULTS)),
    )


def trained(factory, rolled_out: Ended, groups: int, *overrides: str) -> Iterator[Ended]:
    template = str(rolled_out.job.folder.path / "rollouts" / "{rollout_id}.safetensors")
    yield from ended(
        factory.mktemp(f"train-only-{groups}") / "run",
        *("--rollout.load_debug_rollout_data", template, "--training.steps", str(ROLLOUTS)),
        *("--rollout.save_debug_train_data", "trained/{rollout_id}.safetensors"),
        *("--fault_tolerance.replica_groups", str(groups)),
        *("--fault_tolerance.min_replica_size", str(groups)),
        *("--checkpoint.no-enable", *overrides),
    )


@pytest.fixture(scope="module")
def one_group(tmp_path_factory, rolled_out) -> Iterator[Ended]:
    yield from trained(tmp_path_factory, rolled_out, 1)


@pytest.fixture(scope="module")
def two_groups(tmp_path_factory, rolled_out) -> Iterator[Ended]:
    """The rollout role, which holds the ledger, is killed once."""
    faults = json.dumps(["kill rollout at step 1"])
    yield from trained(tmp_path_factory, rolled_out, 2, "--chaos.enable", "--chaos.faults", faults)


def subjects(done: Ended) -> set[str]:
    return {e.data["subject"] for e in done.job.events(Kind.SPAWN)}


def dump_file(done: Ended, step: int) -> Path:
    return done.job.folder.path / "rollouts" / f"{step}.safetensors"


def train_file(done: Ended, step: int) -> Path:
    return done.job.folder.path / "trained" / f"{step}.safetensors"


# Rollout only -------------------------------------------------------------------------------


@pytest.mark.row("J1")
def test_rollout_only_starts_no_trainer_and_tells_what_it_dumped(rolled_out):
    job = rolled_out.job
    assert rolled_out.exit_code == ExitCode.DONE, job.story()
    assert subjects(rolled_out) == {"serving", "rollout", "chaos", "engine-0", "engine-1"}
    assert not [c for c in rolled_out.commands if "trainer" in c or "lighthouse" in c]
    assert not (job.folder.path / "checkpoint").exists()
    out = job.out()
    assert f"rollouts   {ROLLOUTS} of {ROLLOUTS}" in out
    first, last = dump_file(rolled_out, 1), dump_file(rolled_out, ROLLOUTS)
    assert f"{ROLLOUTS} files, {first} to {last}" in out
    assert "rollout 3/3  reward" in out and "ETTR" not in out
    assert job.left(within_s=5) == []


@pytest.mark.row("J1")
def test_every_sample_is_dumped_also_with_an_engine_killed(rolled_out):
    job = rolled_out.job
    hit = {e.data["subject"] for e in job.events(Kind.CHAOS) if e.phase == "inject"}
    assert hit == {"engine-0", "rollout"} and job.attempts("rollout") == 2, job.story()
    assert {e.step for e in job.events(Kind.DUMP)} == {1, 2, 3}
    visits = set()
    for step in range(1, ROLLOUTS + 1):
        dump = load_dump(dump_file(rolled_out, step))
        samples = list(dump.samples())
        assert [s.index for s in samples] == list(range(GROUPS * SAMPLES))
        for s in samples:
            assert s.prompt_ids and 1 <= len(s.output_ids) <= 2
            assert len(s.logprobs) == len(s.versions) == len(s.output_ids)
            assert all(x < 0 for x in s.logprobs) and set(s.versions) == {1}
            assert 0 <= s.reward <= 1 and isinstance(s.response, str)
            visits.add((s.prompt["epoch"], s.prompt["index"]))
        assert dump.batch.arrays["advantages"].any(), "nothing to learn from"
    assert len(visits) == ROLLOUTS * GROUPS


@pytest.mark.row("E1")
def test_neither_mode_touches_journal_or_session_beside_it(rolled_out, two_groups):
    for done in (rolled_out, two_groups):
        assert done.beside.unchanged()
        assert not done.job.folder.journal.exists()
        assert not done.job.folder.scratch_journal.parent.exists()


# Train only ---------------------------------------------------------------------------------


@pytest.mark.row("J2")
def test_train_only_starts_trainers_and_their_ledger_alone(one_group, two_groups):
    for done, trainers in ((one_group, {"trainer-0"}), (two_groups, {"trainer-0", "trainer-1"})):
        assert done.exit_code == ExitCode.DONE, done.job.story()
        assert subjects(done) - {"chaos"} == {"lighthouse", "rollout", *trainers}
        assert not [c for c in done.commands if "sglang" in c or "--role serving" in c]
        assert not done.job.events(Kind.PUBLISH) and not done.job.events(Kind.FAULT)
        assert not (done.job.folder.path / "serving").exists()
        assert [m["participants"] for m in done.job.metrics()] == [len(trainers)] * ROLLOUTS


@pytest.mark.row("J2")
def test_a_killed_ledger_goes_on_where_it_was(two_groups):
    job = two_groups.job
    assert [e.data["subject"] for e in job.events(Kind.CHAOS) if e.phase == "inject"] == ["rollout"]
    assert job.attempts("rollout") == 2 and job.attempts("trainer-0") == 1
    assert [e.step for e in job.events(Kind.COMMIT)] == list(range(1, ROLLOUTS + 1))


@pytest.mark.row("J2")
def test_one_and_two_groups_agree_on_a_dump(one_group, two_groups):
    one, two = one_group.job.metrics(), two_groups.job.metrics()
    assert len(one) == len(two) == ROLLOUTS
    for a, b in zip(one, two, strict=True):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5) != 0
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5, abs=1e-7)


@pytest.mark.row("J3")
def test_the_trained_batches_are_the_dumped_ones(rolled_out, two_groups):
    for step in range(1, ROLLOUTS + 1):
        (sealed,) = [e for e in two_groups.job.events(Kind.SEAL) if e.step == step]
        assert sealed.data["digest"] == load_dump(dump_file(rolled_out, step)).digest


@pytest.mark.row("J3")
def test_every_train_record_has_its_rollout_twin(rolled_out, one_group, two_groups):
    for step in range(1, ROLLOUTS + 1):
        rollout = load_dump(dump_file(rolled_out, step))
        records = [load_train_dump(train_file(done, step)) for done in (one_group, two_groups)]
        for record, done in zip(records, (one_group, two_groups), strict=True):
            check_twins(record, rollout)
            (commit,) = [e for e in done.job.events(Kind.COMMIT) if e.step == step]
            assert record.token == commit.data["token"]
            row = done.job.metrics()[step - 1]
            assert record.metrics["loss"] == row["loss"]
            trained = record.arrays["loss_mask"] > 0
            assert record.arrays["ratio"][trained].mean() == pytest.approx(row["ratio/mean"])
        a, b = (r.arrays["policy_logprobs"] for r in records)
        np.testing.assert_allclose(a, b, atol=1e-4)


def check_twins(record: Any, rollout: Any) -> None:
    """None is missing, none is there twice, and each holds its twin's numbers."""
    a, b = record.arrays, rollout.batch.arrays
    assert a["index"].tolist() == [s.index for s in rollout.samples()]
    assert record.batch_digest == rollout.digest
    for name in ("group_ids", "advantages", "loss_mask", "sample_offsets"):
        assert np.array_equal(a[name], b[name])
    trained = b["loss_mask"] > 0
    assert np.array_equal(a["behaviour_logprobs"][trained], b["logprobs"][trained])
    assert (a["policy_logprobs"][trained] < 0).all() and not a["policy_logprobs"][~trained].any()


@pytest.mark.row("J2")
@pytest.mark.parametrize("flaw", ["missing", "vocabulary"])
def test_a_dump_that_cannot_be_trained_on_is_named_before_anything_starts(
    rolled_out, tmp_path, flaw
):
    folder = rolled_out.job.folder.path / "rollouts"
    steps, template = ROLLOUTS + 1, str(folder / "{rollout_id}.safetensors")
    bad = folder / f"{steps}.safetensors"
    if flaw == "vocabulary":
        steps, bad = 1, tmp_path / "1.safetensors"
        content = dump_file(rolled_out, 1).read_bytes()
        assert content.count(rb"\"vocab_size\": 16") == 1
        bad.write_bytes(content.replace(rb"\"vocab_size\": 16", rb"\"vocab_size\": 32"))
        template = str(tmp_path / "{rollout_id}.safetensors")
    with Job(tmp_path / "run") as job:
        job.start("--rollout.load_debug_rollout_data", template, "--training.steps", str(steps))
        assert job.end(timeout_s=60) == ExitCode.CONFIG
        (line,) = job.error_lines()
        assert str(bad) in line
        assert ("vocab_size 32" in line) == (flaw == "vocabulary")
        assert job.events(Kind.SPAWN) == []
