"""The journal's commit history: a chain of commits, its plan, and what was superseded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan_rl_ft.journal.database import Database
from torchtitan_rl_ft.journal.errors import JournalCorrupt, JournalStateError
from torchtitan_rl_ft.journal.protocol import BatchRef, State
from torchtitan_rl_ft.journal.records import GENESIS, CommitRecord, Share
from torchtitan_rl_ft.journal.registry import Registry
from torchtitan_rl_ft.observability.events import EventSink, Kind

_UNKNOWN = ""
"""The token, or the digest, of a step before the one that the history began after."""


@dataclass(frozen=True)
class Commit:
    """A row of the commit history."""

    commit_id: int
    record: CommitRecord
    reporter: str
    adopted: bool
    metrics: dict[str, Any] | None
    superseded: bool


class History(Registry):
    """Commits are appended and superseded, never erased. Whether a commit or a rewind is right
    is decided by `protocol`; here only the chain itself is guarded."""

    def __init__(self, db: Database, events: EventSink, wall_s: Callable[[], float]) -> None:
        super().__init__(db, events, wall_s)
        self._base_batch_id = 0  # the last batch of which nothing else is known
        self._load()

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
                " ORDER BY step"
            )
        }
        self._freed_through = int(self._meta("freed_through") or 0)

    def begin_after(self, state: State, batch: BatchRef | None) -> None:
        """Go on from `state`, whose last batch was `batch`, if known: what came before is final.
        Possible until something is sealed. Raises JournalStateError."""
        with self._mutex:
            if not self.unwritten:
                raise JournalStateError(f"the history goes on from step {self.tip.step}")
            with self._db.write() as db:
                db.execute("DELETE FROM checkpoints")
            self._checkpoints = self._load_checkpoints()
            nothing = BatchRef(0, _UNKNOWN)
            last = nothing if batch is None else batch
            self._base_batch_id = last.batch_id
            self._tokens = [GENESIS, *[_UNKNOWN] * state.step]
            self._tokens[state.step] = state.token
            self._plan = {step: nothing for step in range(1, state.step)}
            if not state.fresh:
                self._plan[state.step] = last
            self._freed_through = state.step
        self._changed()

    @property
    def unwritten(self) -> bool:
        """Nothing was sealed, and so nothing was committed."""
        return self._db.one("SELECT 1 FROM batches LIMIT 1") is None

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
        """A durable checkpoint covers the steps up to this one: they are final."""
        return self._freed_through

    def commit(
        self,
        record: CommitRecord,
        *,
        reporter: str,
        metrics: Mapping[str, Any] | None,
        adopted: bool = False,
    ) -> int:
        """Append a commit that continues the tip; returns its id."""
        with self._mutex:
            ref = BatchRef(record.batch_id, record.digest)
            follows = State(record.step - 1, record.prev_token) == self.tip
            if not follows or self._plan.get(record.step) != ref:
                raise JournalStateError(f"commit of step {record.step} does not continue the tip")
            with self._db.write() as db:
                commit_id = db.execute(
                    "INSERT INTO commits (step, batch_id, digest, prev_token, token,"
                    " participants, quorum_id, shares, reporter, adopted, metrics,"
                    " committed_wall_s) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        record.step,
                        record.batch_id,
                        record.digest,
                        record.prev_token,
                        record.token,
                        record.participants,
                        record.quorum_id,
                        json.dumps(record.shares),
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
            shares=record.shares,
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
        return self.tip.step > 0 or self._db.one("SELECT 1 FROM commits LIMIT 1") is not None

    @property
    def era(self) -> int:
        """How often the history was rewound."""
        return self._number("SELECT count(*) FROM rewinds")

    def last_commit_id(self) -> int:
        return self._number("SELECT coalesce(max(id), 0) FROM commits")

    def commits_after(self, commit_id: int) -> list[Commit]:
        """All commits with a later id, superseded ones too, in the order they came."""
        rows = self._db.all(
            "SELECT id, step, batch_id, digest, prev_token, token, participants, quorum_id,"
            " shares, reporter, adopted, metrics, superseded_by FROM commits WHERE id > ?"
            " ORDER BY id",
            commit_id,
        )
        return [
            Commit(
                row[0],
                CommitRecord(*row[1:8], shares=read_shares(row[8])),
                row[9],
                bool(row[10]),
                None if row[11] is None else json.loads(row[11]),
                row[12] is not None,
            )
            for row in rows
        ]

    def free_through(self, step: int) -> int:
        """Free the batches of steps up to `step`, which a durable checkpoint covers; their rows
        stay. Returns how many were freed. The boundary and the bytes go in one transaction.

        The history up to `step` is then final. The tip's own batch keeps its bytes until the next
        call: `next` names it when all holders of the tip are dead.
        """
        with self._mutex:
            step = min(step, self.tip.step)
            if step <= self._freed_through:
                return 0
            covered = min(step, self.tip.step - 1)
            last = self._plan[covered].batch_id if covered else 0
            with self._db.write() as db:
                freed = db.execute(
                    "UPDATE batches SET payload = NULL WHERE id <= ? AND payload IS NOT NULL",
                    (last,),
                ).rowcount
                db.execute("INSERT OR REPLACE INTO meta VALUES ('freed_through', ?)", (str(step),))
            self._freed_through = step
            self._db.reclaim()
        return freed


def read_shares(text: str) -> tuple[Share, ...]:
    """From a row of the commit history."""
    return tuple(Share(*share) for share in json.loads(text))
