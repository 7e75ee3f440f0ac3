"""What a rank does to be watched: it tells its phase, shows its stacks, and ends itself when
nobody outside does.

The watcher (roles/watcher.py) is the one that ends a wedged rank. Where there is none, or it is
late, the guard in here acts: a thread of Python for a rank that hangs in a call that has let go
of the GIL, and a thread of C (`faulthandler.dump_traceback_later`) for one that has not. Neither
helps a stopped process; that needs the watcher.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.host.phase_file import PhaseFile
from torchtitan_rl_ft.host.phase_limits import Limits, waiting_limits
from torchtitan_rl_ft.host.regroup import GENERATION_ENV
from torchtitan_rl_ft.run_folder import REPLICA_ENV, RUN_ENV, STANDBY_ENV, RunFolder

if TYPE_CHECKING:
    from torchtitan_rl_ft.config.recovery import RecoverySection

BEAT_S = 1.0

_STDERR_FD = 2

STACKS_SIGNAL = signal.SIGUSR1
"""Writes the stacks of all threads to the rank's log, whatever the interpreter is doing."""

GUARD_FACTOR = 1.5
GUARD_MARGIN_S = 15.0
"""How much later than the watcher a rank ends itself."""

_mine: PhaseFile | None = None
_guard: Guard | None = None


def begin(folder: Path) -> PhaseFile:
    """Be watched from now on. Once in a process; later calls return the same file. Raises
    OSError."""
    global _mine, _guard
    if _mine is None:
        # Before the file is there: whoever reads it may send the signal, whose default is death.
        faulthandler.register(STACKS_SIGNAL, file=_STDERR_FD, all_threads=True)
        standby = os.environ.get(STANDBY_ENV, "").partition(":")[0]
        name = standby or f"trainer-{os.environ.get(REPLICA_ENV, '0')}"
        # A rank that is started again alone begins with the generation of its group.
        generation = int(os.environ.get(GENERATION_ENV, "0"))
        _mine = PhaseFile(folder, name, os.environ.get("RANK", "0"), generation)
        _guard = Guard(_mine)
        _guard.start()
    return _mine


def begin_early() -> None:
    """Where the environment names the run: be watched while libraries are imported too."""
    if run := os.environ.get(RUN_ENV):
        begin(RunFolder(run).phases)


class GroupTimes(Protocol):
    """Of [fault_tolerance]."""

    quorum_timeout_s: int
    manager_timeout_s: int


def limits_of(recovery: RecoverySection, group: GroupTimes) -> Limits:
    """What holds for every rank, without what was configured or learned for single phases."""
    return Limits(
        default_s=recovery.phase_timeout_s,
        silence_s=recovery.rank_silence_timeout_s,
        waiting_s=waiting_limits(
            batch_wait_timeout_s=recovery.batch_wait_timeout_s,
            quorum_timeout_s=group.quorum_timeout_s,
            manager_timeout_s=group.manager_timeout_s,
        ),
    )


def arm(limits: Limits) -> None:
    """Let the guard act from now on."""
    assert _guard is not None
    _guard.limits = limits


class Guard(threading.Thread):
    """Beats, and ends the process when it is far over a limit."""

    def __init__(self, file: PhaseFile) -> None:
        super().__init__(name="phase-beats", daemon=True)
        self._file = file
        self.limits: Limits | None = None

    def run(self) -> None:
        pause = threading.Event()
        while True:
            self._file.beat()
            if (limits := self.limits) is not None:
                self._look(limits)
            pause.wait(BEAT_S)

    def _look(self, limits: Limits) -> None:
        # Not called again in time, by whatever holds the GIL: all stacks, and exit code 1.
        silence_s = limits.silence_s * GUARD_FACTOR + GUARD_MARGIN_S
        faulthandler.dump_traceback_later(silence_s, exit=True, file=_STDERR_FD)
        key, seconds = self._file.now()
        limit_s, _ = limits.of(key)
        if seconds > limit_s * GUARD_FACTOR + GUARD_MARGIN_S:
            print(
                f"torchtitan: error: {seconds:.0f} s in phase {key} without coming forward (limit "
                f"{limit_s:g} s), and nobody has ended this rank: it ends itself",
                file=sys.stderr,
                flush=True,
            )
            faulthandler.dump_traceback(file=_STDERR_FD, all_threads=True)
            os._exit(ExitCode.FAILED)
