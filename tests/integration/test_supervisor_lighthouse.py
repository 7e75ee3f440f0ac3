"""The lighthouse role as it is started for a job: torchft's real server."""

import os
import signal
import subprocess
import sys
import time

import httpx
import pytest

from torchtitan_rl_ft.config.resolve import resolve
from torchtitan_rl_ft.observability.events import Kind, read_events
from torchtitan_rl_ft.roles.lighthouse import load_extension
from torchtitan_rl_ft.run_folder import TOKEN_ENV


@pytest.fixture
def run_folder(tmp_path):
    argv = ["--job.config_file", "rl_ft_debug.toml", "--job.dump_folder", str(tmp_path / "run")]
    resolved = resolve(argv)
    resolved.write()
    return resolved.run_folder


def start(run_folder, *more):
    command = [sys.executable, "-m", "torchtitan_rl_ft", "run", "--role", "lighthouse"]
    env = {**os.environ, TOKEN_ENV: "t"}
    return subprocess.Popen([*command, "--run-folder", str(run_folder.path), *more], env=env)


def url_of(run_folder, pid, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        role = run_folder.role("lighthouse")
        if role is not None and role.pid == pid:
            return role.url
        time.sleep(0.02)
    raise AssertionError("the lighthouse did not come up")


def end(process):
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 0


def test_serves_on_loopback_and_comes_back_at_the_same_address(run_folder):
    first = start(run_folder)
    url = url_of(run_folder, first.pid)
    assert url.startswith("http://127.0.0.1:")
    assert httpx.get(url, trust_env=False, timeout=5.0).status_code == 200
    first.send_signal(signal.SIGKILL)
    first.wait()
    second = start(run_folder)
    assert url_of(run_folder, second.pid) == url
    end(second)
    ready = [e for e in read_events(run_folder.events) if e.kind is Kind.READY]
    assert [e.data["url"] for e in ready] == [url, url]


def test_address_taken_by_another_is_an_error_that_names_it(run_folder):
    first = start(run_folder)
    url = url_of(run_folder, first.pid)
    with pytest.raises(RuntimeError, match="in use"):
        load_extension().LighthouseServer(bind=url.removeprefix("http://"), min_replicas=1)
    end(first)


def test_needs_neither_torch_nor_the_torchft_package():
    script = (
        "import sys; from torchtitan_rl_ft.roles.lighthouse import load_extension;"
        "load_extension(); print(sorted({'torch', 'torchft'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
