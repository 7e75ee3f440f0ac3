"""One sender and several receiving processes, on one clock (CLOCK_MONOTONIC is the machine's)."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

LIMIT_S = 120.0


@dataclass(frozen=True)
class Sample:
    """Seconds from the start until the first receiver has all bytes, and until all have."""

    first_s: float
    all_s: float


def median(samples: list[Sample]) -> Sample:
    return Sample(
        statistics.median(s.first_s for s in samples), statistics.median(s.all_s for s in samples)
    )


class Way(Protocol):
    """How bytes get from the sender, in this process, to receivers, each a fork of it."""

    def receiver(self, index: int) -> Callable[[], None]:
        """In the receiver, once: make ready. What is returned gets all bytes, once a call."""
        ...

    def ready(self) -> None:
        """In the sender, when all receivers are ready."""
        ...

    def send(self) -> None:
        """In the sender, beside the receivers."""
        ...

    def close(self) -> None: ...


def measure(way: Way, receivers: int, repeats: int) -> list[Sample]:
    """The first one, which finds new memory, is left out."""
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for index in range(receivers):
        ours, theirs = context.Pipe()
        process = context.Process(target=_receive, args=(way, index, theirs), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    try:
        way.ready()
        for pipe in pipes:
            _answer(pipe)
        samples = []
        for _ in range(repeats + 1):
            began = time.monotonic()
            for pipe in pipes:
                pipe.send("go")
            way.send()
            done = [_answer(pipe) for pipe in pipes]
            samples.append(Sample(min(done) - began, max(done) - began))
        return samples[1:]
    finally:
        for process in processes:
            process.kill()
            process.join()
        way.close()


def _answer(pipe: Connection) -> Any:
    if not pipe.poll(LIMIT_S):
        raise SystemExit(f"a receiver did not answer within {LIMIT_S:g} s")
    return pipe.recv()


def _receive(way: Way, index: int, pipe: Connection) -> None:
    get = way.receiver(index)
    pipe.send(time.monotonic())
    while True:
        pipe.recv()
        get()
        pipe.send(time.monotonic())
