"""A sending side whose receivers die between two pieces.

    python -m fakes.nixl_pusher FILE CYCLES TLS LANES

Each cycle pushes to a receiver that is killed half-way, then to one that lives, and prints how each
push ended.
"""

import ctypes
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from torchtitan_rl_ft.config.weights import WeightsSection
from torchtitan_rl_ft.weights.holder.agent import Agent, load
from torchtitan_rl_ft.weights.holder.client import Offer
from torchtitan_rl_ft.weights.holder.push import Memory, Pusher, PushFailed

PIECE, PIECES = 1 << 20, 8
NBYTES = PIECE * PIECES


def receiver(path: str, tls: str) -> tuple[subprocess.Popen[bytes], Offer]:
    with open(path, "wb") as f:
        f.truncate(NBYTES)
    command = [sys.executable, "-m", "fakes.nixl_peer", "receive", path, str(NBYTES), tls]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    return process, Offer.from_json(json.loads(process.stdout.readline()))


def pieces(dying: subprocess.Popen[bytes] | None) -> Iterator[tuple[int, int]]:
    for i in range(PIECES):
        if dying is not None and i == PIECES // 2:
            dying.kill()
            dying.wait()
        yield i * PIECE, (i + 1) * PIECE


def main(path: str, cycles: int, tls: str, lanes: int) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    nixl = load(WeightsSection(ucx_tls=tls), Path(path).parent)
    held = mmap.mmap(-1, NBYTES)
    memory = Memory(ctypes.addressof(ctypes.c_char.from_buffer(held)), ((0, NBYTES),))
    pusher = Pusher(lambda: Agent(nixl, "pusher"), lane_bytes=NBYTES // lanes)
    for dies in (True, False) * cycles:
        process, offer = receiver(path, tls)
        try:
            pusher.push(memory, pieces(process if dies else None), offer, 10.0)
            ended = "done"
        except PushFailed as e:
            ended = "failed"
            print(e, file=sys.stderr)
        finally:
            process.kill()
            process.wait()
        print(ended, file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    os._exit(0)
