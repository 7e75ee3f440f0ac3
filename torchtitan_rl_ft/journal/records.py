"""Plain-data records of the journal: sealed batches, commits, members. No torch, no pickle."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load, save

BATCH_FORMAT = 1

# dtype of each array of a sealed batch; N samples, T tokens over all samples.
ARRAYS: dict[str, Any] = {
    "tokens": np.int32,  # [T] prompt then response of each sample
    "sample_offsets": np.int64,  # [N + 1] sample i is tokens[offsets[i]:offsets[i + 1]]
    "prompt_lens": np.int32,  # [N]
    "logprobs": np.float32,  # [T] behaviour log-prob of each token; 0 on prompts
    "loss_mask": np.uint8,  # [T] 1 where the token is trained on
    "versions": np.int32,  # [T] policy version that sampled the token; -1 on prompts
    "weights": np.float32,  # [T] loss weights: the batch objective is sum_t weights[t] * loss[t]
    "advantages": np.float32,  # [N]
    "rewards": np.float32,  # [N]
    "group_ids": np.int64,  # [N] journal id of the prompt group
}


class BatchCorrupt(Exception):
    """The bytes are not a sealed batch, or not the one that was asked for."""


@dataclass(frozen=True)
class SealedBatch:
    """A final batch: tokens, advantages, masks, weights, ages. Any number of replica groups
    trains it to the same gradient, because `weights` is normalised over the whole batch."""

    batch_id: int
    arrays: dict[str, np.ndarray]
    meta: dict[str, Any]  # JSON: reward/mean, reward/std, policy_age/mean, dropped_groups, ...

    @property
    def n_samples(self) -> int:
        return len(self.arrays["prompt_lens"])

    @property
    def n_tokens(self) -> int:
        return len(self.arrays["tokens"])

    def lengths(self) -> np.ndarray:
        """Tokens of each sample, [N]."""
        return np.diff(self.arrays["sample_offsets"])

    def to_bytes(self) -> bytes:
        arrays = {k: np.ascontiguousarray(self.arrays[k], dtype=t) for k, t in ARRAYS.items()}
        head = {"format": BATCH_FORMAT, "batch_id": self.batch_id, "meta": self.meta}
        return save(arrays, metadata={"batch": json.dumps(head, sort_keys=True)})

    @classmethod
    def from_bytes(cls, data: bytes, expect_digest: str | None = None) -> SealedBatch:
        """Raises BatchCorrupt."""
        if expect_digest is not None and digest(data) != expect_digest:
            raise BatchCorrupt(f"digest {digest(data)} is not the sealed {expect_digest}")
        try:
            size = int.from_bytes(data[:8], "little")
            head = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["batch"])
            arrays = load(data)
        except Exception as e:
            raise BatchCorrupt(f"not a sealed batch: {e}") from e
        if head["format"] != BATCH_FORMAT or set(arrays) != set(ARRAYS):
            raise BatchCorrupt(f"sealed batch of another format ({head['format']})")
        return cls(head["batch_id"], arrays, head["meta"])


def digest(data: bytes) -> str:
    """Content digest of a sealed batch."""
    return hashlib.sha256(data).hexdigest()


GENESIS = "genesis"  # the token of a state with no commit


def next_token(token: str, batch_digest: str, nonce: int) -> str:
    """Token of the state after a commit: names the whole history that led to it.

    `nonce` is the sum of the participants' random integers, agreed by all-reduce, so two
    histories that train the same batch on the same state still differ.
    """
    return hashlib.sha256(f"{token}|{batch_digest}|{nonce}".encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Member:
    """One replica group's process, as the ledger knows it."""

    replica_id: int
    uuid: str  # new for each process life
    pid: int
    start_time: float
    host: str

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Member:
        return cls(**{k: data[k] for k in cls.__dataclass_fields__})


class Share(NamedTuple):
    """What one replica group trained of a step's batch, as the coverage proof has it."""

    group: str  # the trainer's name, "trainer-1"
    samples: int
    tokens: int


@dataclass(frozen=True)
class CommitRecord:
    """One committed step. `step` counts commits from 1; the state before has `prev_token`."""

    step: int
    batch_id: int
    digest: str
    prev_token: str
    token: str
    participants: int
    quorum_id: int
    shares: tuple[Share, ...] = ()  # in the order of the groups' ranks in the quorum

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CommitRecord:
        fields = {k: data[k] for k in cls.__dataclass_fields__ if k != "shares"}
        return cls(**fields, shares=tuple(Share(*s) for s in data.get("shares", ())))


class Decision(StrEnum):
    """The ledger's answer to `begin`."""

    GO = "go"  # train the named batch
    WAIT = "wait"  # a living group is ahead: ask for a quorum again, it will heal you
    HEAL = "heal"  # your history is not the ledger's: set the manager's step to 0, ask again
    RESTORE = "restore"  # load the named checkpoint (or the initial weights), begin again
    STOP = "stop"  # the run is over, or must not go on; see reason
