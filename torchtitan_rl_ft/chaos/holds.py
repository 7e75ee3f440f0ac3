"""Faults that last: each is a context manager that holds its victim, and what undoes it when the
one who held it has been killed."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.chaos import disk, engine_wrapper, failing_reduce, faults
from torchtitan_rl_ft.chaos.memory import from_json, to_json
from torchtitan_rl_ft.chaos.plan import Fault, FaultKind
from torchtitan_rl_ft.chaos.proxy import ProxyThread
from torchtitan_rl_ft.chaos.targets import Victim
from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.run_folder import RoleAddress, RunFolder

Look = Callable[[], bool]
"""Called now and then while a fault is held: True when it is over before its time."""

Note = Callable[..., None]
"""Writes down what is held, before it is."""


class NotPossible(Exception):
    """This victim cannot suffer this fault; the message says why."""


def _lasts() -> bool:
    return False


class Holds:
    """Makes what holds a victim. `disks`: the folder that `fill disk of NAME` is about, the run
    folder where it is not given."""

    def __init__(self, folder: RunFolder, disks: Callable[[str], Path] | None = None) -> None:
        self._folder, self._disks = folder, disks or (lambda name: folder.path)
        self.writable = threading.Event()
        """Clear while the disk of the run folder is full: nothing can be written down."""
        self.writable.set()

    def make(self, fault: Fault, victim: Victim, note: Note) -> AbstractContextManager[Look]:
        """Raises NotPossible."""
        match fault.kind:
            case FaultKind.STOP:
                return self._stopped(victim, note)
            case FaultKind.SLOW:
                return self._slowed(victim, fault.share, note)
            case FaultKind.FAIL:
                return self._failing(fault, victim, note)
            case FaultKind.FILL:
                return self._filled(victim, note)
            case FaultKind.BLACKHOLE:
                return self._black_hole(victim, note)
        raise ValueError(f"{fault.kind} does not last")

    def undo(self, held: Mapping[str, Any]) -> None:
        """Let go of what another process has held and noted."""
        faults.resume(from_json(held.get("stopped", [])))
        for victim in from_json(held.get("dark", [])):
            if victim.alive() and engine_wrapper.is_wrapper(victim.pid):
                process.kill(victim, engine_wrapper.LIFT)
        if "aside" in held:
            self._turn_back(held["name"], held["aside"], held["url"])
        if "failing" in held:
            failing_reduce.withdraw(self._folder, held["failing"])
        if "ballast" in held:
            disk.free(Path(held["ballast"]))

    @contextlib.contextmanager
    def _stopped(self, victim: Victim, note: Note) -> Iterator[Look]:
        note(stopped=to_json(faults.tree(victim.id)))  # and if this process is killed right after
        with faults.stopped(victim.id, whole_tree=victim.whole_tree) as stopped:
            note(stopped=to_json(stopped))  # with what it has started meanwhile
            yield _lasts

    @contextlib.contextmanager
    def _slowed(self, victim: Victim, share: float, note: Note) -> Iterator[Look]:
        note(stopped=to_json(faults.tree(victim.id)))
        with faults.slowed(victim.id, share, whole_tree=victim.whole_tree):
            yield lambda: not victim.id.alive()

    # The network ------------------------------------------------------------------------

    def _black_hole(self, victim: Victim, note: Note) -> AbstractContextManager[Look]:
        if victim.name.startswith("engine-"):
            if not engine_wrapper.is_wrapper(victim.id.pid):
                pid = victim.id.pid
                raise NotPossible(
                    f"{victim.name} (pid {pid}) was not started behind a proxy: that takes a "
                    "black hole of an engine in the job's own [chaos]"
                )
            return self._engine_black_hole(victim, note)
        address = self._folder.role(victim.name)
        if address is None:
            raise NotPossible(f"{victim.name} has no address")
        return self._role_black_hole(address, note)

    @contextlib.contextmanager
    def _engine_black_hole(self, victim: Victim, note: Note) -> Iterator[Look]:
        note(dark=to_json([victim.id]))
        process.kill(victim.id, engine_wrapper.BLACKHOLE)
        try:
            yield _lasts
        finally:
            process.kill(victim.id, engine_wrapper.LIFT)

    @contextlib.contextmanager
    def _role_black_hole(self, address: RoleAddress, note: Note) -> Iterator[Look]:
        """Whoever looks the role up finds a proxy in its place; what is connected stays so."""
        with ProxyThread(address.url) as proxy:
            proxy.blackhole()
            aside = dataclasses.replace(address, url=proxy.url)
            note(aside=proxy.url, url=address.url)
            self._folder.announce(aside)
            try:
                yield _lasts
            finally:
                proxy.lift()
                self._turn_back(address.name, proxy.url, address.url)

    def _turn_back(self, name: str, aside: str, url: str) -> None:
        now = self._folder.role(name)
        if now is not None and now.url == aside:  # else it was restarted and has said so
            self._folder.announce(dataclasses.replace(now, url=url))

    # Sums over the groups ---------------------------------------------------------------

    def _failing(self, fault: Fault, victim: Victim, note: Note) -> AbstractContextManager[Look]:
        pid = victim.id.pid
        if not failing_reduce.is_wrapped(pid):
            raise NotPossible(
                f"{victim.name} (pid {pid}) was not started with process groups that can fail: "
                "that takes a fault of this kind in the job's own [chaos]"
            )
        return self._orders(fault, victim, note)

    @contextlib.contextmanager
    def _orders(self, fault: Fault, victim: Victim, note: Note) -> Iterator[Look]:
        """One sum, or all of a time. Over too when the process is gone."""
        once, pid = fault.duration_s is None, victim.id.pid
        failing_reduce.withdraw(self._folder, pid)  # of an earlier process of that number
        note(failing=pid)
        failing_reduce.order(self._folder, pid, failing_reduce.ONCE if once else failing_reduce.ALL)
        try:
            yield (
                lambda: (
                    not victim.id.alive()
                    or (once and failing_reduce.obeyed_by(self._folder, pid) is not None)
                )
            )
        finally:
            failing_reduce.withdraw(self._folder, pid)

    # The disk ---------------------------------------------------------------------------

    def _filled(self, victim: Victim, note: Note) -> AbstractContextManager[Look]:
        where = self._disks(victim.name)
        if (problem := disk.too_large(where)) is not None:
            raise NotPossible(problem)
        return self._full(disk.existing(where), note)

    @contextlib.contextmanager
    def _full(self, folder: Path, note: Note) -> Iterator[Look]:
        note(ballast=str(folder / disk.NAME))
        ballast = disk.Ballast(folder)

        def look() -> bool:
            ballast.fill()  # also what others have freed
            return False

        if folder.stat().st_dev == self._folder.path.stat().st_dev:
            self.writable.clear()
        try:
            ballast.fill()
            yield look
        finally:
            ballast.remove()
            self.writable.set()
