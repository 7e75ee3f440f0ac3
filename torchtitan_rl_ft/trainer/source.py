"""The source beside a trainer rank: a process that holds the rank's shards and hands them on
(weights/holder). It is started for the first offer, and for the next one after it has died; what
becomes of it never touches the rank."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.config.weights import WeightsSection
from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.rpc.client import RoleClient, RoleUnreachable
from torchtitan_rl_ft.run_folder import ATTEMPT_ENV, ProcessId, RunFolder
from torchtitan_rl_ft.session_folder import Owner
from torchtitan_rl_ft.weights.holder import launch
from torchtitan_rl_ft.weights.holder.leftovers import remove_run
from torchtitan_rl_ft.weights.holder.settings import HolderSettings, Key

logger = logging.getLogger(__name__)

START_DEADLINE_S = 30.0
"""Of a source's first answer."""

RESERVE_DEADLINE_S = 5.0
"""The rank stands still meanwhile."""

START_PAUSE_S = 5.0
LONGEST_START_PAUSE_S = 60.0


def sources_run_id(run: RunFolder) -> str:
    """Of the sources of a run, on this machine."""
    return f"sources-{hashlib.sha256(str(run.path).encode()).hexdigest()[:16]}"


def remove_memory(run: RunFolder, weights: WeightsSection) -> None:
    """What sources of a run that has ended have left: those that were killed."""
    remove_run(weights.memory_folder, sources_run_id(run))


class Source:
    """`ensure` is for the main thread: the kernel ends the process with the thread that started it.
    `post` may come from another one."""

    def __init__(
        self,
        run: RunFolder,
        weights: WeightsSection,
        replica_id: int,
        rank: int,
        token: str,
        start: launch.Start = launch.start,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        owner = Owner.from_environment()
        self.name = f"trainer-{replica_id}.{rank}"
        self.settings = HolderSettings(
            self.name,
            "source",
            sources_run_id(run),
            weights,
            owner.id if owner is not None else ProcessId.current(),
            run_folder=str(run.path),
        )
        self._token, self._start, self._clock = token, start, clock
        attempt = int(os.environ.get(ATTEMPT_ENV, "1"))
        self._log = run.log_file(f"{self.name}-source", attempt)
        self._child: process.Child | None = None
        self._rpc = RoleClient(f"the source {self.name}", self._url, token, retry_delay_s=0.05)
        self.starts = 0
        """Processes so far."""
        self._answered = False
        self._in_vain = 0

    def ensure(self) -> None:
        """Start it unless it runs. After starts in vain not at once: it will hardly come up now.
        Raises OSError, RoleUnreachable."""
        if self._child is not None:
            if (code := self._child.returncode) is None:
                return
            in_vain = 0 if self._answered else self._in_vain + 1
            pause_s = min(in_vain * START_PAUSE_S, LONGEST_START_PAUSE_S)
            if self._clock() < self._child.started_mono_s + pause_s:
                raise RoleUnreachable(
                    f"the source {self.name} does not come up ({process.describe(code)}); log: "
                    f"{self._log}"
                )
            self._in_vain = in_vain
            logger.warning(
                "source %s: %s, another one is started; log: %s",
                self.name,
                process.describe(code),
                self._log,
            )
        env = launch.environment(os.environ)
        self._child = self._start(self.settings, token=self._token, log=self._log, env=env)
        self.starts += 1
        self._answered = False

    @property
    def runs(self) -> bool:
        return self._child is not None and self._child.returncode is None

    def end(self) -> None:
        """The next `ensure` starts another one."""
        if self._child is not None:
            self._child.end()

    def reserve(self, key: Key, header: bytes) -> Path:
        """A file for the image of a version that begins with `header`. Starts the source if need
        be; one that does not answer is ended, for the next call. Raises RoleRefused (no memory),
        RoleUnreachable, OSError."""
        self.ensure()
        body = {**key._asdict(), "header": base64.b64encode(header).decode()}
        limit_s = RESERVE_DEADLINE_S if self._answered else START_DEADLINE_S
        try:
            answer = self.post("/v1/reserve", body, deadline_s=limit_s)
        except RoleUnreachable:
            self.end()
            raise
        self._answered = True
        return Path(answer["file"])

    def post(self, path: str, body: dict[str, Any], *, deadline_s: float) -> Any:
        """Raises RoleRefused, RoleUnreachable; at once when it has ended."""
        return self._rpc.post(path, body, deadline_s=deadline_s)

    def _url(self) -> str | None:
        child = self._child
        if child is None or (code := child.returncode) is not None:
            how = "was not started" if child is None else process.describe(code)
            raise RoleUnreachable(f"the source {self.name} {how}; log: {self._log}")
        found = launch.address(self.settings)
        # The file may still name the process before this one.
        return found.url if found is not None and found.pid == child.pid else None

    def close(self) -> None:
        """End it, and free its memory."""
        self.end()
        self._child = None
        self._rpc.close()
        shutil.rmtree(self.settings.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # there are other sources
            self.settings.run_memory.rmdir()
