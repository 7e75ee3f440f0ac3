"""Starts trainer ranks in a fraction of the time: all is imported once, each rank is a fork.

Reads orders from stdin, a JSON line each: {"env": {...}, "log": path, "cwd": path}. Answers on
stdout, a JSON line each: {"pid"} to an order, {"exit": pid, "code": returncode} when a rank has
ended. Ends with its stdin; a rank that is left is killed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys

import torchft  # noqa: F401
import torchtitan.train  # noqa: F401
import trainer_probe

import torchtitan_rl_ft.trainer.rl_trainer  # noqa: F401


def start(order: dict) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.chdir(order["cwd"])
        os.environ.clear()
        os.environ.update(order["env"])
        log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        null = os.open(os.devnull, os.O_RDONLY)
        for fd, copy in ((null, 0), (log, 1), (log, 2)):
            os.dup2(fd, copy)
        os.closerange(3, 64)
        sys.argv = ["trainer_probe.py"]
        code = trainer_probe.main()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def reap(left: set[int]) -> None:
    while left:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        left.discard(pid)
        answer({"exit": pid, "code": os.waitstatus_to_exitcode(status)})


def answer(line: dict) -> None:
    print(json.dumps(line), flush=True)


def main() -> None:
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    left: set[int] = set()
    pending = b""
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
        if 0 in ready:
            data = os.read(0, 1 << 20)
            if not data:
                break
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                pid = start(json.loads(line))
                left.add(pid)
                answer({"pid": pid})
        reap(left)
    for pid in left:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
