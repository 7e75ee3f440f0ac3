"""Sums over the replica groups that fail in one process, as a broken link or a collective library
in trouble lets them fail: that process gets an error and takes no part, the others wait for it.

A trainer is started with `site/` in its PYTHONPATH, which wraps torchft's process groups while they
are imported: the trainer knows nothing of it. An order is a file named by a process id, of the rank
or of the launcher of its group; it is looked for before each sum.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.run_folder import RUN_ENV, RunFolder

SITE = Path(__file__).parent / "site"
ONCE, ALL = "once", "all"


class AllReduceFailed(RuntimeError):
    """Injected."""


def put_before(environment: MutableMapping[str, str]) -> None:
    """Start Python processes with the wrapper."""
    paths = [str(SITE), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))


def is_wrapped(pid: int) -> bool:
    """Whether process `pid` was started so."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    paths = next((w[len(b"PYTHONPATH=") :] for w in words if w.startswith(b"PYTHONPATH=")), b"")
    return str(SITE).encode() in paths.split(os.pathsep.encode())


# In a trainer -----------------------------------------------------------------------------------


def wrap(process_group: Any) -> None:
    """`process_group`: torchft's module. All its groups on torch's own backends (gloo, NCCL, XCCL)
    sum through one class."""
    run = os.environ.get(RUN_ENV)
    if not run:
        return
    folder = _orders(RunFolder(run))
    all_reduce = process_group.ProcessGroupWrapper.allreduce

    def allreduce(group: Any, *args: Any, **kwargs: Any) -> Any:
        for pid in (os.getpid(), os.getppid()):
            if _obeys(folder / str(pid)):
                raise AllReduceFailed("the all-reduce has failed (injected)")
        return all_reduce(group, *args, **kwargs)

    process_group.ProcessGroupWrapper.allreduce = allreduce


def _obeys(order: Path) -> bool:
    try:
        if order.read_text() == ALL:
            return True
        order.rename(order.with_name(f"{order.name}.{os.getpid()}"))  # one rank alone
    except OSError:  # no order, or another rank was faster
        return False
    return True


# Outside ----------------------------------------------------------------------------------------


def order(folder: RunFolder, pid: int, what: str) -> None:
    """Let the next sum of process `pid` (or of one of its children) fail, or `ALL`. Raises
    OSError."""
    path = _orders(folder) / str(pid)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{pid}")
    new.write_text(what)
    new.rename(path)


def obeyed_by(folder: RunFolder, pid: int) -> int | None:
    """The process whose sum has failed by the order (`ONCE`) for `pid`; None: none has yet."""
    found = [int(p.suffix[1:]) for p in _orders(folder).glob(f"{pid}.*")]
    return found[0] if found else None


def withdraw(folder: RunFolder, pid: int) -> None:
    """The order is over."""
    (_orders(folder) / str(pid)).unlink(missing_ok=True)
    for done in _orders(folder).glob(f"{pid}.*"):
        with contextlib.suppress(FileNotFoundError):
            done.unlink()


def _orders(folder: RunFolder) -> Path:
    return folder.path / "chaos" / "failing_reduce"
