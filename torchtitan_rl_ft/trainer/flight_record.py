"""Flight recorder files, one per rank of a group and quorum, when collectives fail.

torch's recorder keeps the last `comm.trace_buf_size` collectives, of gloo too, but only its NCCL
watchdog writes them out. Here the rank that fails writes them, and the others of its group when
they see its file: a rank that is only waited for knows of no error, and its part is the telling
one. A group that outlives another writes what was under way when that one was lost, and trains on.
Files are torch's own dumps (`torchfrtrace` reads them), in a folder for each quorum, by the
lighthouse's number of it:

    RUN/<comm.save_traces_folder>/trainer-<g>/attempt_<n>/quorum_<id>/
        <comm.save_traces_file_prefix><rank>

A rank whose interpreter is stopped or held writes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_rl_ft.run_folder import ATTEMPT_ENV, write_atomic

if TYPE_CHECKING:
    from torchtitan.config import CommConfig

logger = logging.getLogger(__name__)

LOOK_S = 0.5
PEERS_TIMEOUT_S = 4 * LOOK_S
"""How long a failed rank stays for the others' files: its end is theirs."""


def dump() -> bytes:
    """torch's record of this process's collectives, pickled."""
    from torch._C import _distributed_c10d

    return _distributed_c10d._dump_fr_trace()  # pyrefly: ignore[missing-attribute]


def of_group(
    comm: CommConfig, run: Path, replica_id: int, quorum_id: Callable[[], int]
) -> FlightRecord | None:
    """Of this rank of a group, under [comm]; None without a buffer."""
    if comm.trace_buf_size <= 0:
        return None
    folder = run / comm.save_traces_folder / f"trainer-{replica_id}"
    folder /= f"attempt_{os.environ.get(ATTEMPT_ENV, '1')}"
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return FlightRecord(folder, comm.save_traces_file_prefix, rank, ranks, quorum_id)


class FlightRecord:
    """This rank's file, and an eye on those of the other ranks."""

    def __init__(
        self,
        folder: Path,
        prefix: str,
        rank: int,
        world_size: int,
        quorum_id: Callable[[], int] = lambda: 0,
    ) -> None:
        self._folder, self._prefix, self._quorum_id = folder, prefix, quorum_id
        self._rank, self._ranks = rank, range(world_size)
        self._since_wall_s = time.time()
        self._over = threading.Event()
        self._writing = threading.Lock()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Write it when the block raises, or another rank has written its own meanwhile."""
        threading.Thread(target=self._watch, name="flight-record", daemon=True).start()
        try:
            yield
        except Exception:
            self.write()
            self._wait_for_peers()
            raise
        finally:
            self._over.set()

    def attempt_failed(self) -> None:
        """A collective failed and training goes on: written from a side thread."""
        quorum = self._quorum()
        threading.Thread(target=self.write, args=(quorum,), daemon=True).start()

    def write(self, quorum: Path | None = None) -> None:
        """Once for each quorum; the first call holds what was under way."""
        with self._writing:
            path = self._path(quorum or self._quorum(), self._rank)
            if self._is_new(path):
                return
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(path, dump())
            except OSError as e:  # the error that led here is the one to tell
                logger.warning("no flight record: %s", e)
                return
            logger.warning("flight record of this rank's collectives: %s", path)

    def _quorum(self) -> Path:
        return self._folder / f"quorum_{self._quorum_id()}"

    def _path(self, quorum: Path, rank: int) -> Path:
        return quorum / f"{self._prefix}{rank}"

    def _is_new(self, path: Path) -> bool:
        """Written in this life of the group; a by-hand start may find older files."""
        try:
            return path.stat().st_mtime >= self._since_wall_s
        except OSError:  # not there, or not to be read
            return False

    def _watch(self) -> None:
        others = [r for r in self._ranks if r != self._rank]
        done: set[Path] = set()  # each costs no look any more
        while others and not self._over.wait(LOOK_S):
            for quorum in set(self._folder.glob("quorum_*")) - done:
                if any(self._is_new(self._path(quorum, r)) for r in others):
                    self.write(quorum)
                    done.add(quorum)

    def _wait_for_peers(self) -> None:
        end_s = time.monotonic() + PEERS_TIMEOUT_S
        paths = [self._path(self._quorum(), r) for r in self._ranks]
        while time.monotonic() < end_s and not all(self._is_new(path) for path in paths):
            time.sleep(LOOK_S / 5)
