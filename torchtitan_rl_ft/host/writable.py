"""Output whose reader has stopped to read: whoever writes on would stand still with it."""

from __future__ import annotations

import select
from typing import IO, Any

MOST_CHARS = 1000
"""That can be written at once: 4096 bytes (PIPE_BUF) at least, in any language."""


def writable(file: IO[Any]) -> bool:
    """Whether `MOST_CHARS` can be written without a wait. Not to a terminal that is held with
    Ctrl-S, nor to the full pipe of a reader that is stopped. What is no file of the system never
    waits; one that is closed at the other end says so when it is written to."""
    try:
        fd = file.fileno()
    except (OSError, ValueError):
        return True
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(0))
