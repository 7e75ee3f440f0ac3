"""Small journals and batches for the journal's tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from torchtitan_rl_ft.journal.ledger import Ledger
from torchtitan_rl_ft.journal.records import (
    ARRAYS,
    CommitRecord,
    Member,
    SealedBatch,
    Share,
    next_token,
)
from torchtitan_rl_ft.journal.store import Journal, NewGroup, SealedInfo
from torchtitan_rl_ft.journal.views import view
from torchtitan_rl_ft.observability.events import EventList


def make_batch(group_ids: Sequence[int], samples_per_group: int = 2) -> SealedBatch:
    """A batch whose content depends on its groups only."""
    ids = np.repeat(np.asarray(group_ids, dtype=np.int64), samples_per_group)
    lengths = 3 + ids % 4
    total = int(lengths.sum())
    arrays: dict[str, np.ndarray] = {
        "tokens": np.arange(total) % 16,
        "sample_offsets": np.concatenate([[0], np.cumsum(lengths)]),
        "prompt_lens": np.ones(len(ids)),
        "logprobs": -np.ones(total),
        "loss_mask": np.ones(total),
        "versions": np.zeros(total),
        "weights": np.full(total, 1 / total),
        "advantages": np.zeros(len(ids)),
        "rewards": np.zeros(len(ids)),
        "group_ids": ids,
    }
    arrays = {k: np.asarray(v, dtype=ARRAYS[k]) for k, v in arrays.items()}
    meta = {"reward/mean": 0.5, "reward/std": 0.1, "policy_version": 1, "policy_age/mean": 0.0}
    return SealedBatch(0, arrays, meta)


def issue(journal: Journal, n: int) -> list[int]:
    at = journal.cursor() or 0
    return journal.issue([NewGroup({"q": at + i}, f"0:{at + i}") for i in range(n)], at + n)


def accept(journal: Journal, group_ids: Sequence[int]) -> None:
    for g in group_ids:
        journal.accept(g, {"tokens": np.arange(3, dtype=np.int32)}, meta={"reward": 1.0})


def seal(journal: Journal, n: int = 2) -> SealedInfo:
    """Issue, accept and seal `n` groups."""
    ids = issue(journal, n)
    accept(journal, ids)
    return journal.seal(make_batch(ids), ids)


def member(name: str, replica_id: int = 0) -> Member:
    return Member(replica_id, name, pid=1, start_time=0.0, host="elsewhere")


def split(batch: SealedBatch, participants: int) -> tuple[Share, ...]:
    """The shares that groups 0 to `participants` - 1 train of a batch."""
    lengths = batch.lengths()
    views = [view(lengths, r, participants) for r in range(participants)]
    return tuple(Share(f"trainer-{r}", len(v), int(lengths[v].sum())) for r, v in enumerate(views))


def record(journal: Journal, nonce: int = 1) -> CommitRecord:
    """The commit of the head batch by a state at the tip."""
    tip, head = journal.tip, journal.head()
    assert head is not None
    token = next_token(tip.token, head.digest, nonce)
    return CommitRecord(
        tip.step + 1,
        head.batch_id,
        head.digest,
        tip.token,
        token,
        participants=2,
        quorum_id=7,
        shares=split(journal.batch(head.batch_id), 2),
    )


def make_ledger(journal: Journal, folder: Path, events: EventList, **kwargs) -> Ledger:
    kwargs.setdefault("why_incomplete", lambda checkpoint: None)
    kwargs.setdefault("gone", lambda member: False)
    return Ledger(journal, events=events, metrics_path=folder / "metrics.jsonl", **kwargs)
