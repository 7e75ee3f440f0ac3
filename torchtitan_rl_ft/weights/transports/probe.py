"""Whether NIXL works on this machine: a megabyte is pushed from one process to another, as holders
push, over the devices and ports of [weights].

    python -m torchtitan_rl_ft.weights.transports.probe receive|push WEIGHTS

The two are siblings, as holders are no ancestors of one another: where the kernel lets a process
copy into its descendants only (Yama), UCX's copy between processes fails, and this says so.
"""

from __future__ import annotations

import base64
import ctypes
import json
import mmap
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from torchtitan_rl_ft.config.weights import WeightsSection
from torchtitan_rl_ft.weights.holder.agent import (
    NixlError,
    NixlUnavailable,
    load,
    make,
    nixl_version,
)
from torchtitan_rl_ft.weights.holder.launch import environment

NBYTES = 1 << 20
MARK = 0x5A
LIMIT_S = 60.0
POLL_S = 0.001
LAST_LINES = 3
_LOG_PREFIX = re.compile(r"^[EWI]\d{4} [\d:.]+ +\d+ \S+\] ")


@dataclass(frozen=True)
class Probe:
    """`problem`: why NIXL is of no use here; None: it works."""

    problem: str | None
    seconds: float = 0.0
    ucx: str = ""
    """Version of the UCX that NIXL brings."""


def probe(weights: WeightsSection, limit_s: float = LIMIT_S) -> Probe:
    """Takes a second, most of it for starting two processes."""
    try:
        nixl_version()
    except NixlUnavailable as e:
        return Probe(str(e))
    began = time.monotonic()
    command = [sys.executable, "-m", "torchtitan_rl_ft.weights.transports.probe"]
    settings = json.dumps(asdict(weights))
    sides = [
        subprocess.Popen(
            [*command, side, settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(os.environ),
            text=True,
        )
        for side in ("receive", "push")
    ]
    limit = threading.Timer(limit_s, lambda: [side.kill() for side in sides])
    limit.start()  # the library may hang before anything that has a limit of its own
    try:
        problem, ucx = _pushed(sides[0], sides[1], limit_s)
    finally:
        limit.cancel()
        for side in sides:
            side.kill()
            side.communicate()
    if problem is not None:
        problem = f"NIXL does not work with {_settings(weights)}: {problem}"
    return Probe(problem, round(time.monotonic() - began, 3), ucx)


def _settings(weights: WeightsSection) -> str:
    names = ("ucx_devices", "ucx_tls", "ucx_port_range")
    return ", ".join(f"weights.{n} = {getattr(weights, n)!r}" for n in names)


def _pushed(
    receiver: subprocess.Popen[str], pusher: subprocess.Popen[str], limit_s: float
) -> tuple[str | None, str]:
    """Why the push failed, or None; the version of UCX. Both sides are killed at the limit."""
    assert receiver.stdout is not None and receiver.stdin is not None
    late = f"a push between two processes did not end within {limit_s:g} s"
    offered = receiver.stdout.readline()
    if not offered:
        told = _last_words("the receiver", receiver)
        return late if receiver.returncode == -signal.SIGKILL else told, ""
    ucx = str(json.loads(offered)["ucx"])
    _, errors = pusher.communicate(offered)
    if pusher.returncode == -signal.SIGKILL:
        return late, ucx
    if pusher.returncode != 0:
        return f"a push between two processes failed: {_end_of(errors)}", ucx
    last = _last_words("the receiver", receiver)  # its stdin ends with this
    return last if receiver.returncode != 0 else None, ucx


def _last_words(who: str, side: subprocess.Popen[str]) -> str:
    _, errors = side.communicate()
    return _end_of(errors) or f"{who} of a push ended with {side.returncode}"


def _end_of(text: str) -> str:
    """What was said last, then what the library had said before."""
    lines = [_LOG_PREFIX.sub("", line.strip()) for line in text.strip().splitlines()]
    return "; ".join(reversed(lines[-LAST_LINES:]))


# The two sides --------------------------------------------------------------------------------


def receive(weights: WeightsSection) -> None:
    """Offer memory on stdout, and wait until it is written to. Raises NixlUnavailable, NixlError,
    TimeoutError."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # UCX and NIXL write to stdout
    agent = make(load(weights), "probe-receiver", weights)
    memory = mmap.mmap(-1, NBYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    agent.register(address, [(0, NBYTES)])
    told = {
        "agent": base64.b64encode(agent.metadata()).decode(),
        "address": address,
        "ucx": _ucx_version(),
    }
    answer.write(json.dumps(told) + "\n")
    answer.flush()
    _until(lambda: bool(agent.notes()), "no push came")
    if memory[0] != MARK or memory[NBYTES - 1] != MARK:
        raise NixlError("what came is not what was pushed")
    # The pusher is not done before this side has made the last bit of progress, too.
    _until(lambda: _stdin_ended() or bool(agent.notes()), "the pusher does not end")


def _stdin_ended() -> bool:
    return bool(select.select([0], [], [], 0)[0]) and not os.read(0, 1)


def _ucx_version() -> str:
    """Of the library that NIXL has loaded into this process; empty when it cannot be told."""
    try:
        maps = Path("/proc/self/maps").read_text()
        path = next(w for w in maps.split() if w.startswith("/") and "/libucp" in w)
        version = ctypes.CDLL(path).ucp_get_version_string
    except (OSError, StopIteration, AttributeError):
        return ""
    version.restype = ctypes.c_char_p
    return version().decode()


def push(weights: WeightsSection) -> None:
    """Write into the memory that stdin offers. Raises NixlUnavailable, NixlError, TimeoutError."""
    os.dup2(2, 1)
    agent = make(load(weights), "probe-pusher", weights)
    memory = mmap.mmap(-1, NBYTES)
    memory[:] = bytes([MARK]) * NBYTES
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    agent.register(address, [(0, NBYTES)])
    offered = json.loads(sys.stdin.readline())
    peer = agent.add_peer(base64.b64decode(offered["agent"]))
    handle = agent.write(address, offered["address"], NBYTES, peer, b"probe")
    _until(lambda: agent.is_done(handle), "the push does not end")


def _until(done: Callable[[], bool], what: str) -> None:
    """Raises TimeoutError."""
    end = time.monotonic() + LIMIT_S
    while not done():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} ({LIMIT_S:g} s)")
        time.sleep(POLL_S)


def main(argv: list[str]) -> int:
    weights = WeightsSection(**json.loads(argv[1]))
    try:
        {"receive": receive, "push": push}[argv[0]](weights)
    except (NixlUnavailable, NixlError, TimeoutError) as e:
        print(e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # the library may end the process with a signal in its own clean-up
