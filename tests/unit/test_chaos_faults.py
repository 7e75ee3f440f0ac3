"""What is done to living processes and connections."""

from __future__ import annotations

import http.client
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from torchtitan_rl_ft.chaos import engine_wrapper, faults
from torchtitan_rl_ft.chaos.proxy import ProxyThread
from torchtitan_rl_ft.host.ports import free_port
from torchtitan_rl_ft.run_folder import ProcessId

TREE = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("up", flush=True)
time.sleep(600)
"""

BUSY = "while True: pass"


@contextmanager
def program(script: str, *, ready: bool = False) -> Iterator[ProcessId]:
    started = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    root = ProcessId.of(started.pid)
    try:
        if ready:
            assert started.stdout is not None
            started.stdout.readline()
        yield root
    finally:
        for member in faults.tree(root):
            psutil.Process(member.pid).kill()
        started.kill()
        started.wait()


def until(predicate: Callable[[], object], timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not predicate():
        assert time.monotonic() < end
        time.sleep(0.01)


def status(victim: ProcessId) -> str:
    return psutil.Process(victim.pid).status()


def test_kill_takes_the_whole_tree_or_one() -> None:
    with program(TREE, ready=True) as root:
        members = faults.tree(root)
        assert len(members) == 2
        assert faults.kill(root) == [root, *(m for m in members if m != root)]
        until(lambda: not any(m.alive() for m in members))
        assert faults.kill(root) == []
    with program(TREE, ready=True) as root:
        [child] = [m for m in faults.tree(root) if m != root]
        assert faults.kill(root, whole_tree=False) == [root]
        until(lambda: not root.alive())
        assert child.alive()
        faults.kill(child)


def test_a_reused_pid_is_not_hit() -> None:
    with program("import time; time.sleep(600)") as root:
        stranger = ProcessId(root.pid, root.start_time + 1)
        assert faults.kill(stranger) == faults.stop(stranger) == []
        assert root.alive()


def test_stopped_is_over_with_the_block() -> None:
    with program(TREE, ready=True) as root:
        with faults.stopped(root) as held:
            assert len(held) == 2
            until(lambda: [status(p) for p in held] == [psutil.STATUS_STOPPED] * 2)
        until(lambda: psutil.STATUS_STOPPED not in [status(p) for p in held])


def test_slow_takes_its_share_of_the_time() -> None:
    def cpu_s(busy: ProcessId) -> float:
        return psutil.Process(busy.pid).cpu_times().user

    with program(BUSY) as busy:
        states = []
        over = threading.Event()

        def look() -> None:
            while not over.wait(0.005):
                states.append(status(busy) == psutil.STATUS_STOPPED)

        watching = threading.Thread(target=look)
        watching.start()
        start = time.monotonic()
        faults.slow(busy, share=0.5, duration_s=1.5)
        assert 1.4 < time.monotonic() - start < 3.0
        over.set()
        watching.join()
        assert 0.25 < sum(states) / len(states) < 0.75
        until(lambda: status(busy) != psutil.STATUS_STOPPED)
        with faults.slowed(busy, share=0.5):
            before = cpu_s(busy)
            time.sleep(0.6)
            assert cpu_s(busy) > before  # it does go on
        until(lambda: status(busy) != psutil.STATUS_STOPPED)


# Connections ------------------------------------------------------------------------------------


class Hello(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hello) as http_server:
        threading.Thread(target=http_server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http_server.server_port}"
        http_server.shutdown()


def get(connection: http.client.HTTPConnection) -> bytes:
    connection.request("GET", "/")
    return connection.getresponse().read()


def connect(url: str, timeout_s: float = 5.0) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    assert parts.hostname is not None
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)


def test_a_black_hole_accepts_forwards_nothing_and_can_be_lifted(server: str) -> None:
    with ProxyThread(server) as proxy:
        kept = connect(proxy.url, timeout_s=0.5)
        assert get(kept) == b"hello"
        proxy.blackhole()
        time.sleep(0.05)
        fresh = connect(proxy.url, timeout_s=0.5)
        for connection in (kept, fresh):
            with pytest.raises(TimeoutError):  # no reset, no refusal, no end
                get(connection)
        assert proxy.accepted == 2
        with connect_waiting(proxy) as answer:
            proxy.lift()
            assert answer() == b"hello"  # what was held back goes on
        assert get(connect(proxy.url)) == b"hello"


@contextmanager
def connect_waiting(proxy: ProxyThread) -> Iterator[Callable[[], bytes]]:
    """A request that was sent into the black hole."""
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(get(connect(proxy.url))))
    thread.start()
    until(lambda: proxy.accepted == 3)

    def answer() -> bytes:
        thread.join(5)
        return found[0]

    yield answer


def test_a_proxy_passes_on_that_nobody_listens() -> None:
    with (
        ProxyThread(f"http://127.0.0.1:{free_port()}") as proxy,
        pytest.raises((ConnectionError, http.client.HTTPException)),
    ):
        get(connect(proxy.url))
    with pytest.raises(ValueError, match="names no host and port"):
        ProxyThread("nowhere")


# An engine behind a proxy -----------------------------------------------------------------------

SERVE = """
import sys, threading
sys.path.insert(0, {folder!r})
from http.server import ThreadingHTTPServer
from test_chaos_faults import Hello
port = next(int(a.partition("=")[2]) for a in sys.argv if a.startswith("--port="))
ThreadingHTTPServer(("127.0.0.1", port), Hello).serve_forever()
"""


def test_an_interpreter_puts_its_program_behind_a_proxy(tmp_path: Path) -> None:
    script = tmp_path / "serve.py"
    script.write_text(SERVE.format(folder=str(Path(__file__).parent)))
    port = free_port()
    python = engine_wrapper.make_interpreter(tmp_path / "chaos" / "engine_python")
    started = subprocess.Popen([str(python), str(script), "--x", f"--port={port}"])
    try:
        until(lambda: answers(port), 20)
        engine = ProcessId.of(started.pid)
        assert engine_wrapper.is_wrapper(engine.pid)
        assert not engine_wrapper.is_wrapper(1)
        [program] = [m for m in faults.tree(engine) if m != engine]
        started.send_signal(engine_wrapper.BLACKHOLE)
        until(lambda: not answers(port))
        started.send_signal(engine_wrapper.LIFT)
        until(lambda: answers(port))
        faults.kill(program, whole_tree=False)  # the wrapper dies as its program did
        assert started.wait(10) == -signal.SIGKILL
    finally:
        started.kill()
        started.wait()
    until(lambda: not program.alive())


def answers(port: int) -> bool:
    try:
        return get(connect(f"http://127.0.0.1:{port}", timeout_s=0.3)) == b"hello"
    except (OSError, http.client.HTTPException):
        return False


def test_the_port_of_a_command_line() -> None:
    assert engine_wrapper.take_port(["a", "--port=1", "b"], 9) == (1, ["a", "--port=9", "b"])
    assert engine_wrapper.take_port(["--port", "1"], 9) == (1, ["--port", "9"])
    with pytest.raises(ValueError, match="no --port"):
        engine_wrapper.take_port(["--ports=1"], 9)
