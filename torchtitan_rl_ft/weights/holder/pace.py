"""How a thread waits for a library that goes on only when it is called."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

BUSY_S = 20e-6
"""Processor time of a call that has moved bytes; others take a quarter of it."""

PATIENCE_S = 0.001
"""How long after such a call the next one follows at once."""

_libc = ctypes.CDLL(None)


def give_way() -> None:
    """Let others have the processor, and other threads the interpreter, which os.sched_yield would
    keep."""
    _libc.sched_yield()


class Pace:
    """Of one thread. Over TCP the thread that calls is the one that copies, between the kernel's
    buffers and memory; a nap that does no harm elsewhere leaves them full, or empty. Whether it
    copied shows in its processor time: then the next call follows at once.

        pace.begin()
        if not agent.is_done(handle):
            pace.wait()
    """

    def __init__(
        self,
        nap_s: float,
        sleep: Callable[[float], None] = time.sleep,
        give_way: Callable[[], None] = give_way,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.nap_s = nap_s
        self._sleep, self._give_way = sleep, give_way
        self._clock, self._cpu_clock = clock, cpu_clock
        self._cpu_s = 0.0
        self._moved_s = -PATIENCE_S

    def begin(self) -> None:
        """Before a call."""
        self._cpu_s = self._cpu_clock()

    def wait(self) -> None:
        """After it, when it has not brought the end."""
        now_s = self._clock()
        if self._cpu_clock() - self._cpu_s > BUSY_S:
            self._moved_s = now_s
        if now_s - self._moved_s < PATIENCE_S:
            self._give_way()
        else:
            self._sleep(self.nap_s)
