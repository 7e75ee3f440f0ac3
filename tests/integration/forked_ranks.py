"""Trainer ranks as forks of one process that has imported everything (fakes/trainer_forks.py): up
in about a second, so that a test can kill many of them."""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO

SCRIPT = Path(__file__).parents[1] / "fakes" / "trainer_forks.py"
ANSWER_TIMEOUT_S = 120.0


class ForkedRank:
    """What a test needs of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = threading.Event()

    def ended(self, code: int) -> None:
        self.returncode = code
        self._ended.set()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(str(SCRIPT), timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, signum)


@functools.cache
def forks() -> RankForks:
    """One for all tests: started by the first that needs it, ended with them."""
    errors = tempfile.TemporaryFile()  # noqa: SIM115  as long as the process
    found = RankForks(errors)
    atexit.register(found.close)
    return found


class RankForks:
    """The process that the ranks are forks of."""

    def __init__(self, errors: IO[bytes]) -> None:
        self._ranks: dict[int, ForkedRank] = {}
        self._started: list[ForkedRank] = []
        self._answered = threading.Condition()
        self._errors = errors
        env = {k: v for k, v in os.environ.items() if not k.startswith("TORCHTITAN_RL_FT_")}
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            env=env | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(self, env: dict[str, str], log: Path, cwd: Path) -> ForkedRank:
        """One caller at a time."""
        assert self._process.stdin is not None
        order = {"env": env, "log": str(log), "cwd": str(cwd)}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        end = time.monotonic() + ANSWER_TIMEOUT_S
        with self._answered:
            while not self._started:
                assert self._answered.wait(end - time.monotonic()), self._told()
            return self._started.pop()

    def living(self) -> list[int]:
        return [pid for pid, rank in self._ranks.items() if rank.poll() is None]

    def _told(self) -> str:
        self._errors.seek(0)
        return "no rank was forked\n" + self._errors.read().decode(errors="replace")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            with self._answered:
                if "pid" in told:
                    rank = self._ranks[told["pid"]] = ForkedRank(told["pid"])
                    self._started.append(rank)
                    self._answered.notify()
                else:
                    self._ranks[told["exit"]].ended(told["code"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._reader.join(timeout=30)
