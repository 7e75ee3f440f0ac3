"""Flight recorder files, one per rank of a group, when training ends by an error.

torch's recorder keeps the last `comm.trace_buf_size` collectives, of gloo too, but only its NCCL
watchdog writes them out. Here the rank that fails writes them, and the others of its group when
they see its file: a rank that is only waited for knows of no error, and its part is the telling
one. Files are torch's own dumps (`torchfrtrace` reads them):

    RUN/<comm.save_traces_folder>/trainer-<g>/attempt_<n>/<comm.save_traces_file_prefix><rank>

A rank whose interpreter is stopped or held writes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
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
    comm: CommConfig, run: Path, replica_id: int
) -> contextlib.AbstractContextManager[None]:
    """Kept while this rank of a group trains, under [comm]; nothing without a buffer."""
    if comm.trace_buf_size <= 0:
        return contextlib.nullcontext()
    folder = run / comm.save_traces_folder / f"trainer-{replica_id}"
    folder /= f"attempt_{os.environ.get(ATTEMPT_ENV, '1')}"
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return FlightRecord(folder, comm.save_traces_file_prefix, rank, ranks).kept()


class FlightRecord:
    """This rank's file, and an eye on those of the other ranks."""

    def __init__(self, folder: Path, prefix: str, rank: int, world_size: int) -> None:
        self._paths = [folder / f"{prefix}{r}" for r in range(world_size)]
        self._rank = rank
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

    def write(self) -> None:
        """Once; the first call holds what was under way."""
        with self._writing:
            path = self._paths[self._rank]
            if self._is_new(path):
                return
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(path, dump())
            except OSError as e:  # the error that led here is the one to tell
                logger.warning("no flight record: %s", e)
                return
            logger.warning("flight record of this rank's collectives: %s", path)

    def _is_new(self, path: Path) -> bool:
        """Written in this life of the group; a by-hand start may find older files."""
        try:
            return path.stat().st_mtime >= self._since_wall_s
        except OSError:  # not there, or not to be read
            return False

    def _watch(self) -> None:
        others = [path for r, path in enumerate(self._paths) if r != self._rank]
        while others and not self._over.wait(LOOK_S):
            if any(self._is_new(path) for path in others):
                self.write()
                return

    def _wait_for_peers(self) -> None:
        end_s = time.monotonic() + PEERS_TIMEOUT_S
        while time.monotonic() < end_s and not all(self._is_new(path) for path in self._paths):
            time.sleep(LOOK_S / 5)
