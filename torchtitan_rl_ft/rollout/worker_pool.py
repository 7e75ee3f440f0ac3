"""Worker processes that answer JSON lines, each question within a limit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any


class WorkerTimeout(Exception):
    """No answer in time; the worker was killed."""


class WorkerDied(Exception):
    """The worker ended instead of answering."""


class WorkerPool:
    """At most `size` processes of `command`, started when first needed.

    A worker says `{"ready": true}`, then answers each line on its stdin by one on its stdout, and
    ends when its stdin does. One that is late is killed and replaced: code that runs user data
    cannot be trusted to interrupt itself.
    """

    def __init__(
        self, command: Sequence[str], *, size: int, timeout_s: float, start_timeout_s: float = 60.0
    ) -> None:
        self._command = tuple(command)
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._free = asyncio.Semaphore(size)
        self._idle: list[asyncio.subprocess.Process] = []
        self._busy: set[asyncio.subprocess.Process] = set()

    async def ask(self, question: Mapping[str, Any]) -> Any:
        """Raises WorkerTimeout, WorkerDied, OSError."""
        async with self._free:
            worker = self._idle.pop() if self._idle else await self._started()
            self._busy.add(worker)
            try:
                answer = await self._exchange(worker, question, self._timeout_s)
            except BaseException:
                await _killed(worker)
                raise
            finally:
                self._busy.discard(worker)
            self._idle.append(worker)
            return answer

    async def close(self) -> None:
        """End all workers."""
        workers, self._idle = [*self._idle, *self._busy], []
        for worker in workers:
            await _killed(worker)

    async def _started(self) -> asyncio.subprocess.Process:
        worker = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            limit=1 << 20,
        )
        try:
            await self._exchange(worker, None, self._start_timeout_s)
        except BaseException:
            await _killed(worker)
            raise
        return worker

    async def _exchange(
        self, worker: asyncio.subprocess.Process, question: Any, timeout_s: float
    ) -> Any:
        """Send the question, if there is one, and take the next line."""
        assert worker.stdin is not None and worker.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                if question is not None:
                    worker.stdin.write(json.dumps(question).encode() + b"\n")
                    await worker.stdin.drain()
                line = await worker.stdout.readline()
        except TimeoutError as e:
            raise WorkerTimeout(f"no answer within {timeout_s:g} s") from e
        except ConnectionError as e:
            raise WorkerDied(f"the worker went away: {e}") from e
        if not line.endswith(b"\n"):
            raise WorkerDied(f"the worker ended (return code {worker.returncode})")
        return json.loads(line)


async def _killed(worker: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        worker.kill()
    await worker.wait()
