"""The journal: prompt groups, sealed batches and the commit history of a run, in SQLite.

Each prompt group is at all times in exactly one state: pending, accepted, sealed (not trained),
trained (sealed, and its batch is committed on the living chain) or dropped with a reason.
Everything is plain data: JSON and safetensors; nothing is ever unpickled.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from safetensors.numpy import load, save

from torchtitan_rl_ft.journal import drop_kinds
from torchtitan_rl_ft.journal.audit import Audit, audit_rows
from torchtitan_rl_ft.journal.database import FILE_NAME, Database
from torchtitan_rl_ft.journal.errors import JournalCorrupt, JournalStateError, JournalWriteError
from torchtitan_rl_ft.journal.history import History
from torchtitan_rl_ft.journal.owner import OwnerLock
from torchtitan_rl_ft.journal.partials import Partials, forget
from torchtitan_rl_ft.journal.protocol import BatchRef
from torchtitan_rl_ft.journal.records import BatchCorrupt, SealedBatch, digest
from torchtitan_rl_ft.observability.events import EventSink, Kind


@dataclass(frozen=True)
class NewGroup:
    """A prompt to issue. `prompt` is JSON; `key` names the visit (say "epoch:index") and may
    be issued once only."""

    prompt: Any
    key: str | None = None


@dataclass(frozen=True)
class PromptGroup:
    """An issued prompt, and once accepted its samples as plain arrays."""

    group_id: int
    key: str | None
    prompt: Any
    samples: dict[str, np.ndarray] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    min_version: int | None = None
    max_version: int | None = None


@dataclass(frozen=True)
class SealedInfo:
    batch_id: int
    step: int  # the step it is planned for
    digest: str
    samples: int
    tokens: int

    @property
    def ref(self) -> BatchRef:
        return BatchRef(self.batch_id, self.digest)


class Journal(History, Partials):
    """Use `Journal.open`. One writer; every method that changes something is one durable
    transaction and then emits its events, so an event never tells of what is not on disk.

    Methods raise JournalWriteError (full disk; nothing changed), JournalFenced, JournalCorrupt
    and, where the caller's request does not fit, JournalStateError.
    """

    forgetful = False
    """It is kept in memory alone."""

    def __init__(
        self,
        db: Database,
        lock: OwnerLock | None,
        events: EventSink,
        wall_s: Callable[[], float],
    ) -> None:
        self._owner_lock = lock
        self.owner = db.take_over()
        super().__init__(db, events, wall_s)
        self.uuid = self._meta("uuid") or self._named()

    def _named(self) -> str:
        """A name for this history, other than that of any other journal."""
        name = secrets.token_hex(8)
        with self._db.write() as db:
            db.execute("INSERT INTO meta VALUES ('uuid', ?)", (name,))
        return name

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        events: EventSink,
        durable: bool = True,
        wall_s: Callable[[], float] = time.time,
    ) -> Self:
        """Open or create the journal in `folder` (RUN/journal) as its only writer.

        `durable=False` (`rollout.journal=false`) keeps it in memory, with the same interface: it is
        `forgetful`, and empty at first.
        Raises JournalBusy when another living job owns the folder, JournalCorrupt,
        JournalWriteError.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise JournalWriteError(f"cannot create {folder}: {e.strerror}") from e
        lock = OwnerLock(folder)
        try:
            db = Database(folder / FILE_NAME if durable else None)
            made = cls(db, lock, events, wall_s)
            made.forgetful = not durable
            return made
        except BaseException:
            lock.release()
            raise

    def close(self) -> None:
        self._db.close()
        if self._owner_lock is not None:
            self._owner_lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Prompt groups --------------------------------------------------------------------------

    def issue(self, groups: Sequence[NewGroup], cursor: Any) -> list[int]:
        """Record prompts as pending together with the source's position after them (JSON).
        Returns their ids, in order."""
        now = self._wall_s()
        with self._db.write() as db:
            ids = [_insert_group(db, g, now) for g in groups]
            _save_cursor(db, cursor)
        self._changed()
        return ids

    def cursor(self) -> Any | None:
        """The source's last recorded position; None before the first `issue`."""
        row = self._db.one("SELECT cursor FROM source")
        return None if row is None else json.loads(row[0])

    def pending(self) -> list[PromptGroup]:
        """Issued and not rolled out: what a restarted rollout role generates first."""
        rows = self._db.all(
            "SELECT id, key, prompt FROM groups WHERE state = 'pending' ORDER BY id"
        )
        return [PromptGroup(i, key, json.loads(prompt)) for i, key, prompt in rows]

    def accept(
        self,
        group_id: int,
        samples: Mapping[str, np.ndarray],
        *,
        meta: Mapping[str, Any] | None = None,
        min_version: int | None = None,
        max_version: int | None = None,
        cursor: Any | None = None,
    ) -> None:
        """Make the rolled-out samples of a pending group durable, with `cursor` when given."""
        payload = save({k: np.ascontiguousarray(v) for k, v in samples.items()})
        with self._db.write() as db:
            _require(db, group_id, "pending")
            db.execute(
                "UPDATE groups SET state = 'accepted', samples = ?, meta = ?, min_version = ?,"
                " max_version = ?, changed_wall_s = ? WHERE id = ?",
                (
                    payload,
                    json.dumps(dict(meta or {})),
                    min_version,
                    max_version,
                    self._wall_s(),
                    group_id,
                ),
            )
            forget(db, group_id)
            if cursor is not None:
                _save_cursor(db, cursor)
        self._changed()

    def accepted(self, limit: int | None = None) -> list[PromptGroup]:
        """Accepted groups, oldest first, with their samples."""
        rows = self._db.all(
            "SELECT id, key, prompt, samples, meta, min_version, max_version FROM groups"
            " WHERE state = 'accepted' ORDER BY id LIMIT ?",
            -1 if limit is None else limit,
        )
        return [
            PromptGroup(i, key, json.loads(prompt), load(samples), json.loads(meta), low, high)
            for i, key, prompt, samples, meta, low, high in rows
        ]

    def drop(self, group_id: int, reason: str) -> None:
        """Take a pending or accepted group out for good."""
        if not reason:
            raise JournalStateError(f"group {group_id}: a drop needs a reason")
        with self._db.write() as db:
            _require(db, group_id, "pending", "accepted")
            db.execute(
                "UPDATE groups SET state = 'dropped', reason = ?, samples = NULL,"
                " changed_wall_s = ? WHERE id = ?",
                (reason, self._wall_s(), group_id),
            )
            forget(db, group_id)
        self._events.emit(Kind.DROP, cause=reason, group=group_id)
        self._changed()

    # Batches --------------------------------------------------------------------------------

    def next_batch_id(self) -> int:
        last = self._number("SELECT coalesce(max(id), 0) FROM batches")
        return max(last, self._base_batch_id) + 1

    def seal(
        self, batch: SealedBatch, group_ids: Sequence[int], *, cursor: Any | None = None
    ) -> SealedInfo:
        """Make `batch` final and plan it for the next free step, in one transaction with its
        groups. The journal assigns `batch_id`; `meta["dropped_groups"]` is filled in when
        absent: groups dropped since the batch before."""
        with self._mutex:
            if set(np.unique(batch.arrays["group_ids"]).tolist()) != set(group_ids):
                raise JournalStateError("the batch's samples are not those of the named groups")
            dropped = drop_kinds.by_kind(self._dropped())
            news = dropped - self._dropped_told()
            batch = dataclasses.replace(
                batch,
                batch_id=self.next_batch_id(),
                meta={"dropped_groups": news.total()}
                | {drop_kinds.PREFIX + kind: news[kind] for kind in drop_kinds.KINDS}
                | batch.meta,
            )
            payload = batch.to_bytes()
            info = self._planned(batch, payload)
            now = self._wall_s()
            with self._db.write() as db:
                for group_id in group_ids:
                    _require(db, group_id, "accepted")
                _insert_batch(db, info, batch.meta, payload, now)
                db.executemany(
                    "UPDATE groups SET state = 'sealed', batch_id = ?, samples = NULL,"
                    " changed_wall_s = ? WHERE id = ?",
                    [(info.batch_id, now, g) for g in group_ids],
                )
                told = json.dumps(dropped)
                db.execute("INSERT OR REPLACE INTO meta VALUES ('dropped_told', ?)", (told,))
                if cursor is not None:
                    _save_cursor(db, cursor)
            self._plan[info.step] = info.ref
        self._tell_sealed(info, group_ids)
        return info

    def _dropped(self) -> list[tuple[str, int]]:
        """Dropped groups by reason."""
        return self._db.all(
            "SELECT reason, count(*) FROM groups WHERE state = 'dropped' GROUP BY reason"
        )

    def _dropped_told(self) -> Counter[str]:
        """Those that batches have told of, by kind."""
        told = json.loads(self._meta("dropped_told") or "{}")
        if isinstance(told, int):  # of a version that counted all as one
            first = self._db.all(
                "SELECT reason, 1 FROM groups WHERE state = 'dropped' ORDER BY changed_wall_s, id"
                " LIMIT ?",
                told,
            )
            return drop_kinds.by_kind(first)
        return Counter(told)

    def import_batch(self, batch: SealedBatch, prompts: Mapping[int, Any]) -> SealedInfo:
        """Plan a batch that another journal has sealed for the next free step, byte for byte and
        with the numbers that it has. `prompts` are JSON by group id. Batches of one journal come
        in their order; JournalStateError when this one or a group of it does not follow."""
        with self._mutex:
            if batch.batch_id < self.next_batch_id():
                raise JournalStateError(f"batch {batch.batch_id} follows one of a higher number")
            payload = batch.to_bytes()
            info = self._planned(batch, payload)
            now = self._wall_s()
            rows = [(i, json.dumps(p), info.batch_id, now, now) for i, p in prompts.items()]
            with self._db.write() as db:
                _insert_batch(db, info, batch.meta, payload, now)
                for row in rows:
                    if db.execute("SELECT 1 FROM groups WHERE id = ?", row[:1]).fetchone():
                        raise JournalStateError(f"prompt group {row[0]} is in an earlier batch")
                    db.execute(
                        "INSERT INTO groups (id, prompt, state, batch_id, issued_wall_s,"
                        " changed_wall_s) VALUES (?, ?, 'sealed', ?, ?, ?)",
                        row,
                    )
            self._plan[info.step] = info.ref
        self._tell_sealed(info, list(prompts))
        return info

    def _planned(self, batch: SealedBatch, payload: bytes) -> SealedInfo:
        """As the batch of the next free step."""
        return SealedInfo(
            batch.batch_id, len(self._plan) + 1, digest(payload), batch.n_samples, batch.n_tokens
        )

    def _tell_sealed(self, info: SealedInfo, group_ids: Sequence[int]) -> None:
        self._events.emit(
            Kind.SEAL,
            step=info.step,
            batch=info.batch_id,
            digest=info.digest,
            samples=info.samples,
            tokens=info.tokens,
            groups=list(group_ids),
        )
        self._changed()

    def drop_batch(self, batch_id: int, reason: str) -> None:
        """Take a sealed batch that is not committed, and its groups, out for good. Batches
        planned after it move up one step. The next one tells of the drops that it told of."""
        with self._mutex:
            step = next((s for s, b in self._plan.items() if b.batch_id == batch_id), None)
            if step is None or step <= self.tip.step:
                raise JournalStateError(f"batch {batch_id} is not waiting to be trained")
            now = self._wall_s()
            meta = self.batch_info(batch_id)[0]
            told = {k: meta.get(drop_kinds.PREFIX + k, 0) for k in drop_kinds.KINDS}
            untold = json.dumps(self._dropped_told() - Counter(told))
            with self._db.write() as db:
                db.execute("INSERT OR REPLACE INTO meta VALUES ('dropped_told', ?)", (untold,))
                db.execute(
                    "UPDATE batches SET state = 'dropped', reason = ? WHERE id = ?",
                    (reason, batch_id),
                )
                groups = db.execute(
                    "UPDATE groups SET state = 'dropped', reason = ?, changed_wall_s = ?"
                    " WHERE batch_id = ? RETURNING id",
                    (reason, now, batch_id),
                ).fetchall()
                db.execute("DELETE FROM plan WHERE step = ?", (step,))
                # In two moves: a primary key may not collide halfway through an UPDATE.
                db.execute("UPDATE plan SET step = 1 - step WHERE step > ?", (step,))
                db.execute("UPDATE plan SET step = -step WHERE step < 0")
            steps = sorted(s for s in self._plan if s > step)
            for later in steps:
                self._plan[later - 1] = self._plan[later]
            del self._plan[max(self._plan)]
        self._events.emit(
            Kind.DROP, cause=reason, step=step, batch=batch_id, groups=[g for (g,) in groups]
        )
        self._changed()

    def batch_bytes(self, batch_id: int) -> bytes:
        """The sealed bytes, checked against their digest.

        Raises JournalStateError (no such batch, or freed), JournalCorrupt.
        """
        row = self._db.one("SELECT payload, digest FROM batches WHERE id = ?", batch_id)
        if row is None:
            raise JournalStateError(f"there is no batch {batch_id}")
        payload, expected = row
        if payload is None:
            raise JournalStateError(f"batch {batch_id} is freed: a durable checkpoint covers it")
        if digest(payload) != expected:
            raise JournalCorrupt(f"{self._db.where}: batch {batch_id} does not match its digest")
        return payload

    def batch(self, batch_id: int) -> SealedBatch:
        try:
            return SealedBatch.from_bytes(self.batch_bytes(batch_id))
        except BatchCorrupt as e:
            raise JournalCorrupt(f"{self._db.where}: batch {batch_id}: {e}") from e

    def prompts(self, batch_id: int) -> dict[int, Any]:
        """The prompts (JSON) of a sealed batch, by group id."""
        rows = self._db.all(
            "SELECT id, prompt FROM groups WHERE batch_id = ? ORDER BY id", batch_id
        )
        return {group_id: json.loads(prompt) for group_id, prompt in rows}

    def batch_info(self, batch_id: int) -> tuple[dict[str, Any], int, int]:
        """(meta, samples, tokens) of a batch, also after it was freed."""
        row = self._db.one("SELECT meta, samples, tokens FROM batches WHERE id = ?", batch_id)
        if row is None:
            raise JournalStateError(f"there is no batch {batch_id}")
        return json.loads(row[0]), row[1], row[2]

    # Accounts -------------------------------------------------------------------------------

    def audit(self) -> Audit:
        """Prove the accounts from the tables (see audit.py)."""
        return audit_rows(self._db.all)

    def counts(self) -> dict[str, Any]:
        """Prompt groups by state; `dropped` by reason."""
        by_state = dict(self._db.all("SELECT state, count(*) FROM groups GROUP BY state"))
        trained = self._number(
            "SELECT count(*) FROM groups JOIN commits USING (batch_id)"
            " WHERE groups.state = 'sealed' AND superseded_by IS NULL"
        )
        return {
            "issued": sum(by_state.values()),
            "pending": by_state.get("pending", 0),
            "accepted": by_state.get("accepted", 0),
            "sealed": by_state.get("sealed", 0) - trained,
            "trained": trained,
            "dropped": dict(self._dropped()),
        }


def _insert_group(db: sqlite3.Connection, group: NewGroup, now_wall_s: float) -> int:
    key = group.key
    if key is not None and db.execute("SELECT 1 FROM groups WHERE key = ?", (key,)).fetchone():
        raise JournalStateError(f"prompt {key!r} was issued before")
    group_id = db.execute(
        "INSERT INTO groups (key, prompt, state, issued_wall_s, changed_wall_s)"
        " VALUES (?, ?, 'pending', ?, ?)",
        (key, json.dumps(group.prompt), now_wall_s, now_wall_s),
    ).lastrowid
    assert group_id is not None
    return group_id


def _insert_batch(
    db: sqlite3.Connection,
    info: SealedInfo,
    meta: dict[str, Any],
    payload: bytes,
    now_wall_s: float,
) -> None:
    db.execute(
        "INSERT INTO batches (id, state, digest, payload, meta, samples, tokens, sealed_wall_s)"
        " VALUES (?, 'sealed', ?, ?, ?, ?, ?, ?)",
        (
            info.batch_id,
            info.digest,
            payload,
            json.dumps(meta),
            info.samples,
            info.tokens,
            now_wall_s,
        ),
    )
    db.execute("INSERT INTO plan VALUES (?, ?)", (info.step, info.batch_id))


def _save_cursor(db: sqlite3.Connection, cursor: Any) -> None:
    db.execute("INSERT OR REPLACE INTO source VALUES (1, ?)", (json.dumps(cursor),))


def _require(db: sqlite3.Connection, group_id: int, *states: str) -> None:
    row = db.execute("SELECT state FROM groups WHERE id = ?", (group_id,)).fetchone()
    if row is None or row[0] not in states:
        found = "unknown" if row is None else row[0]
        raise JournalStateError(f"group {group_id} is {found}, not {' or '.join(states)}")
