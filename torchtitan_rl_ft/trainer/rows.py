"""Rows of a micro-batch from a sealed batch: what one rank feeds to the model.

One sample per row, padded on the right. Dimension key: B rows, S positions, C channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torchtitan.components.loss import IGNORE_INDEX

from torchtitan_rl_ft.journal.records import SealedBatch

# Channels of `labels_BSC`. Everything the loss needs travels in the labels tensor, the one that
# TorchTitan hands from the data loader to the loss under every parallelism. float32 holds token
# ids exactly up to 2**24.
TARGET, WEIGHT, ADVANTAGE, BEHAVIOUR_LOGPROB, REFERENCE_LOGPROB = range(5)
CHANNELS = 5


@dataclass(frozen=True)
class MicroBatch:
    """`input_BS` int64, `labels_BSC` float32, `samples` the batch indices of the rows."""

    input_BS: torch.Tensor
    labels_BSC: torch.Tensor
    positions_BS: torch.Tensor
    samples: np.ndarray


def row_length(batch: SealedBatch, seq_len: int, fixed: bool, multiple: int = 8) -> int:
    """Positions of a row: `seq_len` where shapes must not change, else the longest sample of the
    *whole* batch, rounded up, so that all ranks agree.

    Raises ValueError when a sample does not fit.
    """
    longest = int(batch.lengths().max()) if batch.n_samples else 1
    # Position t predicts token t + 1, so the last token is a target only.
    needed = longest - 1
    if needed > seq_len:
        raise ValueError(
            f"batch {batch.batch_id} holds a sample of {longest} tokens; training.seq_len "
            f"{seq_len} takes {seq_len + 1}"
        )
    return seq_len if fixed else min(seq_len, -(-max(needed, 1) // multiple) * multiple)


def micro_batches(
    batch: SealedBatch, indices: np.ndarray, *, rows: int, length: int, count: int
) -> Iterator[MicroBatch]:
    """`count` micro-batches of `rows` rows over the samples `indices`.

    Rows beyond the samples are empty: weight 0 everywhere, so they add nothing to the loss, and
    every rank runs the same number of collectives.
    """
    if len(indices) > rows * count:
        raise ValueError(f"{len(indices)} samples do not fit {count} micro-batches of {rows} rows")
    for i in range(count):
        yield _micro_batch(batch, indices[i * rows : (i + 1) * rows], rows, length)


def unpack(
    batch: SealedBatch, rows: MicroBatch, values_BS: torch.Tensor, target: np.ndarray
) -> None:
    """Put the values of the rows' targets where these tokens are in `target` [T]."""
    values, offsets = values_BS.cpu().numpy(), batch.arrays["sample_offsets"]
    for row, sample in enumerate(rows.samples):
        start, end = offsets[sample], offsets[sample + 1]
        target[start + 1 : end] = values[row, : end - start - 1]


def _micro_batch(batch: SealedBatch, samples: np.ndarray, rows: int, length: int) -> MicroBatch:
    a = batch.arrays
    inputs = np.zeros((rows, length), dtype=np.int64)
    labels = np.zeros((rows, length, CHANNELS), dtype=np.float32)
    labels[:, :, TARGET] = IGNORE_INDEX
    for row, sample in enumerate(samples):
        start, end = a["sample_offsets"][sample], a["sample_offsets"][sample + 1]
        n = int(end - start) - 1
        if n < 1:
            continue
        inputs[row, :n] = a["tokens"][start : end - 1]
        shifted = slice(start + 1, end)
        mask = a["loss_mask"][shifted].astype(bool)
        # Non-finite log-probs carry weight 0 (sealing), and must not reach the arithmetic.
        logprobs = np.nan_to_num(a["logprobs"][shifted], nan=0.0, posinf=0.0, neginf=0.0)
        labels[row, :n, TARGET] = np.where(mask, a["tokens"][shifted], IGNORE_INDEX)
        labels[row, :n, WEIGHT] = np.where(mask, a["weights"][shifted], 0.0)
        labels[row, :n, ADVANTAGE] = a["advantages"][sample]
        labels[row, :n, BEHAVIOUR_LOGPROB] = np.where(mask, logprobs, 0.0)
    positions = np.broadcast_to(np.arange(length, dtype=np.int64), (rows, length)).copy()
    return MicroBatch(
        torch.from_numpy(inputs), torch.from_numpy(labels), torch.from_numpy(positions), samples
    )
