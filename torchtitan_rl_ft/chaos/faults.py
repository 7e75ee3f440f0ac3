"""What can be done to a living process from outside. Each victim is named by pid and start time."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterable, Iterator

from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.run_folder import ProcessId

DUTY_PERIOD_S = 0.2
"""One stop and one go of a slowed process."""

TREE_LOOK_S = 1.0
"""How often a slowed process is asked for new children: a look takes a good part of a period."""


def tree(root: ProcessId) -> list[ProcessId]:
    """A process and all below it."""
    return [root, *process.descendants(root)] if root.alive() else []


def kill(victim: ProcessId, *, whole_tree: bool = True) -> list[ProcessId]:
    """SIGKILL, as a crash: of a process and all below it, or of it alone. Returns whom it hit."""
    victims = tree(victim) if whole_tree else [victim]
    return [p for p in victims if process.kill(p)]


def stop(victim: ProcessId, *, whole_tree: bool = True) -> list[ProcessId]:
    """SIGSTOP: it keeps its sockets and answers nothing. Returns whom it hit, for `resume`."""
    if whole_tree:
        return sorted(process.freeze([victim]), key=lambda p: p.pid)
    return [victim] if process.kill(victim, signal.SIGSTOP) else []


def resume(stopped: Iterable[ProcessId]) -> None:
    """SIGCONT, the newest first: a parent finds its children awake."""
    for victim in sorted(stopped, key=lambda p: -p.pid):
        process.kill(victim, signal.SIGCONT)


@contextlib.contextmanager
def stopped(victim: ProcessId, *, whole_tree: bool = True) -> Iterator[list[ProcessId]]:
    """Stopped inside the block."""
    held = stop(victim, whole_tree=whole_tree)
    try:
        yield held
    finally:
        resume(held)


def slow(
    victim: ProcessId,
    share: float,
    duration_s: float,
    *,
    whole_tree: bool = True,
    period_s: float = DUTY_PERIOD_S,
    ended: threading.Event | None = None,
) -> None:
    """Keep it stopped for `share` (0 to 1) of each period, until the time is over, `ended` is set
    or it is gone. Blocks; it runs freely afterwards."""
    over = ended or threading.Event()
    end = time.monotonic() + duration_s
    members, listed_mono_s = [victim], float("-inf")
    while victim.alive() and not over.is_set() and (left_s := end - time.monotonic()) > 0:
        if whole_tree and time.monotonic() - listed_mono_s > TREE_LOOK_S:
            members, listed_mono_s = tree(victim), time.monotonic()
        try:
            for member in members:
                process.kill(member, signal.SIGSTOP)
            over.wait(min(share * period_s, left_s))
        finally:
            resume(members)
        over.wait(min((1 - share) * period_s, max(0.0, end - time.monotonic())))


@contextlib.contextmanager
def slowed(victim: ProcessId, share: float, *, whole_tree: bool = True) -> Iterator[None]:
    """Slow inside the block."""
    ended = threading.Event()
    thread = threading.Thread(
        target=slow,
        args=(victim, share, float("inf")),
        kwargs={"whole_tree": whole_tree, "ended": ended},
        daemon=True,
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
