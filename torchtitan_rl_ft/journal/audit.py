"""Proof of the journal's accounts, from the file alone.

It reads what the tables hold and trusts none of the code that wrote them: each prompt group is in
exactly one state, each sample is in one batch, the living history is steps 1..N once each with an
unbroken chain of tokens, and superseded commits are still there.
"""

from __future__ import annotations

import sqlite3
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.journal.database import FILE_NAME, sqlite_error
from torchtitan_rl_ft.journal.errors import JournalError
from torchtitan_rl_ft.journal.records import GENESIS, BatchCorrupt, SealedBatch

Rows = Callable[..., list[tuple[Any, ...]]]


@dataclass(frozen=True)
class HistoryRow:
    """One commit of the living history."""

    step: int
    batch_id: int
    token: str
    participants: int
    samples: int
    tokens: int
    reporter: str
    adopted: bool


@dataclass
class Audit:
    """`problems` is empty when the accounts hold. `counts` are prompt groups by state."""

    problems: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)  # by reason
    history: list[HistoryRow] = field(default_factory=list)
    superseded: int = 0

    @property
    def ok(self) -> bool:
        return not self.problems


def audit(folder: Path) -> Audit:
    """Audit the journal in `folder` (RUN/journal), also while its owner writes to it.

    Raises JournalError when there is no journal or it cannot be read.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        raise JournalError(f"there is no journal in {folder}")
    uri = f"file:{urllib.parse.quote(str(path.resolve()))}?mode=ro"
    try:
        db = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=5.0)
        try:
            db.execute("BEGIN")  # one snapshot for all checks
            return audit_rows(lambda sql, *values: db.execute(sql, values).fetchall())
        finally:
            db.close()
    except sqlite3.Error as e:
        raise sqlite_error(e, "read", str(path)) from e


def audit_rows(rows: Rows) -> Audit:
    """Audit through any query function; `Journal.audit` passes its own connection's."""
    found = Audit()
    _history(rows, found)
    _superseded(rows, found)
    _plan(rows, found)
    _batches(rows, found)
    _groups(rows, found)
    return found


def _history(rows: Rows, found: Audit) -> None:
    token = GENESIS
    for *row, adopted, prev_token, digest, sealed_digest, state in rows(
        "SELECT c.step, c.batch_id, c.token, c.participants, b.samples, b.tokens, c.reporter,"
        " c.adopted, c.prev_token, c.digest, b.digest, b.state FROM commits c"
        " LEFT JOIN batches b ON b.id = c.batch_id WHERE c.superseded_by IS NULL"
        " ORDER BY c.step, c.id"
    ):
        commit = HistoryRow(*row, adopted=bool(adopted))
        where = f"commit of step {commit.step}"
        if commit.step != len(found.history) + 1:
            found.problems.append(f"{where}: step {len(found.history) + 1} was to come")
        if prev_token != token:
            found.problems.append(f"{where}: its previous token is not the one before")
        if digest != sealed_digest or state != "sealed":
            found.problems.append(f"{where}: batch {commit.batch_id} is not as it was sealed")
        token = commit.token
        found.history.append(commit)
    trained = [c.batch_id for c in found.history]
    if len(set(trained)) != len(trained):
        found.problems.append("a batch is committed twice in the living history")


def _superseded(rows: Rows, found: Audit) -> None:
    for step, to_step in rows(
        "SELECT c.step, r.to_step FROM commits c LEFT JOIN rewinds r ON r.id = c.superseded_by"
        " WHERE c.superseded_by IS NOT NULL"
    ):
        found.superseded += 1
        if to_step is None or to_step >= step:
            found.problems.append(f"superseded commit of step {step}: no rewind accounts for it")
    for from_step, to_step, n in rows(
        "SELECT from_step, to_step, (SELECT count(*) FROM commits WHERE superseded_by = r.id)"
        " FROM rewinds r"
    ):
        if n != from_step - to_step:
            found.problems.append(
                f"rewind from step {from_step} to {to_step}: {n} superseded commits are left"
            )


def _plan(rows: Rows, found: Audit) -> None:
    """Batches that were not dropped are planned, in the order they were sealed."""
    planned = rows("SELECT step, batch_id FROM plan ORDER BY step")
    sealed = [b for (b,) in rows("SELECT id FROM batches WHERE state = 'sealed' ORDER BY id")]
    if planned != [(i + 1, b) for i, b in enumerate(sealed)]:
        found.problems.append("the plan is not the sealed batches in their order")
    trained = [(c.step, c.batch_id) for c in found.history]
    if planned[: len(trained)] != trained:
        found.problems.append("the living history is not the plan's beginning")


def _batches(rows: Rows, found: Audit) -> None:
    freed = rows("SELECT value FROM meta WHERE key = 'freed_through'")
    freed_through = int(freed[0][0]) if freed else 0
    tip = len(found.history)
    if freed_through > tip:
        found.problems.append(f"batches are freed up to step {freed_through}, the tip is {tip}")
    ids = rows(
        "SELECT b.id, b.digest, p.step, b.state, b.payload IS NULL FROM batches b"
        " LEFT JOIN plan p ON p.batch_id = b.id ORDER BY b.id"
    )
    for batch_id, digest, step, state, gone in ids:
        if gone:
            if state == "sealed" and step > freed_through:
                found.problems.append(f"batch {batch_id} (step {step}) has lost its bytes")
            continue
        (payload,) = rows("SELECT payload FROM batches WHERE id = ?", batch_id)[0]
        try:
            batch = SealedBatch.from_bytes(payload, digest)
        except BatchCorrupt as e:
            found.problems.append(f"batch {batch_id}: {e}")
            continue
        inside = set(batch.arrays["group_ids"].tolist())
        listed = {g for (g,) in rows("SELECT id FROM groups WHERE batch_id = ?", batch_id)}
        if batch.batch_id != batch_id or inside != listed:
            found.problems.append(f"batch {batch_id}: its samples are not those of its groups")


def _groups(rows: Rows, found: Audit) -> None:
    trained = {c.batch_id for c in found.history}
    states = {"pending": 0, "accepted": 0, "sealed": 0, "trained": 0, "dropped": 0}
    expected = 1
    for group_id, state, has_samples, batch_id, reason, batch_state in rows(
        "SELECT g.id, g.state, g.samples IS NOT NULL, g.batch_id, g.reason, b.state FROM groups g"
        " LEFT JOIN batches b ON b.id = g.batch_id ORDER BY g.id"
    ):
        if group_id != expected:
            found.problems.append(f"group {expected} is nowhere")
        expected = group_id + 1
        # What each state is made of: (samples, batch and its state, reason).
        shape = (bool(has_samples), batch_state, reason is not None)
        legal = {
            "pending": [(False, None, False)],
            "accepted": [(True, None, False)],
            "sealed": [(False, "sealed", False)],
            "dropped": [(False, None, True), (False, "dropped", True)],
        }
        if shape not in legal.get(state, []):
            found.problems.append(f"group {group_id} is {state}, yet {shape}")
        name = "trained" if state == "sealed" and batch_id in trained else state
        states[name] = states.get(name, 0) + 1
        if state == "dropped":
            found.dropped[reason] = found.dropped.get(reason, 0) + 1
    found.counts = states
