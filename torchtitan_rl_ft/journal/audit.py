"""Proof of the journal's accounts, from the file alone.

It reads what the tables hold and trusts none of the code that wrote them: each prompt group is in
exactly one state, each sample is in one batch, the living history is steps 1..N once each with an
unbroken chain of tokens, the replica groups' shares of each step are the whole batch, and
superseded commits are still there.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sqlite3
import urllib.parse
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.journal.database import FILE_NAME, check_format, check_pages, sqlite_error
from torchtitan_rl_ft.journal.errors import JournalError
from torchtitan_rl_ft.journal.records import GENESIS, BatchCorrupt, SealedBatch, Share

Rows = Callable[..., list[tuple[Any, ...]]]


@dataclass(frozen=True)
class HistoryRow:
    """One commit of the living history."""

    step: int
    batch_id: int
    digest: str
    token: str
    participants: int
    samples: int
    tokens: int
    reporter: str
    adopted: bool
    shares: tuple[Share, ...]


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
    with snapshot(folder) as rows:
        return audit_rows(rows)


@contextlib.contextmanager
def snapshot(folder: Path) -> Generator[Rows]:
    """A query function on one moment of the journal in `folder`, for reading alone.

    Raises JournalError when there is no journal, or it is damaged or of another format.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        raise JournalError(
            f"there is no journal in {folder}: no run with a journal has been started there"
        )
    try:
        db = sqlite3.connect(_uri(path), uri=True, isolation_level=None, timeout=5.0)
        try:
            db.execute("BEGIN")
            check_format(db, str(path))
            check_pages(db, str(path))
            yield lambda sql, *values: db.execute(sql, values).fetchall()
        finally:
            db.close()
    except sqlite3.Error as e:
        raise sqlite_error(e, "read", str(path)) from e


def _uri(path: Path) -> str:
    """SQLite needs a file of its own beside the journal, unless nobody can write there."""
    wal = path.with_name(f"{path.name}-wal")
    fixed = os.statvfs(path).f_flag & os.ST_RDONLY and not (wal.exists() and wal.stat().st_size)
    return f"file:{urllib.parse.quote(str(path.resolve()))}?" + (
        "immutable=1" if fixed else "mode=ro"
    )


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
    token, last_id = GENESIS, 0
    for *row, adopted, shares, commit_id, prev_token, sealed_digest, state in rows(
        "SELECT c.step, c.batch_id, c.digest, c.token, c.participants, b.samples, b.tokens,"
        " c.reporter, c.adopted, c.shares, c.id, c.prev_token, b.digest, b.state FROM commits c"
        " LEFT JOIN batches b ON b.id = c.batch_id WHERE c.superseded_by IS NULL"
        " ORDER BY c.step, c.id"
    ):
        told = tuple(Share(*share) for share in json.loads(shares))
        commit = HistoryRow(*row, adopted=bool(adopted), shares=told)
        where = f"commit of step {commit.step}"
        if commit.step != len(found.history) + 1:
            found.problems.append(f"{where}: step {len(found.history) + 1} was to come")
        if prev_token != token:
            found.problems.append(f"{where}: its previous token is not the one before")
        if commit_id <= last_id:
            found.problems.append(f"{where}: it was committed before the step ahead of it")
        if commit.digest != sealed_digest or state != "sealed":
            found.problems.append(f"{where}: batch {commit.batch_id} is not as it was sealed")
        if why := _wrong_shares(commit):
            found.problems.append(f"{where}: {why}")
        token, last_id = commit.token, commit_id
        found.history.append(commit)
    trained = [c.batch_id for c in found.history]
    if len(set(trained)) != len(trained):
        found.problems.append("a batch is committed twice in the living history")


def _wrong_shares(commit: HistoryRow) -> str | None:
    """Why the groups' shares are not the whole batch, or None."""
    names = {share.group for share in commit.shares}
    if len(names) != len(commit.shares) or len(names) != commit.participants:
        return f"{len(names)} groups have a share, {commit.participants} took part"
    trained = (sum(s.samples for s in commit.shares), sum(s.tokens for s in commit.shares))
    if trained != (commit.samples, commit.tokens):
        return (
            f"{trained[0]} samples of {trained[1]} tokens were trained, its batch has "
            f"{commit.samples} of {commit.tokens}"
        )
    return None


def _superseded(rows: Rows, found: Audit) -> None:
    """Each rewind still has the commits that it superseded: an unbroken chain from the state it
    went back to."""
    (orphans,) = rows(
        "SELECT count(*) FROM commits WHERE superseded_by IS NOT NULL"
        " AND superseded_by NOT IN (SELECT id FROM rewinds)"
    )[0]
    if orphans:
        found.problems.append(f"{orphans} superseded commits: no rewind accounts for them")
    for rewind_id, from_step, to_step in rows("SELECT id, from_step, to_step FROM rewinds"):
        chain = rows(
            "SELECT step, prev_token, token FROM commits WHERE superseded_by = ? ORDER BY id",
            rewind_id,
        )
        found.superseded += len(chain)
        where = f"rewind from step {from_step} to {to_step}"
        if [step for step, _, _ in chain] != list(range(to_step + 1, from_step + 1)):
            found.problems.append(
                f"{where}: the superseded commits that are left are those of steps "
                f"{[step for step, _, _ in chain]}"
            )
        elif any(a[2] != b[1] for a, b in itertools.pairwise(chain)):
            found.problems.append(f"{where}: the chain of superseded commits is broken")


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
