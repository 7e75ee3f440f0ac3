"""Runs an engine behind a proxy, so that its connections can go dead while it lives.

    python -m torchtitan_rl_ft.chaos.engine_wrapper PROGRAM [ARGUMENT...] --port=N [...]

The proxy takes port N, the program gets another one. SIGUSR1 makes the proxy a black hole,
SIGUSR2 lifts that. A job's engines come here through `rollout.engine_python`, which names the
script that `make_interpreter` writes: the serving role knows nothing of it.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan_rl_ft.chaos.proxy import HOST, TcpProxy
from torchtitan_rl_ft.host import parent_bound
from torchtitan_rl_ft.host.ports import free_port

BLACKHOLE = signal.SIGUSR1
LIFT = signal.SIGUSR2

PORT_OPTION = "--port"
MARKER = "torchtitan_rl_ft.chaos.engine_wrapper"


def make_interpreter(path: Path, python: str = "") -> Path:
    """Write a script for `rollout.engine_python` that runs `python` (empty: this interpreter)
    behind a proxy; returns its path."""
    words = [sys.executable, "-m", MARKER, python or sys.executable]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    path.chmod(0o755)
    return path


def is_wrapper(pid: int) -> bool:
    """Whether process `pid` is one of these."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return MARKER.encode() in words


def take_port(arguments: Sequence[str], inner: int) -> tuple[int, list[str]]:
    """The port in a command line, and the command line with `inner` in its place. Raises
    ValueError."""
    words = list(arguments)
    for i, word in enumerate(words):
        if word.startswith(PORT_OPTION + "="):
            words[i] = f"{PORT_OPTION}={inner}"
            return int(word.partition("=")[2]), words
        if word == PORT_OPTION and i + 1 < len(words):
            outer, words[i + 1] = int(words[i + 1]), str(inner)
            return outer, words
    raise ValueError(f"no {PORT_OPTION} in the command line")


async def run(arguments: Sequence[str]) -> int:
    """The program's exit code; a signal that ended it ends this process too."""
    inner = free_port()
    outer, command = take_port(arguments, inner)
    proxy = TcpProxy(HOST, inner)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(BLACKHOLE, proxy.blackhole)
    loop.add_signal_handler(LIFT, proxy.lift)
    await proxy.start(outer)
    bound = [sys.executable, "-I", "-S", parent_bound.__file__, str(os.getpid())]
    engine = await asyncio.create_subprocess_exec(*bound, *command)
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, engine.send_signal, signum)
    return await engine.wait()


def main() -> None:
    try:
        code = asyncio.run(run(sys.argv[1:]))
    except (ValueError, OSError) as e:
        sys.exit(f"engine behind a proxy: {e}")
    if code < 0:  # as the engine died, so does this
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
