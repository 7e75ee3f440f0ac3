"""Waits for one byte on its standard input, then becomes another program with the same pid.

    python -I -S held_start.py PROGRAM [ARGUMENT...]

The byte means that the starter has written down that it started this process. When the starter
dies before, the pipe ends without a byte and nothing runs that nobody knows of.
"""

import os
import sys


def main(command: list[str]) -> None:
    if not os.read(0, 1):
        sys.exit("the starter has died")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    try:
        os.execvp(command[0], command)
    except OSError as e:
        sys.exit(f"cannot run {command[0]}: {e.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
