"""A process that is watched as a rank is, and then hangs in the way that it is told to.

watched_rank.py PHASES_FOLDER waits|works|sleeps|holds
"""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path

from torchtitan_rl_ft.trainer import watch


def hold_the_interpreter() -> None:
    """A call of C that does not let go of the GIL."""
    ctypes.PyDLL(None).sleep(600)


def main() -> None:
    file = watch.begin(Path(sys.argv[1]))
    manner = sys.argv[2]
    file.enter("waiting_for_batch" if manner == "waits" else "reduce", 1)
    print("entered", flush=True)
    if manner == "works":
        while True:
            file.enter("reduce", 1)
            time.sleep(0.05)
    if manner == "holds":
        hold_the_interpreter()
    time.sleep(600)


if __name__ == "__main__":
    main()
