"""The journal's SQLite file: schema, durable transactions, error kinds."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.journal.errors import (
    JournalCorrupt,
    JournalError,
    JournalFenced,
    JournalWriteError,
)
from torchtitan_rl_ft.run_folder import fsync_dir

FILE_NAME = "journal.sqlite"
SCHEMA_VERSION = 2
BUSY_TIMEOUT_S = 30.0
"""How long a write waits for another program that has locked the file (a backup, a browser): longer
than such a lock takes, since failing ends the run, and within recovery.rank_silence_timeout_s."""

APPLICATION_ID = 0x54544A31  # "TTJ1", so that another program's database is not taken for ours

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

-- The data source's position, always written together with what it stands for.
CREATE TABLE source (id INTEGER PRIMARY KEY CHECK (id = 1), cursor TEXT NOT NULL);

CREATE TABLE batches (
    id INTEGER PRIMARY KEY,
    state TEXT NOT NULL CHECK (state IN ('sealed', 'dropped')),
    reason TEXT CHECK ((state = 'dropped') = (reason IS NOT NULL)),
    digest TEXT NOT NULL,
    payload BLOB,                     -- NULL once a durable checkpoint covers it
    meta TEXT NOT NULL,
    samples INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    sealed_wall_s REAL NOT NULL
);

CREATE TABLE groups (
    id INTEGER PRIMARY KEY,
    key TEXT UNIQUE,
    prompt TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('pending', 'accepted', 'sealed', 'dropped')),
    samples BLOB,                     -- safetensors, while accepted
    meta TEXT,
    min_version INTEGER,
    max_version INTEGER,
    batch_id INTEGER REFERENCES batches (id),
    reason TEXT,
    issued_wall_s REAL NOT NULL,
    changed_wall_s REAL NOT NULL,
    CHECK ((state = 'accepted') = (samples IS NOT NULL)),
    CHECK (state != 'sealed' OR batch_id IS NOT NULL),
    CHECK (state NOT IN ('pending', 'accepted') OR batch_id IS NULL),
    CHECK ((state = 'dropped') = (reason IS NOT NULL))
);
CREATE INDEX groups_state ON groups (state);
CREATE INDEX groups_batch ON groups (batch_id);

CREATE TABLE plan (step INTEGER PRIMARY KEY, batch_id INTEGER NOT NULL UNIQUE
    REFERENCES batches (id));

CREATE TABLE rewinds (
    id INTEGER PRIMARY KEY,
    from_step INTEGER NOT NULL,
    to_step INTEGER NOT NULL CHECK (to_step < from_step),
    reason TEXT NOT NULL,
    member TEXT NOT NULL,
    at_wall_s REAL NOT NULL
);

CREATE TABLE commits (
    id INTEGER PRIMARY KEY,
    step INTEGER NOT NULL CHECK (step > 0),
    batch_id INTEGER NOT NULL REFERENCES batches (id),
    digest TEXT NOT NULL,
    prev_token TEXT NOT NULL,
    token TEXT NOT NULL,
    participants INTEGER NOT NULL,
    quorum_id INTEGER NOT NULL,
    shares TEXT NOT NULL,             -- JSON: [group, samples, tokens] of each participant
    reporter TEXT NOT NULL,
    adopted INTEGER NOT NULL,         -- 1: the report was lost, the state's own tail told it
    metrics TEXT,                     -- the first report's, NULL while none has come
    committed_wall_s REAL NOT NULL,
    superseded_by INTEGER REFERENCES rewinds (id)
);
CREATE UNIQUE INDEX commits_live_step ON commits (step) WHERE superseded_by IS NULL;
CREATE UNIQUE INDEX commits_live_batch ON commits (batch_id) WHERE superseded_by IS NULL;

CREATE TABLE checkpoints (
    id INTEGER PRIMARY KEY, step INTEGER NOT NULL, token TEXT NOT NULL, path TEXT NOT NULL,
    saved_wall_s REAL NOT NULL, UNIQUE (step, token, path)
);

CREATE TABLE published (
    version INTEGER NOT NULL, step INTEGER NOT NULL, token TEXT NOT NULL,
    published_wall_s REAL NOT NULL, PRIMARY KEY (version, step, token)
) WITHOUT ROWID;

CREATE TABLE duties (
    kind TEXT NOT NULL, step INTEGER NOT NULL, token TEXT NOT NULL, era INTEGER NOT NULL,
    holder TEXT NOT NULL, done INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (kind, step, token, era)
) WITHOUT ROWID;

CREATE TABLE members (
    uuid TEXT PRIMARY KEY, replica_id INTEGER NOT NULL, pid INTEGER NOT NULL,
    start_time REAL NOT NULL, host TEXT NOT NULL
) WITHOUT ROWID;
"""

# Not in journals of before: added when they are opened, ignored by what does not know it.
PARTIALS = """
CREATE TABLE IF NOT EXISTS partials (
    id INTEGER PRIMARY KEY,
    group_id INTEGER NOT NULL REFERENCES groups (id),
    sample INTEGER NOT NULL,
    start INTEGER NOT NULL,           -- tokens of the sample before these, which stay
    output_ids BLOB NOT NULL,         -- int32
    logprobs BLOB NOT NULL,           -- float32
    versions BLOB NOT NULL,           -- int32
    finish_reason TEXT                -- of a sample that ends with these
)
"""
PARTIALS_INDEX = "CREATE INDEX IF NOT EXISTS partials_group ON partials (group_id)"

# SQLite result codes that mean "the disk", not "the file".
_WRITE_CODES = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_TOOBIG,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PERM,
}


class Database:
    """One connection. Safe to call from several threads; `write` blocks are serialised."""

    def __init__(self, path: Path | None, quick_check_limit_bytes: int = 1 << 28) -> None:
        """Open or create `path`; None keeps everything in memory.

        A file up to `quick_check_limit_bytes` has all its pages checked now; pages of a larger
        one are checked as they are read, and each payload against its digest.
        Raises JournalCorrupt, JournalWriteError.
        """
        self._path = path
        self._lock = threading.RLock()
        self._fence: str | None = None
        fresh = path is None or not path.exists() or path.stat().st_size == 0
        with self._errors("open"):
            self._db = sqlite3.connect(
                path or ":memory:",
                isolation_level=None,
                check_same_thread=False,
                timeout=BUSY_TIMEOUT_S,
            )
        try:
            with self._errors("open"):
                if fresh:
                    self._db.execute("PRAGMA page_size=16384")
                    self._db.execute("PRAGMA auto_vacuum=INCREMENTAL")
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=FULL")
                self._db.execute("PRAGMA foreign_keys=ON")
                self._db.execute(f"PRAGMA journal_size_limit={64 << 20}")
                self._create_schema()
                if not fresh and path is not None:
                    self._check_pages(path, quick_check_limit_bytes)
            if path is not None:
                fsync_dir(path.parent)  # SQLite does it for the WAL, not for a new database
                fsync_dir(path.parent.parent)
        except BaseException:
            self._db.close()
            raise

    @property
    def where(self) -> str:
        return str(self._path) if self._path else "the in-memory journal"

    def _create_schema(self) -> None:
        """Create the tables unless they are there: one transaction, so never half of them."""
        self._db.execute("BEGIN IMMEDIATE")
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        tables = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if version == 0 and tables == 0:
            for statement in SCHEMA.split(";"):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA application_id={APPLICATION_ID}")
            self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        else:
            check_format(self._db, self.where)
        self._db.execute(PARTIALS)
        self._db.execute(PARTIALS_INDEX)
        self._db.execute("COMMIT")

    def _check_pages(self, path: Path, limit_bytes: int) -> None:
        if path.stat().st_size > limit_bytes:
            return
        check_pages(self._db, self.where)

    def take_over(self) -> int:
        """Become the writer: later writes of any earlier owner are refused. Returns the
        owner's number, counted from 1."""
        with self.write() as db:
            row = db.execute("SELECT value FROM meta WHERE key = 'owner'").fetchone()
            owner = int(row[0]) + 1 if row else 1
            db.execute("INSERT OR REPLACE INTO meta VALUES ('owner', ?)", (str(owner),))
        self._fence = str(owner)
        return owner

    @contextlib.contextmanager
    def write(self) -> Generator[sqlite3.Connection]:
        """One durable transaction: on return it is on disk; on any exception nothing changed.

        Raises JournalFenced, JournalWriteError, JournalCorrupt.
        """
        with self._lock, self._errors("write"):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._check_fence()
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    with contextlib.suppress(sqlite3.Error):  # the first error is the one to tell
                        self._db.execute("ROLLBACK")
                raise

    def _check_fence(self) -> None:
        if self._fence is None:
            return
        row = self._db.execute("SELECT value FROM meta WHERE key = 'owner'").fetchone()
        if row is None or row[0] != self._fence:
            raise JournalFenced(f"{self.where} was taken over by a newer owner; this one stops")

    def all(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock, self._errors("read"):
            return self._db.execute(sql, values).fetchall()

    def one(self, sql: str, *values: Any) -> tuple[Any, ...] | None:
        with self._lock, self._errors("read"):
            return self._db.execute(sql, values).fetchone()

    def reclaim(self) -> None:
        """Give free pages back to the file system."""
        with self._lock, self._errors("write"):
            self._db.execute("PRAGMA incremental_vacuum").fetchall()

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextlib.contextmanager
    def _errors(self, doing: str) -> Generator[None]:
        try:
            yield
        except sqlite3.IntegrityError:
            raise  # the caller's mistake, not the file's
        except sqlite3.Error as e:
            raise sqlite_error(e, doing, self.where) from e


_MEND = "restore it from a copy, or move it away and start the run afresh"


def check_format(db: sqlite3.Connection, where: str) -> None:
    """Raises JournalCorrupt unless the database is a journal in this package's format."""
    application = db.execute("PRAGMA application_id").fetchone()[0]
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if application != APPLICATION_ID:
        raise JournalCorrupt(f"{where} is another program's database: move it away")
    if version != SCHEMA_VERSION:
        raise JournalCorrupt(
            f"{where} has journal format {version}, this package reads {SCHEMA_VERSION}: use the "
            "package version that wrote it"
        )


def check_pages(db: sqlite3.Connection, where: str) -> None:
    """Look at all pages. Raises JournalCorrupt."""
    found = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":
        raise JournalCorrupt(f"{where} is damaged ({found}): {_MEND}")


def sqlite_error(e: sqlite3.Error, doing: str, where: str) -> JournalError:
    """The journal's error for one of SQLite's."""
    code = getattr(e, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_BUSY:
        return JournalWriteError(
            f"cannot {doing} {where}: another program has had it locked for {BUSY_TIMEOUT_S:g} s. "
            "Nothing was changed; end that program, then start the job again"
        )
    if code in _WRITE_CODES or isinstance(e, sqlite3.DataError):
        return JournalWriteError(
            f"cannot {doing} {where}: {e}. Nothing was changed; free space or repair the disk, "
            "then start the job again"
        )
    if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        return JournalCorrupt(f"{where} is not a readable journal ({e}): {_MEND}")
    return JournalError(f"cannot {doing} {where}: {e}")
