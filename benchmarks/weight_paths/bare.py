"""What the library alone does: one agent writes into another's memory, which checks nothing.

    python -m benchmarks.weight_paths.bare NBYTES TLS FOLDER REPEATS

prints the seconds of each repeat, as JSON. In processes of its own: what UCX may use is said before
the library is loaded. Files in FOLDER are a holder's; pieces are as large as a job's.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.weight_paths.crew import LIMIT_S, Sample
from torchtitan_rl_ft.config.weights import WeightsSection
from torchtitan_rl_ft.weights.holder.agent import Agent, load
from torchtitan_rl_ft.weights.holder.mapping import Mapping

POLL_S = 0.0001


def bare(nbytes: int, weights: WeightsSection, repeats: int) -> list[Sample]:
    """The first one, which finds new memory, is left out."""
    command = [sys.executable, "-m", "benchmarks.weight_paths.bare", str(nbytes), weights.ucx_tls]
    command += [weights.memory_folder, str(repeats + 1)]
    told = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=LIMIT_S)
    took = json.loads(told.stdout.splitlines()[-1])
    return [Sample(seconds, seconds) for seconds in took[1:]]


def _memory(folder: Path, name: str, nbytes: int) -> Mapping:
    fd = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o600)
    os.posix_fallocate(fd, 0, nbytes)
    os.close(fd)
    return Mapping(folder / name, nbytes)


def _receive(pipe: Connection, folder: Path, nbytes: int, weights: WeightsSection) -> None:
    memory, agent = _memory(folder, "to", nbytes), Agent(load(weights), "receiver")
    agent.register(memory.address, [(0, nbytes)])
    pipe.send((agent.metadata(), memory.address))
    while (pieces := pipe.recv()) > 0:
        came = 0
        while came < pieces:
            came += len(notes := agent.notes())
            if not notes:
                time.sleep(POLL_S)
        pipe.send(time.monotonic())
    os._exit(0)


def main(nbytes: int, weights: WeightsSection, repeats: int) -> None:
    piece = weights.piece_mb << 20
    with tempfile.TemporaryDirectory(dir=weights.memory_folder) as temp:
        folder = Path(temp)
        ours, theirs = multiprocessing.get_context("fork").Pipe()
        receiver = multiprocessing.get_context("fork").Process(
            target=_receive, args=(theirs, folder, nbytes, weights), daemon=True
        )
        receiver.start()
        memory, agent = _memory(folder, "from", nbytes), Agent(load(weights), "sender")
        agent.register(memory.address, [(0, nbytes)])
        metadata, address = ours.recv()
        peer = agent.add_peer(metadata)
        took = []
        for _ in range(repeats):
            starts = range(0, nbytes, piece)
            ours.send(len(starts))
            began = time.monotonic()
            for at in starts:
                length = min(piece, nbytes - at)
                handle = agent.write(memory.address + at, address + at, length, peer, b"piece")
                while not agent.is_done(handle):
                    time.sleep(POLL_S)
                agent.release(handle)
            took.append(ours.recv() - began)
        ours.send(0)
        receiver.join(LIMIT_S)
    print(json.dumps(took), flush=True)


if __name__ == "__main__":
    usual = WeightsSection(ucx_tls=sys.argv[2], memory_folder=sys.argv[3])
    main(int(sys.argv[1]), usual, int(sys.argv[4]))
    os._exit(0)  # the library may fail at the very end of a process
