"""Where a trainer's state stands in the run's history."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan_rl_ft.journal.protocol import State
from torchtitan_rl_ft.journal.records import GENESIS, CommitRecord, Share, next_token


@dataclass
class Lineage:
    """How many commits the parameters hold, the token that names them (journal/records.py), and
    the last commit's record, which proves a report that was lost. `batches_committed` is torchft's
    count: groups that took part, over all steps. Healing and checkpoints carry it with the
    tensors."""

    step: int = 0
    token: str = GENESIS
    tail: CommitRecord | None = None
    tokens_seen: int = 0
    batches_committed: int = 0

    @property
    def state(self) -> State:
        return State(self.step, self.token)

    def next_record(
        self,
        batch_id: int,
        digest: str,
        nonce: int,
        *,
        participants: int,
        quorum_id: int,
        shares: tuple[Share, ...],
    ) -> CommitRecord:
        """The record of a commit on top of this state."""
        return CommitRecord(
            step=self.step + 1,
            batch_id=batch_id,
            digest=digest,
            prev_token=self.token,
            token=next_token(self.token, digest, nonce),
            participants=participants,
            quorum_id=quorum_id,
            shares=shares,
        )

    def advance(self, record: CommitRecord, tokens: int) -> None:
        self.step, self.token, self.tail = record.step, record.token, record
        self.tokens_seen += tokens
        self.batches_committed += record.participants

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "token": self.token,
            "tail": self.tail.to_json() if self.tail else None,
            "tokens_seen": self.tokens_seen,
            "batches_committed": self.batches_committed,
        }

    def load(self, data: dict[str, Any]) -> None:
        self.step, self.token = int(data["step"]), data["token"]
        self.tail = CommitRecord.from_json(data["tail"]) if data["tail"] else None
        self.tokens_seen = int(data["tokens_seen"])
        self.batches_committed = int(data["batches_committed"])
