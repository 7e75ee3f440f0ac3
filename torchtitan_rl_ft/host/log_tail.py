"""The last lines of a role's log, for error messages."""

from __future__ import annotations

import re
from pathlib import Path

_CONTROL_SEQUENCE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|[@-Z\\^_])")
"""Of terminals (ECMA-48), by which loggers colour their lines."""

_TAIL_BYTES = 16 * 1024
_LINE_CHARS = 400


def last_lines(log: Path, n: int = 8) -> list[str]:
    """Up to `n` last non-empty lines of `log`; none when it cannot be read."""
    try:
        with open(log, "rb") as f:
            f.seek(0, 2)
            f.seek(max(0, f.tell() - _TAIL_BYTES))
            text = _CONTROL_SEQUENCE.sub("", f.read().decode(errors="replace"))
    except OSError:
        return []
    lines = [line.rstrip()[:_LINE_CHARS] for line in text.splitlines() if line.strip()]
    return lines[-n:]
