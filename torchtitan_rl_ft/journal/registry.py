"""The journal's register of checkpoints, published policies, duties and members."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchtitan_rl_ft.journal.database import Database
from torchtitan_rl_ft.journal.protocol import CheckpointRef, State
from torchtitan_rl_ft.journal.records import Member
from torchtitan_rl_ft.journal.tables import Tables
from torchtitan_rl_ft.observability.events import EventSink, Kind


class Registry(Tables):
    """Rows about states of the history. Whether a state is on the living chain is not judged
    here."""

    def __init__(self, db: Database, events: EventSink, wall_s: Callable[[], float]) -> None:
        super().__init__(db, events, wall_s)
        self._checkpoints = self._load_checkpoints()

    # Checkpoints and published policies --------------------------------------------------

    def add_checkpoint(self, checkpoint: CheckpointRef, saved_by: int | None = None) -> None:
        """A checkpoint is durable at its path. `saved_by`: the replica id of its group."""
        with self._db.write() as db:
            added = db.execute(
                "INSERT OR IGNORE INTO checkpoints (step, token, path, saved_wall_s)"
                " VALUES (?, ?, ?, ?)",
                (checkpoint.step, checkpoint.token, checkpoint.path, self._wall_s()),
            ).rowcount
        if added:
            self._checkpoints = self._load_checkpoints()
            self._events.emit(
                Kind.CHECKPOINT,
                step=checkpoint.step,
                path=checkpoint.path,
                token=checkpoint.token,
                saved_by=saved_by,
            )
        self._changed()

    @property
    def checkpoints(self) -> Sequence[CheckpointRef]:
        """All that were ever durable, the newest first; whether one still is, its files say.
        Do not change it."""
        return self._checkpoints

    def _load_checkpoints(self) -> list[CheckpointRef]:
        rows = self._db.all("SELECT step, token, path FROM checkpoints ORDER BY step DESC, id DESC")
        return [CheckpointRef(*row) for row in rows]

    def add_published(self, version: int, state: State) -> None:
        """A policy version was announced; telling it again changes nothing."""
        with self._db.write() as db:
            added = db.execute(
                "INSERT OR IGNORE INTO published VALUES (?, ?, ?, ?)",
                (version, state.step, state.token, self._wall_s()),
            ).rowcount
        if added:
            self._events.emit(Kind.PUBLISH, step=state.step, version=version, token=state.token)
        self._changed()

    def published(self) -> tuple[int, State] | None:
        """The newest announced policy: (version, state)."""
        row = self._db.one("SELECT version, step, token FROM published ORDER BY version DESC")
        return None if row is None else (row[0], State(row[1], row[2]))

    def version_of(self, state: State) -> int | None:
        """The newest version that was published from `state`."""
        row = self._db.one(
            "SELECT max(version) FROM published WHERE step = ? AND token = ?",
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

    def reopen_duty(self, kind: str, state: State, era: int) -> None:
        """It has to be done again."""
        with self._db.write() as db:
            db.execute(
                "UPDATE duties SET done = 0 WHERE kind = ? AND step = ? AND token = ? AND era = ?",
                (kind, state.step, state.token, era),
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
