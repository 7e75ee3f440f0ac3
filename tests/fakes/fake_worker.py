"""The process of a fake engine that computes tokens, apart from its server as in SGLang."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
import uuid
from typing import Any

WORKER = """
import hashlib, json, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    end = time.monotonic() + asked["compute_s"]
    while time.monotonic() < end:
        pass
    text = json.dumps(asked["key"])
    word = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    print(json.dumps({"id": asked["id"], "word": word}), flush=True)
"""
BOUND = """
import ctypes, os, signal
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
"""


class Worker:
    """The process that computes tokens."""

    def __init__(self, outlives_parent: bool) -> None:
        self._process = subprocess.Popen(
            ["sglang::scheduler", "-c", ("" if outlives_parent else BOUND) + WORKER],
            executable=sys.executable,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=outlives_parent,
        )
        self._waiting: dict[str, asyncio.Future[int]] = {}
        self.published_s = time.time()  # as the scheduler's load figures: after each pass

    async def open(self) -> None:
        assert self._process.stdout is not None
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._process.stdout
        )
        self._reading = asyncio.create_task(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            answer = json.loads(line)
            future = self._waiting.pop(answer["id"], None)
            if future is not None and not future.done():  # else its caller has gone
                future.set_result(answer["word"])

    async def word(self, *key: Any, compute_s: float = 0.0) -> int:
        """A number that depends on `key`; never, when the worker is dead or stopped."""
        assert self._process.stdin is not None
        task = uuid.uuid4().hex
        self._waiting[task] = asyncio.get_running_loop().create_future()
        with contextlib.suppress(BrokenPipeError):
            asked = {"id": task, "key": key, "compute_s": compute_s}
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            self._process.stdin.flush()
        word = await self._waiting[task]
        self.published_s = time.time()
        return word

    def send(self, signum: signal.Signals) -> None:
        self._process.send_signal(signum)
