"""SIGTERM to a trainer rank: the ledger is asked to stop at a step boundary.

Only with `recovery.exit_signal_handler`; without it SIGTERM ends the rank at once, as ever.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable

from torchtitan_rl_ft.journal.exits import LEFT, REQUEUE
from torchtitan_rl_ft.rpc.client import RoleRefused, RoleUnreachable

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 5.0
ASK_AGAIN_S = 2.0
"""A ledger that was restarted has forgotten who wants to leave."""

STARTED_AGAIN = (REQUEUE, LEFT)
"""How a run may be over for a group that goes on when it is started again."""


_signalled = threading.Event()
"""This process was told to end, whichever trainer it holds by now."""


class SignalWatch:
    """Asks from a side thread, which is told by the C handler of the signal: Python's own waits
    for the main thread, which may sit in a collective."""

    def __init__(self, ask: Callable[[], str]) -> None:
        """`ask` tells the ledger; it raises RoleUnreachable, RoleRefused."""
        self._ask = ask
        self._closed = threading.Event()
        self._told, self._tell = os.pipe()
        os.set_blocking(self._tell, False)
        signal.set_wakeup_fd(self._tell, warn_on_full_buffer=False)
        # Remembered also while a trainer begins again, and nobody reads the pipe.
        signal.signal(signal.SIGTERM, lambda *_: _signalled.set())
        # What ends a rank at once now; a shell's background jobs are born with it ignored.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        self._thread = threading.Thread(target=self._run, name="exit-signal", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The trainer is done, or begins again with a watch of its own. From the main thread."""
        if not self._closed.is_set():
            self._closed.set()
            signal.set_wakeup_fd(-1)
            os.write(self._tell, b"\0")
            self._thread.join(ASK_TIMEOUT_S)
            os.close(self._tell)
            os.close(self._told)  # after the thread: it reads no more, whatever it still asks

    def _run(self) -> None:
        while not _signalled.is_set():
            if signal.SIGTERM in os.read(self._told, 64):
                _signalled.set()
                logger.warning("SIGTERM: asking to stop at the next step boundary")
            elif self._closed.is_set():
                return
        while not self._closed.is_set():
            try:
                self._ask()
            except (RoleUnreachable, RoleRefused) as e:
                logger.warning("the ledger does not hear that this rank is to end: %s", e)
            self._closed.wait(ASK_AGAIN_S)
