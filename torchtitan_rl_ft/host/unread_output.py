"""Standard output that nobody reads any more: `torchtitan check FILE | head`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator


@contextlib.contextmanager
def while_read() -> Generator[None]:
    """Print inside as long as somebody reads; what is printed afterwards goes nowhere."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
