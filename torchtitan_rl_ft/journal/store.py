"""The journal: prompt groups, sealed batches and the commit history of a run, in SQLite.

Each prompt group is at all times in exactly one state: pending, accepted, sealed (not trained),
trained (sealed, and its batch is committed on the living chain) or dropped with a reason.
Everything is plain data: JSON and safetensors; nothing is ever unpickled.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from safetensors.numpy import load, save

from torchtitan_rl_ft.journal.database import FILE_NAME, Database
from torchtitan_rl_ft.journal.errors import JournalCorrupt, JournalStateError, JournalWriteError
from torchtitan_rl_ft.journal.owner import OwnerLock
from torchtitan_rl_ft.journal.protocol import BatchRef, CheckpointRef, State
from torchtitan_rl_ft.journal.records import (
    GENESIS,
    BatchCorrupt,
    CommitRecord,
    Member,
    SealedBatch,
    digest,
)
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


@dataclass(frozen=True)
class Commit:
    """A row of the commit history."""

    commit_id: int
    record: CommitRecord
    reporter: str
    adopted: bool
    metrics: dict[str, Any] | None
    superseded: bool


class Journal:
    """Use `Journal.open`. One writer; every method that changes something is one durable
    transaction and then emits its events, so an event never tells of what is not on disk.

    Methods raise JournalWriteError (full disk; nothing changed), JournalFenced, JournalCorrupt
    and, where the caller's request does not fit, JournalStateError.
    """

    def __init__(
        self,
        db: Database,
        lock: OwnerLock | None,
        events: EventSink,
        wall_s: Callable[[], float],
    ) -> None:
        self._db, self._owner_lock, self._events, self._wall_s = db, lock, events, wall_s
        self._mutex = threading.RLock()
        self._listeners: list[Callable[[], None]] = []
        self.owner = db.take_over()
        self._load()

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

        `durable=False` (`rollout.journal=false`) keeps it in memory, with the same interface.
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
            return cls(db, lock, events, wall_s)
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

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change, on the thread that made it."""
        self._listeners.append(listener)

    def _changed(self) -> None:
        for listener in self._listeners:
            listener()

    def _load(self) -> None:
        """The living chain and the plan are kept in memory as well: decisions need them often."""
        self._tokens = [GENESIS]
        for step, token in self._db.all(
            "SELECT step, token FROM commits WHERE superseded_by IS NULL ORDER BY step"
        ):
            if step != len(self._tokens):
                raise JournalCorrupt(
                    f"{self._db.where}: the history lacks step {len(self._tokens)}"
                )
            self._tokens.append(token)
        self._plan = {
            step: BatchRef(batch_id, digest_)
            for step, batch_id, digest_ in self._db.all(
                "SELECT step, batch_id, digest FROM plan JOIN batches ON batches.id = batch_id"
            )
        }
        self._freed_through = int(self._meta("freed_through") or 0)

    def _meta(self, key: str) -> str | None:
        row = self._db.one("SELECT value FROM meta WHERE key = ?", key)
        return None if row is None else row[0]

    # Prompt groups --------------------------------------------------------------------------

    def issue(self, groups: Sequence[NewGroup], cursor: Any) -> list[int]:
        """Record prompts as pending together with the source's position after them (JSON).
        Returns their ids, in order."""
        now = self._wall_s()
        rows = [(g.key, json.dumps(g.prompt), now, now) for g in groups]
        ids = []
        with self._db.write() as db:
            for row in rows:
                if (
                    row[0] is not None
                    and db.execute("SELECT 1 FROM groups WHERE key = ?", (row[0],)).fetchone()
                ):
                    raise JournalStateError(f"prompt {row[0]!r} was issued before")
                ids.append(
                    db.execute(
                        "INSERT INTO groups (key, prompt, state, issued_wall_s, changed_wall_s)"
                        " VALUES (?, ?, 'pending', ?, ?)",
                        row,
                    ).lastrowid
                )
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
        self._events.emit(Kind.DROP, cause=reason, group=group_id)
        self._changed()

    # Batches --------------------------------------------------------------------------------

    def next_batch_id(self) -> int:
        row = self._db.one("SELECT coalesce(max(id), 0) + 1 FROM batches")
        assert row is not None
        return row[0]

    def seal(
        self, batch: SealedBatch, group_ids: Sequence[int], *, cursor: Any | None = None
    ) -> SealedInfo:
        """Make `batch` final and plan it for the next free step, in one transaction with its
        groups. The journal assigns `batch_id`; `meta["dropped_groups"]` is filled in when
        absent: groups dropped since the batch before."""
        with self._mutex:
            if set(np.unique(batch.arrays["group_ids"]).tolist()) != set(group_ids):
                raise JournalStateError("the batch's samples are not those of the named groups")
            dropped = self._count_dropped()
            batch = dataclasses.replace(
                batch,
                batch_id=self.next_batch_id(),
                meta={"dropped_groups": dropped - int(self._meta("dropped_told") or 0)}
                | batch.meta,
            )
            payload = batch.to_bytes()
            info = SealedInfo(
                batch.batch_id,
                len(self._plan) + 1,
                digest(payload),
                batch.n_samples,
                batch.n_tokens,
            )
            now = self._wall_s()
            with self._db.write() as db:
                for group_id in group_ids:
                    _require(db, group_id, "accepted")
                db.execute(
                    "INSERT INTO batches (id, state, digest, payload, meta, samples, tokens,"
                    " sealed_wall_s) VALUES (?, 'sealed', ?, ?, ?, ?, ?, ?)",
                    (
                        info.batch_id,
                        info.digest,
                        payload,
                        json.dumps(batch.meta),
                        info.samples,
                        info.tokens,
                        now,
                    ),
                )
                db.executemany(
                    "UPDATE groups SET state = 'sealed', batch_id = ?, samples = NULL,"
                    " changed_wall_s = ? WHERE id = ?",
                    [(info.batch_id, now, g) for g in group_ids],
                )
                db.execute("INSERT INTO plan VALUES (?, ?)", (info.step, info.batch_id))
                db.execute("INSERT OR REPLACE INTO meta VALUES ('dropped_told', ?)", (dropped,))
                if cursor is not None:
                    _save_cursor(db, cursor)
            self._plan[info.step] = info.ref
        self._events.emit(
            Kind.SEAL,
            step=info.step,
            batch=info.batch_id,
            digest=info.digest,
            samples=info.samples,
            tokens=info.tokens,
        )
        self._changed()
        return info

    def _count_dropped(self) -> int:
        row = self._db.one("SELECT count(*) FROM groups WHERE state = 'dropped'")
        assert row is not None
        return row[0]

    def drop_batch(self, batch_id: int, reason: str) -> None:
        """Take a sealed batch that is not committed, and its groups, out for good. Batches
        planned after it move up one step."""
        with self._mutex:
            step = next((s for s, b in self._plan.items() if b.batch_id == batch_id), None)
            if step is None or step <= self.tip.step:
                raise JournalStateError(f"batch {batch_id} is not waiting to be trained")
            now = self._wall_s()
            with self._db.write() as db:
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

    def batch_info(self, batch_id: int) -> tuple[dict[str, Any], int, int]:
        """(meta, samples, tokens) of a batch, also after it was freed."""
        row = self._db.one("SELECT meta, samples, tokens FROM batches WHERE id = ?", batch_id)
        if row is None:
            raise JournalStateError(f"there is no batch {batch_id}")
        return json.loads(row[0]), row[1], row[2]

    # History --------------------------------------------------------------------------------

    @property
    def tokens(self) -> Sequence[str]:
        """tokens[k]: the token after k commits of the living chain. Do not change it."""
        return self._tokens

    @property
    def plan(self) -> Mapping[int, BatchRef]:
        """step -> sealed batch, trained steps included. Do not change it."""
        return self._plan

    @property
    def tip(self) -> State:
        return State(len(self._tokens) - 1, self._tokens[-1])

    def head(self) -> BatchRef | None:
        """The sealed batch to train next."""
        return self._plan.get(len(self._tokens))

    @property
    def sealed_ahead(self) -> int:
        """Sealed batches that wait to be trained."""
        return len(self._plan) - self.tip.step

    @property
    def freed_through(self) -> int:
        """Batches of steps up to this one are freed."""
        return self._freed_through

    def commit(
        self,
        record: CommitRecord,
        *,
        reporter: str,
        metrics: Mapping[str, Any] | None,
        adopted: bool = False,
    ) -> int:
        """Append a commit that continues the tip; returns its id. Whether it may is decided by
        `protocol`; here only the chain itself is guarded."""
        with self._mutex:
            ref = BatchRef(record.batch_id, record.digest)
            follows = State(record.step - 1, record.prev_token) == self.tip
            if not follows or self._plan.get(record.step) != ref:
                raise JournalStateError(f"commit of step {record.step} does not continue the tip")
            with self._db.write() as db:
                commit_id = db.execute(
                    "INSERT INTO commits (step, batch_id, digest, prev_token, token,"
                    " participants, quorum_id, reporter, adopted, metrics, committed_wall_s)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        *dataclasses.astuple(record),
                        reporter,
                        int(adopted),
                        None if metrics is None else json.dumps(dict(metrics)),
                        self._wall_s(),
                    ),
                ).lastrowid
            assert commit_id is not None
            self._tokens.append(record.token)
        self._events.emit(
            Kind.COMMIT,
            cause="a lost report, told by the state itself" if adopted else None,
            step=record.step,
            batch=record.batch_id,
            token=record.token,
            participants=record.participants,
            quorum_id=record.quorum_id,
            reporter=reporter,
        )
        self._changed()
        return commit_id

    def confirm(
        self, record: CommitRecord, *, reporter: str, metrics: Mapping[str, Any] | None
    ) -> None:
        """Another group told of a commit; its metrics are kept when the commit has none."""
        row = self._db.one(
            "SELECT id, metrics FROM commits WHERE superseded_by IS NULL AND step = ?", record.step
        )
        if row is None:
            raise JournalStateError(f"step {record.step} is not committed")
        if row[1] is None and metrics is not None:
            with self._db.write() as db:
                db.execute(
                    "UPDATE commits SET metrics = ? WHERE id = ?",
                    (json.dumps(dict(metrics)), row[0]),
                )
        self._events.emit(Kind.CONFIRM, step=record.step, token=record.token, reporter=reporter)
        self._changed()

    def rewind(self, to_step: int, *, reason: str, member: str) -> None:
        """Supersede the commits after `to_step`. Their rows and the plan stay."""
        with self._mutex:
            from_step = self.tip.step
            if not self._freed_through <= to_step < from_step:
                raise JournalStateError(f"cannot rewind from step {from_step} to {to_step}")
            with self._db.write() as db:
                rewind_id = db.execute(
                    "INSERT INTO rewinds (from_step, to_step, reason, member, at_wall_s)"
                    " VALUES (?, ?, ?, ?, ?)",
                    (from_step, to_step, reason, member, self._wall_s()),
                ).lastrowid
                db.execute(
                    "UPDATE commits SET superseded_by = ? WHERE superseded_by IS NULL AND step > ?",
                    (rewind_id, to_step),
                )
            del self._tokens[to_step + 1 :]
        self._events.emit(
            Kind.SUPERSEDE, cause=reason, step=to_step, from_step=from_step, to_step=to_step
        )
        self._changed()

    @property
    def known_history(self) -> bool:
        return self._db.one("SELECT 1 FROM commits LIMIT 1") is not None

    @property
    def era(self) -> int:
        """How often the history was rewound."""
        row = self._db.one("SELECT count(*) FROM rewinds")
        assert row is not None
        return row[0]

    def last_commit_id(self) -> int:
        row = self._db.one("SELECT coalesce(max(id), 0) FROM commits")
        assert row is not None
        return row[0]

    def commits_after(self, commit_id: int) -> list[Commit]:
        """All commits with a later id, superseded ones too, in the order they came."""
        rows = self._db.all(
            "SELECT id, step, batch_id, digest, prev_token, token, participants, quorum_id,"
            " reporter, adopted, metrics, superseded_by FROM commits WHERE id > ? ORDER BY id",
            commit_id,
        )
        return [
            Commit(
                row[0],
                CommitRecord(*row[1:8]),
                row[8],
                bool(row[9]),
                None if row[10] is None else json.loads(row[10]),
                row[11] is not None,
            )
            for row in rows
        ]

    # Checkpoints and published policies -----------------------------------------------------

    def add_checkpoint(self, checkpoint: CheckpointRef) -> None:
        """A checkpoint is durable at its path."""
        with self._db.write() as db:
            added = db.execute(
                "INSERT OR IGNORE INTO checkpoints (step, token, path, saved_wall_s)"
                " VALUES (?, ?, ?, ?)",
                (checkpoint.step, checkpoint.token, checkpoint.path, self._wall_s()),
            ).rowcount
        if added:
            self._events.emit(
                Kind.CHECKPOINT,
                step=checkpoint.step,
                path=checkpoint.path,
                token=checkpoint.token,
            )
        self._changed()

    def checkpoints(self) -> list[CheckpointRef]:
        """All that were ever durable, the newest first; whether one still is, its files say."""
        rows = self._db.all("SELECT step, token, path FROM checkpoints ORDER BY step DESC, id DESC")
        return [CheckpointRef(*row) for row in rows]

    def free_through(self, step: int) -> int:
        """Free the batches of steps up to `step`, which a durable checkpoint covers; their rows
        stay. Returns how many were freed. The boundary and the bytes go in one transaction."""
        with self._mutex:
            step = min(step, self.tip.step)
            if step <= self._freed_through:
                return 0
            last = self._plan[step].batch_id
            with self._db.write() as db:
                freed = db.execute(
                    "UPDATE batches SET payload = NULL WHERE id <= ? AND payload IS NOT NULL",
                    (last,),
                ).rowcount
                db.execute("INSERT OR REPLACE INTO meta VALUES ('freed_through', ?)", (str(step),))
            self._freed_through = step
            self._db.reclaim()
        return freed

    def add_published(self, version: int, state: State) -> None:
        with self._db.write() as db:
            db.execute(
                "INSERT INTO published (version, step, token, era, published_wall_s)"
                " VALUES (?, ?, ?, (SELECT count(*) FROM rewinds), ?)",
                (version, state.step, state.token, self._wall_s()),
            )
        self._events.emit(Kind.PUBLISH, step=state.step, version=version, token=state.token)
        self._changed()

    def published(self) -> tuple[int, State] | None:
        """The last announced policy: (version, state)."""
        row = self._db.one("SELECT version, step, token FROM published ORDER BY id DESC LIMIT 1")
        return None if row is None else (row[0], State(row[1], row[2]))

    def version_of(self, state: State) -> int | None:
        """The newest version that was published from `state`."""
        row = self._db.one(
            "SELECT version FROM published WHERE step = ? AND token = ? ORDER BY id DESC LIMIT 1",
            state.step,
            state.token,
        )
        return None if row is None else row[0]

    # Duties and members ---------------------------------------------------------------------

    def grant_duty(self, kind: str, state: State, era: int, holder: str) -> None:
        with self._db.write() as db:
            db.execute(
                "INSERT INTO duties VALUES (?, ?, ?, ?, ?, 0) ON CONFLICT DO UPDATE"
                " SET holder = excluded.holder WHERE done = 0",
                (kind, state.step, state.token, era, holder),
            )
        self._changed()

    def finish_duty(self, kind: str, state: State, era: int, holder: str) -> None:
        with self._db.write() as db:
            db.execute(
                "INSERT OR REPLACE INTO duties VALUES (?, ?, ?, ?, ?, 1)",
                (kind, state.step, state.token, era, holder),
            )
        self._changed()

    def duty(self, kind: str, state: State, era: int) -> tuple[str, bool] | None:
        """(holder, done), or None when it was never granted."""
        row = self._db.one(
            "SELECT holder, done FROM duties WHERE kind = ? AND step = ? AND token = ? AND era = ?",
            kind,
            state.step,
            state.token,
            era,
        )
        return None if row is None else (row[0], bool(row[1]))

    def add_member(self, member: Member) -> None:
        with self._db.write() as db:
            db.execute(
                "INSERT OR REPLACE INTO members VALUES (?, ?, ?, ?, ?)",
                (member.uuid, member.replica_id, member.pid, member.start_time, member.host),
            )

    def forget_members(self, uuids: Sequence[str]) -> None:
        with self._db.write() as db:
            db.executemany("DELETE FROM members WHERE uuid = ?", [(u,) for u in uuids])

    def members(self) -> list[Member]:
        rows = self._db.all("SELECT replica_id, uuid, pid, start_time, host FROM members")
        return [Member(*row) for row in rows]

    # Accounts -------------------------------------------------------------------------------

    def counts(self) -> dict[str, Any]:
        """Prompt groups by state; `dropped` by reason."""
        by_state = dict(self._db.all("SELECT state, count(*) FROM groups GROUP BY state"))
        trained = self._db.one(
            "SELECT count(*) FROM groups JOIN commits USING (batch_id)"
            " WHERE groups.state = 'sealed' AND superseded_by IS NULL"
        )
        assert trained is not None
        reasons = self._db.all(
            "SELECT reason, count(*) FROM groups WHERE state = 'dropped' GROUP BY reason"
        )
        return {
            "issued": sum(by_state.values()),
            "pending": by_state.get("pending", 0),
            "accepted": by_state.get("accepted", 0),
            "sealed": by_state.get("sealed", 0) - trained[0],
            "trained": trained[0],
            "dropped": dict(reasons),
        }


def _save_cursor(db: Any, cursor: Any) -> None:
    db.execute("INSERT OR REPLACE INTO source VALUES (1, ?)", (json.dumps(cursor),))


def _require(db: Any, group_id: int, *states: str) -> None:
    row = db.execute("SELECT state FROM groups WHERE id = ?", (group_id,)).fetchone()
    if row is None or row[0] not in states:
        found = "unknown" if row is None else row[0]
        raise JournalStateError(f"group {group_id} is {found}, not {' or '.join(states)}")
