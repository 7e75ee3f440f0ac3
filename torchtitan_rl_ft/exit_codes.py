"""Exit codes of `torchtitan` and of every role: what a scheduler's restart policy looks at."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    DONE = 0
    """The run, or this role's part of it, is complete."""

    FAILED = 1
    """A fault that a restart may mend."""

    CONFIG = 2
    """The input is wrong; a restart meets the same error."""

    NUMERIC = 3
    """Stopped to keep bad numbers out of the model; a restart meets them again."""

    WRONG_RESULT = 4
    """A group whose results another group finds wrong, again and again: not to be restarted on the
    same hardware."""

    REQUEUE = 75
    """Saved at a signal or time limit, more to do: start again (EX_TEMPFAIL of sysexits.h)."""

    INTERRUPTED = 130
    """Ctrl-C or SIGTERM, nothing left running."""
