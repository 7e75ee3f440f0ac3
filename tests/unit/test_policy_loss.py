"""Policy losses against formulas written out by hand, and what must not reach the gradient."""

import math

import numpy as np
import pytest
import torch
from torchtitan.components.loss import IGNORE_INDEX

from torchtitan_rl_ft.journal.records import SealedBatch
from torchtitan_rl_ft.trainer.policy_loss import PolicyLoss, Stat
from torchtitan_rl_ft.trainer.rows import CHANNELS, micro_batches, row_length

VOCAB = 11


def sealed(samples, weights=None):
    """samples: (prompt ids, response ids, advantage, log-prob per response token)"""
    tokens, offsets, prompts, logprobs, mask, versions = [], [0], [], [], [], []
    for prompt, response, _, lp in samples:
        tokens += [*prompt, *response]
        offsets.append(len(tokens))
        prompts.append(len(prompt))
        logprobs += [0.0] * len(prompt) + list(lp)
        mask += [0] * len(prompt) + [1] * len(response)
        versions += [-1] * len(prompt) + [1] * len(response)
    mask = np.array(mask, np.uint8)
    if weights is None:
        weights = mask / mask.sum()
    return SealedBatch(
        1,
        {
            "tokens": np.array(tokens, np.int32),
            "sample_offsets": np.array(offsets, np.int64),
            "prompt_lens": np.array(prompts, np.int32),
            "logprobs": np.array(logprobs, np.float32),
            "loss_mask": mask,
            "versions": np.array(versions, np.int32),
            "weights": np.asarray(weights, np.float32),
            "advantages": np.array([s[2] for s in samples], np.float32),
            "rewards": np.zeros(len(samples), np.float32),
            "group_ids": np.zeros(len(samples), np.int64),
        },
        {},
    )


def only_micro_batch(batch, rows=None):
    rows = rows or batch.n_samples
    indices = np.arange(batch.n_samples)
    length = row_length(batch, 64, fixed=False)
    (mb,) = micro_batches(batch, indices, rows=rows, length=length, count=1)
    return mb


def logits_for(mb, seed=0):
    torch.manual_seed(seed)
    rows, length = mb.input_BS.shape
    return torch.randn(rows, length, VOCAB, requires_grad=True)


SAMPLES = [
    ([1, 2], [3, 4, 5], 1.0, [-1.0, -2.0, -3.0]),
    ([1, 2, 6], [7], -0.5, [-2.5]),
    ([1], [8, 9], 0.0, [-2.0, -2.2]),
]


def expected_loss(batch, logits, low=0.2, high=0.2, cap=2.0):
    logprobs = torch.log_softmax(logits.detach(), dim=-1)
    total, a = 0.0, batch.arrays
    for i in range(batch.n_samples):
        start, end = a["sample_offsets"][i], a["sample_offsets"][i + 1]
        for t in range(start + 1, end):
            if not a["loss_mask"][t]:
                continue
            lp = float(logprobs[i, t - start - 1, a["tokens"][t]])
            r = min(math.exp(lp - a["logprobs"][t]), cap)
            clipped = min(max(r, 1 - low), 1 + high)
            total += -min(r * a["advantages"][i], clipped * a["advantages"][i]) * a["weights"][t]
    return total


def test_grpo_equals_the_formula():
    batch = sealed(SAMPLES)
    mb = only_micro_batch(batch)
    logits = logits_for(mb)
    loss, _ = PolicyLoss.Config().build()(logits, mb.labels_BSC)
    assert float(loss) == pytest.approx(expected_loss(batch, logits), rel=1e-5)


def test_tis_gradient_is_the_weighted_policy_gradient():
    batch = sealed(SAMPLES)
    mb = only_micro_batch(batch)
    logits = logits_for(mb)
    PolicyLoss.Config(kind="tis", ratio_cap=1.5).build()(logits, mb.labels_BSC)[0].backward()
    other = logits.detach().clone().requires_grad_()
    logprobs = torch.log_softmax(other, dim=-1)
    objective = torch.zeros(())
    a = batch.arrays
    for i in range(batch.n_samples):
        start, end = a["sample_offsets"][i], a["sample_offsets"][i + 1]
        for t in range(start + int(a["prompt_lens"][i]), end):
            lp = logprobs[i, t - start - 1, int(a["tokens"][t])]
            r = min(math.exp(float(lp.detach()) - a["logprobs"][t]), 1.5)
            objective = objective - r * float(a["advantages"][i]) * lp * float(a["weights"][t])
    objective.backward()
    torch.testing.assert_close(logits.grad, other.grad)


def test_prompt_padding_and_empty_rows_add_nothing():
    batch = sealed(SAMPLES)
    exact, padded = only_micro_batch(batch), only_micro_batch(batch, rows=8)
    logits = logits_for(padded)
    loss, _ = PolicyLoss.Config().build()(logits, padded.labels_BSC)
    loss.backward()
    alone, _ = PolicyLoss.Config().build()(logits[:3].detach(), exact.labels_BSC)
    assert float(loss) == pytest.approx(float(alone), rel=1e-6)
    assert torch.all(logits.grad[3:] == 0)
    untrained = padded.labels_BSC[..., 0] == IGNORE_INDEX
    assert torch.all(logits.grad[untrained] == 0)


@pytest.mark.row("I6")
def test_nonfinite_behaviour_logprob_without_weight_gives_zero_gradient_there():
    samples = [([1, 2], [3, 4], 1.0, [float("nan"), -2.0])]
    batch = sealed(samples, weights=[0, 0, 0, 1.0])
    mb = only_micro_batch(batch)
    logits = logits_for(mb)
    loss, _ = PolicyLoss.Config().build()(logits, mb.labels_BSC)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logits.grad).all()
    assert torch.all(logits.grad[0, 1] == 0)


@pytest.mark.row("I6")
@pytest.mark.parametrize("behaviour", [-50.0, -1e30, -float("inf")])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_huge_ratio_stays_finite(behaviour, advantage):
    batch = sealed([([1], [2], advantage, [behaviour])])
    mb = only_micro_batch(batch)
    logits = logits_for(mb)
    loss, _ = PolicyLoss.Config().build()(logits, mb.labels_BSC)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logits.grad).all()


def test_kl_is_zero_on_the_reference_itself_and_positive_elsewhere():
    batch = sealed([([1], [2, 3], 0.0, [-1.0, -1.0])])
    mb = only_micro_batch(batch)
    logits = logits_for(mb)
    labels = mb.labels_BSC.clone()
    logprobs = torch.log_softmax(logits.detach(), -1)
    labels[..., 4] = logprobs.gather(-1, labels[..., 0].clamp(min=0).long().unsqueeze(-1))[..., 0]
    loss_fn = PolicyLoss.Config(kl_coef=0.1).build()
    assert float(loss_fn(logits, labels)[0]) == pytest.approx(0.0, abs=1e-7)
    labels[..., 4] += 0.5
    assert float(loss_fn(logits, labels)[0]) > 0


def test_stats_are_sums_over_trained_tokens_and_are_taken_once():
    batch = sealed(SAMPLES)
    mb = only_micro_batch(batch)
    loss_fn = PolicyLoss.Config().build()
    loss_fn(logits_for(mb), mb.labels_BSC)
    loss_fn(logits_for(mb), mb.labels_BSC)
    stats = loss_fn.take_stats()
    assert stats[Stat.TOKENS] == 12
    assert stats[Stat.ENTROPY] > 0
    assert loss_fn.take_stats() is None


def test_any_split_of_a_batch_sums_to_the_same_gradient():
    """The weights are sealed over the whole batch: shards and micro-batches never enter."""
    batch = sealed([([1, 2], [i % VOCAB, 4], (-1.0) ** i, [-2.0, -2.0]) for i in range(7)])
    weight = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))

    def gradient(shards):
        w = weight.clone().requires_grad_()
        for indices in shards:
            length = row_length(batch, 64, fixed=False)
            count = -(-max(1, len(indices)) // 2)
            for mb in micro_batches(batch, indices, rows=2, length=length, count=count):
                logits = torch.nn.functional.one_hot(mb.input_BS, VOCAB).float() @ w
                PolicyLoss.Config().build()(logits, mb.labels_BSC)[0].backward()
        return w.grad

    whole = gradient([np.arange(7)])
    split = gradient([np.array([0, 5]), np.array([], dtype=np.int64), np.array([1, 2, 3, 4, 6])])
    assert float((whole - split).norm() / whole.norm()) < 1e-5


def test_labels_hold_everything_the_loss_needs():
    assert only_micro_batch(sealed(SAMPLES)).labels_BSC.shape[-1] == CHANNELS


def test_a_sample_that_is_too_long_is_named():
    with pytest.raises(ValueError, match="holds a sample of 5 tokens"):
        row_length(sealed(SAMPLES), 3, fixed=False)
