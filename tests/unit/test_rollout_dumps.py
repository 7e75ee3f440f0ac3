"""Rollout dumps: bitwise what was sealed, written beside the loop, trained again."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from journal_cases import split
from rollout_parts import MEMBER, TOKENIZER, Host, ScriptedServing
from safetensors.numpy import load_file

from torchtitan_rl_ft.journal.dump_files import (
    SAMPLE_INDICES,
    DumpInvalid,
    DumpWriteError,
    write_dump,
)
from torchtitan_rl_ft.journal.errors import JournalStateError
from torchtitan_rl_ft.journal.ledger import Ledger
from torchtitan_rl_ft.journal.protocol import PUBLISH, State
from torchtitan_rl_ft.journal.records import GENESIS, CommitRecord, SealedBatch, digest, next_token
from torchtitan_rl_ft.journal.store import Journal
from torchtitan_rl_ft.models.tiny import make_tiny_model
from torchtitan_rl_ft.observability.events import EventList
from torchtitan_rl_ft.rollout import dump_writer
from torchtitan_rl_ft.rollout.dump_writer import DumpSettings
from torchtitan_rl_ft.rollout.dumps import (
    ModelIdentity,
    Origin,
    check_dump,
    load_dump,
    make_dump,
    save_dump,
)
from torchtitan_rl_ft.rollout.generation import sample_seed
from torchtitan_rl_ft.rollout.replay import DumpReplay, DumpSource
from torchtitan_rl_ft.rollout.subsampling import subsample
from torchtitan_rl_ft.weights.initial import release_directory
from torchtitan_rl_ft.weights.manifest import WeightsInvalid, read_and_verify

MODEL = ModelIdentity("qwen3", 16, "vocabulary")
TEMPLATE = "d/{rollout_id}.safetensors"


def settings(folder: Path, *, required: bool = False) -> DumpSettings:
    return DumpSettings(TEMPLATE, folder, MODEL, run_seed=0, required=required)


async def run_steps(folder: Path, steps: int = 3, **keys) -> Host:
    """A run whose batches were dumped and trained; its journal is open."""
    host = Host(folder, ScriptedServing(), steps=steps, dumps=settings(folder), **keys)
    host.publish()
    running = asyncio.create_task(host.loop.run())
    for _ in range(steps):
        await host.train()
    async with asyncio.timeout(10):
        await running
    return host


async def rollout_only(folder: Path, **keys) -> Host:
    host = Host(
        folder,
        ScriptedServing(),
        trainers=False,
        dumps=settings(folder, required=True),
        **keys,
    )
    host.publish()
    async with asyncio.timeout(10):
        await host.loop.run()
    return host


def source(folder: Path, steps: int = 3, share: float = 1.0) -> DumpSource:
    return DumpSource(TEMPLATE, folder, steps, share, 0, "token", seq_len=32)


def path(folder: Path, step: int) -> Path:
    return folder / f"d/{step}.safetensors"


# Format -------------------------------------------------------------------------------------


@pytest.mark.row("J3")
async def test_a_loaded_batch_is_bitwise_the_live_one(tmp_path):
    host = await run_steps(tmp_path)
    for step in (1, 2, 3):
        dump = load_dump(path(tmp_path, step))
        live = host.journal.batch_bytes(host.journal.plan[step].batch_id)
        assert dump.batch.to_bytes() == live and dump.rollout_id == step
        assert dump.digest == host.journal.plan[step].digest == digest(live)
        assert check_dump(path(tmp_path, step), step, MODEL) == dump.origin
        assert dump.origin.journal == host.journal.uuid
    assert [e["step"] for e in host.kinds("dump")] == [1, 2, 3]


@pytest.mark.row("J1")
async def test_a_dump_holds_all_of_every_sample(tmp_path):
    host = await run_steps(tmp_path, steps=1)
    dump = load_dump(path(tmp_path, 1))
    samples = list(dump.samples())
    assert [s.index for s in samples] == list(range(12))
    for i, s in enumerate(samples):
        assert TOKENIZER.decode(s.prompt_ids, skip_special_tokens=False) == s.prompt["text"]
        assert s.response == TOKENIZER.decode(s.output_ids, skip_special_tokens=True)
        assert len(s.output_ids) == len(s.logprobs) == len(s.versions) == len(s.mask) == 3
        assert set(s.logprobs) == {-0.5} and set(s.versions) == {1} and set(s.mask) == {1}
        assert s.seed == sample_seed(0, s.prompt["epoch"], s.prompt["index"], i % 4)
        right = s.response == s.prompt["answer"]
        assert s.reward == 1.0 if right else s.reward < 1.0
        assert (s.advantage > 0) == right
    assert {s.group_id for s in samples} == {1, 2, 3}
    # Any reader of safetensors reads it.
    arrays = load_file(path(tmp_path, 1))
    assert arrays["tokens"].dtype == np.int32
    assert json.loads(arrays["responses_json"].tobytes()) == [s.response for s in samples]
    host.close()


def some_dump(folder: Path) -> Path:
    arrays = {
        "tokens": np.arange(8, dtype=np.int32),
        "sample_offsets": np.array([0, 4, 8]),
        "prompt_lens": np.array([2, 2], np.int32),
        "logprobs": np.zeros(8, np.float32),
        "loss_mask": np.array([0, 0, 1, 1] * 2, np.uint8),
        "versions": np.array([-1, -1, 1, 1] * 2, np.int32),
        "weights": np.array([0, 0, 0.25, 0.25] * 2, np.float32),
        "advantages": np.array([1, -1], np.float32),
        "rewards": np.array([1, np.nan], np.float32),
        "group_ids": np.array([1, 1]),
    }
    batch = SealedBatch(1, arrays, {"reward/mean": 0.1 + 0.2})
    prompts = {1: {"text": "12>", "answer": "12", "epoch": 0, "index": 3}}
    payload = batch.to_bytes()
    origin = Origin(1, digest(payload), "journal", MODEL, 0)
    save_dump(path(folder, 1), make_dump(origin, payload, prompts, TOKENIZER))
    assert load_dump(path(folder, 1)).batch.to_bytes() == batch.to_bytes()
    return path(folder, 1)


def test_a_damaged_dump_is_named(tmp_path):
    file = some_dump(tmp_path)
    whole = file.read_bytes()
    damaged = {
        "is no whole dump": [whole[:100], whole[:-1], b"", b"\xff" * 64],
        "is damaged": [whole.replace(np.float32(0.25).tobytes(), np.float32(0.5).tobytes())],
    }
    for said, contents in damaged.items():
        for content in contents:
            file.write_bytes(content)
            with pytest.raises(DumpInvalid, match=said) as e:
                load_dump(file)
            assert str(file) in str(e.value) and "\n" not in str(e.value)


def test_a_file_that_is_no_rollout_dump_is_named(tmp_path):
    file = some_dump(tmp_path)
    write_dump(file, "train", {}, {"x": np.zeros(1)})
    with pytest.raises(DumpInvalid, match="is a train dump"):
        check_dump(file, 1, MODEL)
    with pytest.raises(DumpInvalid, match="No such file"):
        load_dump(tmp_path / "nothing")


def test_a_dump_of_another_model_or_rollout_is_named(tmp_path):
    file = some_dump(tmp_path)
    with pytest.raises(DumpInvalid, match="holds rollout 1, not 2"):
        check_dump(file, 2, MODEL)
    for key, value in (("vocab_size", 32), ("model_type", "llama"), ("vocabulary_sha256", "x")):
        other = dataclasses.replace(MODEL, **{key: value})
        with pytest.raises(DumpInvalid, match=f"another model: {key}") as e:
            check_dump(file, 1, other)
        assert str(file) in str(e.value)


def test_a_sample_that_fits_no_row_is_named(tmp_path):
    file = some_dump(tmp_path)
    check_dump(file, 1, MODEL, seq_len=3)
    with pytest.raises(DumpInvalid, match="a sample of 4 tokens, training.seq_len = 2 takes 3"):
        check_dump(file, 1, MODEL, seq_len=2)


def test_a_vocabulary_is_told_by_its_entries(tmp_path):
    model = make_tiny_model(tmp_path / "model", 0)
    here = ModelIdentity.of(model, TOKENIZER)
    assert (here.model_type, here.vocab_size) == ("qwen3", 16)
    text = json.loads(TOKENIZER.to_str())
    first, second = list(text["model"]["vocab"])[:2]
    vocab = text["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    swapped = type(TOKENIZER).from_str(json.dumps(text))
    assert ModelIdentity.of(model, swapped) != here


# Rollout only -------------------------------------------------------------------------------


@pytest.mark.row("J1")
@pytest.mark.parametrize(
    "mode", [{}, {"mode": "async", "max_policy_age": 2}], ids=["sync", "async"]
)
async def test_without_trainers_every_rollout_is_by_the_one_policy(tmp_path, mode):
    host = await rollout_only(tmp_path, steps=4, **mode)
    assert host.ledger.outcome.kind == "done"
    assert host.ledger.outcome.reason == "all 4 rollouts are dumped"
    seen = set()
    for step in range(1, 5):
        batch = load_dump(path(tmp_path, step)).batch
        assert set(batch.arrays["versions"][batch.arrays["loss_mask"] > 0]) == {1}
        assert batch.meta["policy_age/max"] == 0 and batch.n_samples == 12
        seen |= set(batch.arrays["group_ids"].tolist())
    assert seen == set(range(1, 13)) and not host.kinds("drop") and not host.kinds("commit")
    assert host.journal.tip.step == 0


async def test_the_held_out_prompts_are_answered_too(tmp_path):
    host = await rollout_only(tmp_path, steps=1, eval_prompts=4)
    assert json.loads(host.eval_path.read_bytes())["step"] == 0


@pytest.mark.row("J1")
async def test_a_restarted_role_dumps_what_was_sealed_and_goes_on(tmp_path):
    host = await rollout_only(tmp_path, steps=2)
    kept = path(tmp_path, 1).stat().st_mtime_ns
    path(tmp_path, 2).unlink()
    digests = [host.journal.plan[s].digest for s in (1, 2)]
    host.close()
    again = await rollout_only(tmp_path, steps=3)
    assert [load_dump(path(tmp_path, s)).digest for s in (1, 2)] == digests
    assert path(tmp_path, 1).stat().st_mtime_ns == kept
    assert sorted(e["step"] for e in again.kinds("dump")) == [1, 2, 3]  # told again


async def test_a_source_that_ends_too_early_ends_the_run(tmp_path):
    class Two:
        def next(self, n):
            from torchtitan_rl_ft.rollout.protocols import Prompt

            self.given = getattr(self, "given", 0)
            count = min(n, 3 - self.given)
            first, self.given = self.given, self.given + count
            return [Prompt("12>", "12", 0, first + i) for i in range(count)]

    with pytest.raises(Exception, match="no more prompts"):
        await rollout_only(tmp_path, steps=2, source=Two())


# Disks --------------------------------------------------------------------------------------


def full_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


async def test_a_full_disk_ends_rollout_only_by_one_line(tmp_path):
    with (
        patch("torchtitan_rl_ft.journal.dump_files.write_atomic", full_disk),
        pytest.raises(DumpWriteError) as e,
    ):
        await rollout_only(tmp_path)
    assert str(e.value) == f"cannot write the dump {path(tmp_path, 1)}: No space left on device"
    assert not path(tmp_path, 1).exists()


async def test_a_full_disk_does_not_stop_training(tmp_path):
    with patch("torchtitan_rl_ft.journal.dump_files.write_atomic", full_disk):
        host = await run_steps(tmp_path)
    assert host.journal.tip.step == 3
    told = [e["cause"] for e in host.kinds("warn") if "dump" in e["cause"]]
    assert len(told) == 3 and "No space left on device" in told[0]


async def test_sealing_waits_for_a_slow_disk_only_when_it_is_far_behind(tmp_path):
    release = asyncio.Event()
    loop = asyncio.get_running_loop()
    written = dump_writer.save_dump

    def slow(*args):
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result(10)
        written(*args)

    host = Host(
        tmp_path,
        ScriptedServing(),
        trainers=False,
        steps=8,
        dumps=settings(tmp_path, required=True),
    )
    host.publish()
    with patch.object(dump_writer, "save_dump", slow):
        running = asyncio.create_task(host.loop.run())
        async with asyncio.timeout(5):
            while len(host.journal.plan) < dump_writer.MAX_BACKLOG + 1:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            assert len(host.journal.plan) == dump_writer.MAX_BACKLOG + 1
            release.set()
            await running
    assert all(path(tmp_path, s).exists() for s in range(1, 9))


# Train only ---------------------------------------------------------------------------------


class Trainers:
    """Commits whatever is sealed, as trainers of one group would."""

    def __init__(self, folder: Path) -> None:
        self.events = EventList()
        self.journal = Journal.open(folder, events=self.events)
        self.ledger = Ledger(
            self.journal,
            events=self.events,
            metrics_path=folder / "metrics.jsonl",
            why_incomplete=lambda checkpoint: None,
            publishes=False,
        )

    async def train(self, replay: DumpReplay) -> list[SealedBatch]:
        running = asyncio.create_task(replay.run())
        trained: list[SealedBatch] = []
        async with asyncio.timeout(10):
            while not running.done():
                tip, head = self.journal.tip, self.journal.head()
                if head is not None:
                    assert self.journal.sealed_ahead <= 2
                    trained.append(self.journal.batch(head.batch_id))
                    token = next_token(tip.token, head.digest, 7)
                    ref = (head.batch_id, head.digest)
                    whole = split(trained[-1], 1)
                    record = CommitRecord(tip.step + 1, *ref, tip.token, token, 1, 1, whole)
                    assert self.ledger.committed(MEMBER, record, {})[2] == []
                    state = State(tip.step + 1, token)
                    assert self.ledger.next_now(state.step, MEMBER.uuid) != {
                        "status": "waiting",
                        "duties": [PUBLISH],
                    }
                await asyncio.sleep(0.01)
            running.result()
        return trained


@pytest.mark.row("J2")
@pytest.mark.row("J3")
async def test_the_trained_batches_are_bitwise_the_dumped_ones(tmp_path):
    host = await run_steps(tmp_path)
    trainers = Trainers(tmp_path / "again")
    trained = await trainers.train(DumpReplay(trainers.ledger, source(tmp_path), trainers.events))
    assert [b.to_bytes() for b in trained] == [
        host.journal.batch_bytes(host.journal.plan[s].batch_id) for s in (1, 2, 3)
    ]
    assert trainers.ledger.outcome.kind == "done" and trainers.journal.tip.step == 3
    assert trainers.journal.tip.token != GENESIS
    rows = [json.loads(x) for x in (tmp_path / "again/metrics.jsonl").read_text().splitlines()]
    assert [r["reward/mean"] for r in rows] == [b.meta["reward/mean"] for b in trained]


@pytest.mark.row("J2")
async def test_a_missing_dump_is_named_before_anything(tmp_path):
    (await run_steps(tmp_path)).close()
    path(tmp_path, 2).unlink()
    with pytest.raises(DumpInvalid) as e:
        source(tmp_path).check(MODEL)
    assert str(path(tmp_path, 2)) in str(e.value) and "training.steps to 1" in str(e.value)


@pytest.mark.row("J2")
async def test_a_dump_that_goes_missing_is_named_at_its_step(tmp_path):
    (await run_steps(tmp_path)).close()
    source(tmp_path).check(MODEL)
    path(tmp_path, 3).unlink()
    trainers = Trainers(tmp_path / "again")
    with pytest.raises(DumpInvalid) as e:
        await trainers.train(DumpReplay(trainers.ledger, source(tmp_path), trainers.events))
    assert str(path(tmp_path, 3)) in str(e.value)


async def test_dumps_of_two_runs_are_not_mixed(tmp_path):
    (await run_steps(tmp_path, steps=2)).close()
    other = tmp_path / "other"
    (await run_steps(other, steps=3)).close()
    path(other, 1).rename(path(tmp_path, 2))
    content = path(tmp_path, 2).read_bytes()
    with pytest.raises(DumpInvalid, match="holds rollout 1, not 2"):
        source(tmp_path, 2).check(MODEL)
    path(other, 2).rename(path(tmp_path, 2))
    with pytest.raises(DumpInvalid, match="2.safetensors is of another run than .*1.safetensors"):
        source(tmp_path, 2).check(MODEL)
    path(tmp_path, 2).write_bytes(content)  # unnoticed until its step
    trainers = Trainers(tmp_path / "again")
    replay = DumpReplay(trainers.ledger, source(tmp_path, 2), trainers.events)
    with pytest.raises(DumpInvalid, match="of another run"):
        await trainers.train(replay)
    assert trainers.journal.counts()["issued"] == 3  # the first batch's, unchanged


async def test_a_drained_replay_ends(tmp_path):
    (await run_steps(tmp_path)).close()
    trainers = Trainers(tmp_path / "again")
    replay = DumpReplay(trainers.ledger, source(tmp_path), trainers.events)
    running = asyncio.create_task(replay.run())
    await asyncio.sleep(0.05)
    replay.drain("enough")
    async with asyncio.timeout(5):
        await running
    assert trainers.ledger.outcome.kind == "drained" and replay.status()["total_steps"] == 3


async def test_an_imported_batch_keeps_its_numbers(tmp_path):
    host = await run_steps(tmp_path, steps=1)
    dump = load_dump(path(tmp_path, 1))
    journal = Journal.open(tmp_path / "other", events=EventList())
    info = journal.import_batch(dump.batch, dump.prompts)
    assert (info.step, info.batch_id, info.digest) == (1, 1, host.journal.plan[1].digest)
    assert journal.prompts(1) == host.journal.prompts(1)
    assert journal.audit().problems == []
    with pytest.raises(JournalStateError):
        journal.import_batch(dump.batch, dump.prompts)
    renumbered = dataclasses.replace(dump.batch, batch_id=2)
    with pytest.raises(JournalStateError, match="prompt group 1 is in an earlier batch"):
        journal.import_batch(renumbered, dump.prompts)
    assert len(journal.plan) == 1 and journal.audit().problems == []


# A share of each dump -----------------------------------------------------------------------


@pytest.mark.row("J3")
@pytest.mark.parametrize("loss_norm", ["token", "sample"])
@pytest.mark.parametrize("share", [0.5, 0.01, 0.99])
async def test_a_share_keeps_whole_groups_and_the_weight_of_a_batch(tmp_path, share, loss_norm):
    await run_steps(tmp_path, steps=1, groups=6)
    whole = load_dump(path(tmp_path, 1)).batch
    part = subsample(whole, share, seed=0, step=1, loss_norm=loss_norm)
    kept = {0.5: 3, 0.01: 1, 0.99: 6}[share]
    assert part.meta["groups"] == kept == len(np.unique(part.arrays["group_ids"]))
    indices = part.meta[SAMPLE_INDICES]
    assert len(indices) == part.n_samples == 4 * kept and indices == sorted(indices)
    assert np.isclose(part.arrays["weights"].sum(), 1.0)
    for i, index in enumerate(indices):  # each sample is its twin
        for name in ("advantages", "rewards", "group_ids", "prompt_lens"):
            assert part.arrays[name][i] == whole.arrays[name][index]
        for name in ("tokens", "logprobs", "versions", "loss_mask"):
            assert np.array_equal(of(part, name, i), of(whole, name, index))
    again = subsample(whole, share, seed=0, step=1, loss_norm=loss_norm)
    assert again.to_bytes() == part.to_bytes()
    draws = [
        subsample(whole, 0.5, seed=s, step=t, loss_norm="token") for s in (0, 1) for t in (1, 2)
    ]
    assert len({tuple(d.meta[SAMPLE_INDICES]) for d in draws}) > 1
    assert subsample(whole, 1, seed=0, step=1, loss_norm="token") is whole


def of(batch: SealedBatch, name: str, sample: int) -> np.ndarray:
    start, end = batch.arrays["sample_offsets"][sample : sample + 2]
    return batch.arrays[name][start:end]


# The initial policy -------------------------------------------------------------------------


@pytest.mark.row("J1")
def test_a_model_directory_becomes_a_policy_without_torch(tmp_path):
    model = make_tiny_model(tmp_path / "model", 0)
    target = tmp_path / "weights" / "step-0"
    told = release_directory(model, target, step=0, token=GENESIS)
    manifest = read_and_verify(target, finite=True)
    assert (manifest.step, manifest.token, manifest.digest) == (0, GENESIS, told)
    assert (target / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    before = (target / "manifest.json").stat().st_mtime_ns
    assert release_directory(model, target, step=0, token=GENESIS) == told
    assert (target / "manifest.json").stat().st_mtime_ns == before
    (model / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(WeightsInvalid):
        release_directory(model, tmp_path / "weights" / "other", step=0, token=GENESIS)
    assert [p.name for p in (tmp_path / "weights").iterdir()] == ["step-0"]
