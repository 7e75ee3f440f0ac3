"""What can go wrong with a journal. Each message says what, where and how to mend it."""

from __future__ import annotations


class JournalError(Exception):
    """Base of all journal errors."""


class JournalBusy(JournalError):
    """Another living process owns this run folder's journal."""


class JournalFenced(JournalError):
    """Another process took the journal over; this one must stop writing."""


class JournalCorrupt(JournalError):
    """The file is not a journal, or its pages or a payload are damaged."""


class JournalWriteError(JournalError):
    """The journal could not be written (full disk, read-only, I/O error); nothing changed."""


class JournalStateError(JournalError):
    """The request does not fit the state of the group, batch or commit it names."""
