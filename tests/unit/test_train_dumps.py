"""Train dumps: the policy's log-probs of a step, carried by its proof, in one file per step."""

from __future__ import annotations

import errno
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from test_policy_loss import SAMPLES, sealed

from torchtitan_rl_ft.journal.dump_files import SAMPLE_INDICES
from torchtitan_rl_ft.journal.records import CommitRecord
from torchtitan_rl_ft.journal.views import view
from torchtitan_rl_ft.observability.events import EventList
from torchtitan_rl_ft.trainer import coverage
from torchtitan_rl_ft.trainer.coverage import Claim
from torchtitan_rl_ft.trainer.policy_loss import PolicyLoss
from torchtitan_rl_ft.trainer.rows import micro_batches, row_length, unpack
from torchtitan_rl_ft.trainer.train_dumps import TrainDumps, load_train_dump

VOCAB = 32
BATCH = sealed(SAMPLES)
RECORD = CommitRecord(3, 1, "cd" * 32, "genesis", "t" * 32, 2, 5)


def logits_of(tokens: torch.Tensor) -> torch.Tensor:
    """A made-up policy: what follows depends on the last token alone."""
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))
    return table[tokens]


def expected() -> np.ndarray:
    tokens = torch.from_numpy(BATCH.arrays["tokens"].astype(np.int64))
    logprobs = logits_of(tokens).log_softmax(-1)
    found = np.zeros(BATCH.n_tokens)
    for t in np.flatnonzero(BATCH.arrays["weights"] > 0):
        found[t] = logprobs[t - 1, tokens[t]]
    return found


def recorded(samples: np.ndarray) -> np.ndarray:
    loss = PolicyLoss(PolicyLoss.Config(record=True))
    found = np.zeros(BATCH.n_tokens)
    length = row_length(BATCH, 64, fixed=False)
    for rows in micro_batches(BATCH, samples, rows=2, length=length, count=len(samples)):
        loss(logits_of(rows.input_BS), rows.labels_BSC)
        unpack(BATCH, rows, loss.take_logprobs(), found)
    return found


@pytest.mark.row("J3")
def test_each_token_gets_the_log_prob_of_the_policy():
    np.testing.assert_allclose(recorded(np.arange(BATCH.n_samples)), expected(), atol=1e-6)


def test_nothing_is_kept_unless_it_is_asked_for():
    loss = PolicyLoss(PolicyLoss.Config())
    rows = next(micro_batches(BATCH, np.array([0]), rows=1, length=16, count=1))
    loss(logits_of(rows.input_BS), rows.labels_BSC)
    assert loss._logprobs == []


@pytest.mark.row("J3")
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_the_proof_of_a_step_carries_every_sample_once_for_any_number_of_groups(shards):
    claim = Claim(2, "ab" * 16, "cd" * 32, BATCH.n_samples, BATCH.n_tokens)
    total = torch.zeros(coverage.HEAD + BATCH.n_samples + BATCH.n_tokens, dtype=torch.float64)
    for shard in range(shards):
        samples = view(BATCH.lengths(), shard, shards)
        total += coverage.fill(
            claim,
            samples,
            rank=shard,
            nonce=1,
            speaks=True,
            nonfinite=False,
            loss=0.1,
            stats=None,
            recorded=recorded(samples),
        )
    outcome = coverage.check(total, claim, shards)
    np.testing.assert_allclose(outcome.recorded, expected(), atol=1e-6)
    other = coverage.abstain(BATCH.n_samples, speaks=True, n_riders=BATCH.n_tokens)
    with pytest.raises(coverage.CoverageError, match="abstained"):
        coverage.check(total + other, claim, shards)


def dumps(folder, events=None) -> TrainDumps:
    return TrainDumps("t/{rollout_id}.safetensors", folder, 2.0, events or EventList())


@pytest.mark.row("J3")
def test_a_file_holds_what_the_loss_saw(tmp_path):
    logprobs = expected()
    dumps(tmp_path).write(BATCH, RECORD, logprobs, {"loss": 0.5})
    found = load_train_dump(tmp_path / "t/3.safetensors")
    assert (found.step, found.token, found.batch_digest) == (3, RECORD.token, RECORD.digest)
    assert found.metrics == {"loss": 0.5}
    a, trained = found.arrays, BATCH.arrays["weights"] > 0
    assert a["index"].tolist() == list(range(BATCH.n_samples))
    gap = logprobs[trained] - BATCH.arrays["logprobs"][trained]
    np.testing.assert_allclose(a["ratio"][trained], np.minimum(np.exp(gap), 2.0), rtol=1e-5)
    for name in ("ratio", "policy_logprobs", "behaviour_logprobs"):
        assert a[name].shape == trained.shape and not a[name][~trained].any()


def test_samples_of_a_share_are_named_by_their_place_in_the_whole(tmp_path):
    places = list(range(4, 4 + BATCH.n_samples))
    part = replace(BATCH, meta={**BATCH.meta, SAMPLE_INDICES: places})
    dumps(tmp_path).write(part, RECORD, expected(), {})
    assert load_train_dump(tmp_path / "t/3.safetensors").arrays["index"].tolist() == places


def test_one_file_per_step_of_the_history_that_counts(tmp_path):
    path = tmp_path / "t/3.safetensors"
    dumps(tmp_path).write(BATCH, RECORD, expected(), {"loss": 1.0})
    first = path.stat().st_mtime_ns
    dumps(tmp_path).write(BATCH, RECORD, expected(), {"loss": 1.0})  # another group
    assert path.stat().st_mtime_ns == first
    again = replace(RECORD, token="u" * 32)  # the step trained anew after a rewind
    dumps(tmp_path).write(BATCH, again, expected(), {"loss": 2.0})
    assert load_train_dump(path).token == again.token


def test_a_full_disk_is_told_and_training_goes_on(tmp_path):
    events = EventList()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with patch("torchtitan_rl_ft.journal.dump_files.write_atomic", full):
        dumps(tmp_path, events).write(BATCH, RECORD, expected(), {})
    (told,) = events.events
    assert told["kind"] == "warn" and "t/3.safetensors: No space left" in told["cause"]
