"""Unfinished samples of pending groups, appended as they grow."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from torchtitan_rl_ft.journal.tables import Tables

_TOKENS, _LOGPROBS = np.dtype("<i4"), np.dtype("<f4")


@dataclass(frozen=True)
class Piece:
    """What a sample has from token `start` on; what it had there before is no more. The lists
    have one length."""

    sample: int
    start: int
    output_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish_reason: str | None = None
    """"stop" or "length": the sample ends with these."""


class Partials(Tables):
    """They go with the group's end as pending: accepted, or dropped."""

    def keep_partials(self, pieces: Mapping[int, Sequence[Piece]]) -> None:
        """Append pieces of groups, in one transaction. Those of a group that is not pending any
        more are left out."""
        rows = [
            (
                group_id,
                p.sample,
                p.start,
                np.asarray(p.output_ids, _TOKENS).tobytes(),
                np.asarray(p.logprobs, _LOGPROBS).tobytes(),
                np.asarray(p.versions, _TOKENS).tobytes(),
                p.finish_reason,
                group_id,
            )
            for group_id, of_group in pieces.items()
            for p in of_group
        ]
        with self._db.write() as db:
            db.executemany(
                "INSERT INTO partials (group_id, sample, start, output_ids, logprobs, versions,"
                " finish_reason) SELECT ?, ?, ?, ?, ?, ?, ? FROM groups"
                " WHERE id = ? AND state = 'pending'",
                rows,
            )

    def partial(self, group_id: int) -> list[Piece]:
        """The pieces of a group in their order, up to the first that is damaged."""
        found = []
        for sample, start, *blobs, finish_reason in self._db.all(
            "SELECT sample, start, output_ids, logprobs, versions, finish_reason FROM partials"
            " WHERE group_id = ? ORDER BY id",
            group_id,
        ):
            lists = _decoded(*blobs)
            if lists is None:
                break
            found.append(Piece(sample, start, *lists, finish_reason))
        return found


def forget(db: sqlite3.Connection, group_id: int) -> None:
    db.execute("DELETE FROM partials WHERE group_id = ?", (group_id,))


def _decoded(
    output_ids: bytes, logprobs: bytes, versions: bytes
) -> tuple[list[int], list[float], list[int]] | None:
    """None when they do not fit together."""
    if len(output_ids) % 4 or not len(output_ids) == len(logprobs) == len(versions):
        return None
    return (
        np.frombuffer(output_ids, _TOKENS).tolist(),
        np.frombuffer(logprobs, _LOGPROBS).tolist(),
        np.frombuffer(versions, _TOKENS).tolist(),
    )
