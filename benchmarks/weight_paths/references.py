"""What weights over holders are compared with: bytes are moved and nothing is checked."""

from __future__ import annotations

import hashlib
import mmap
import os
import socket
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torchft.checkpointing.http_transport import HTTPTransport

from benchmarks.weight_paths.crew import LIMIT_S, Sample

TIMEOUT = timedelta(seconds=LIMIT_S)


def memcpy(nbytes: int, repeats: int) -> list[Sample]:
    """One thread, memory that is there, inside one process."""
    source, target = (np.ones(nbytes, np.uint8) for _ in range(2))
    samples = []
    for _ in range(repeats):
        began = time.monotonic()
        np.copyto(target, source)
        took = time.monotonic() - began
        samples.append(Sample(took, took))
    return samples


def sha256(nbytes: int, repeats: int) -> list[Sample]:
    """One thread. The first relay makes it of every tensor, for the manifest."""
    data = np.ones(nbytes, np.uint8)
    samples = []
    for _ in range(repeats):
        began = time.monotonic()
        hashlib.sha256(data).digest()
        took = time.monotonic() - began
        samples.append(Sample(took, took))
    return samples


class Socket:
    """A TCP connection to each receiver, all served at once."""

    def __init__(self, nbytes: int, receivers: int) -> None:
        self._nbytes, self._receivers = nbytes, receivers
        self._data = np.ones(nbytes, np.uint8)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=receivers)
        self._to: list[socket.socket] = []

    def receiver(self, index: int) -> Callable[[], None]:
        to = socket.create_connection(self._listener.getsockname())
        view = memoryview(mmap.mmap(-1, self._nbytes))

        def get() -> None:
            got = 0
            while got < self._nbytes:
                got += to.recv_into(view[got:])

        return get

    def ready(self) -> None:
        self._to = [self._listener.accept()[0] for _ in range(self._receivers)]

    def send(self) -> None:
        data = memoryview(self._data)
        threads = [threading.Thread(target=to.sendall, args=(data,)) for to in self._to]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def close(self) -> None:
        for to in (*self._to, self._listener):
            to.close()


class Gloo:
    """torch.distributed.broadcast: all receivers are in one group, which any of them can stop."""

    def __init__(self, nbytes: int, receivers: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._ranks = receivers + 1
        self._data = torch.ones(nbytes, dtype=torch.uint8)

    def _join(self, rank: int) -> None:
        store = dist.FileStore(f"{self._folder.name}/store", self._ranks)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=self._ranks, timeout=TIMEOUT
        )

    def receiver(self, index: int) -> Callable[[], None]:
        self._join(index + 1)
        target = torch.empty_like(self._data)
        return lambda: dist.broadcast(target, src=0)

    def ready(self) -> None:
        self._join(0)

    def send(self) -> None:
        dist.broadcast(self._data, src=0)

    def close(self) -> None:
        dist.destroy_process_group()
        self._folder.cleanup()


class Disk:
    """A file, durable, then read by each receiver (from the page cache: nothing is faster)."""

    def __init__(self, nbytes: int, folder: Path) -> None:
        self._data, self._path = np.ones(nbytes, np.uint8), folder / "weights"
        self._written = folder / "written"

    def receiver(self, index: int) -> Callable[[], None]:
        view, seen = memoryview(mmap.mmap(-1, len(self._data))), [0]

        def get() -> None:
            while not self._written.exists() or self._written.stat().st_mtime_ns == seen[0]:
                time.sleep(0.001)
            seen[0] = self._written.stat().st_mtime_ns
            with open(self._path, "rb", buffering=0) as f:
                got = 0
                while got < len(view):
                    got += f.readinto(view[got:])

        return get

    def ready(self) -> None:
        pass

    def send(self) -> None:
        with open(self._path, "wb") as f:
            f.write(memoryview(self._data))
            f.flush()
            os.fsync(f.fileno())
        self._written.touch()

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        self._written.unlink(missing_ok=True)


class TorchftHttp:
    """torchft's transport of checkpoints; each receiver makes new tensors, as it does there."""

    def __init__(self, nbytes: int) -> None:
        self._state = {"weights": torch.ones(nbytes // 4)}
        self._transport = HTTPTransport(TIMEOUT, num_chunks=0)
        self._transport._server.RequestHandlerClass.log_message = lambda *_: None
        port = self._transport.address().rsplit(":", 1)[1]
        self._address = f"http://127.0.0.1:{port}"

    def receiver(self, index: int) -> Callable[[], None]:
        warnings.filterwarnings("ignore", message="The given buffer is not writable")

        def get() -> None:
            HTTPTransport.recv_checkpoint(_Receiver(), 0, self._address, 1, TIMEOUT)  # type: ignore[arg-type]

        return get

    def ready(self) -> None:
        pass

    def send(self) -> None:
        """The transport gives the state out until it is told not to."""
        self._transport.send_checkpoint([0], 1, self._state, TIMEOUT)

    def close(self) -> None:
        self._transport.disallow_checkpoint()
        self._transport.shutdown(wait=False)


class _Receiver:
    """A receiver of a transport without a server of its own."""

    _num_chunks = 0
    _load_from_address = HTTPTransport._load_from_address
