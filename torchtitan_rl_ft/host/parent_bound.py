"""Becomes another program that the kernel kills when its parent dies.

    python -I -S parent_bound.py PARENT_PID PROGRAM [ARGUMENT...]

Run by path and without site-packages, so that it costs some 15 ms. A wrapper, not a
`preexec_fn`: Python code between fork and exec may deadlock in a process with threads. The
setting survives exec. It is tied to the parent's *thread* that forked, so only a thread that
lives as long as its process (the main one) may start bound children.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    parent, command = int(argv[0]), argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the line above
        os._exit(128 + signal.SIGKILL)
    try:
        os.execvp(command[0], command)
    except OSError as e:
        sys.exit(f"cannot run {command[0]}: {e.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
