"""What all parts of the journal share: the database, events, and who listens for changes."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torchtitan_rl_ft.journal.database import Database
from torchtitan_rl_ft.observability.events import EventSink


class Tables:
    """Base of the journal's parts."""

    def __init__(self, db: Database, events: EventSink, wall_s: Callable[[], float]) -> None:
        self._db, self._events, self._wall_s = db, events, wall_s
        self._mutex = threading.RLock()
        self._listeners: list[Callable[[], None]] = []

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change, on the thread that made it."""
        self._listeners.append(listener)

    def _changed(self) -> None:
        for listener in self._listeners:
            listener()

    def _meta(self, key: str) -> str | None:
        row = self._db.one("SELECT value FROM meta WHERE key = ?", key)
        return None if row is None else row[0]

    def _number(self, sql: str) -> int:
        row = self._db.one(sql)
        assert row is not None
        return row[0]
