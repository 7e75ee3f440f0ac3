"""The gateway's list of engines, on a fake gateway: what a real one does not do on demand."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from torchtitan_rl_ft.observability.events import EventList
from torchtitan_rl_ft.run_folder import RunFolder
from torchtitan_rl_ft.serving import gateway as gateway_module
from torchtitan_rl_ft.serving.changes import Changes
from torchtitan_rl_ft.serving.deregistration import DeregistrationFailed
from torchtitan_rl_ft.serving.gateway import Gateway, smg_program
from torchtitan_rl_ft.serving.kept_child import ChildFailed

FAKE = Path(__file__).parent.parent / "fakes" / "fake_gateway.py"
A, B = "http://127.0.0.1:11001", "http://127.0.0.1:11002"


def fake_program(port: int, metrics_port: int) -> list[str]:
    return [sys.executable, str(FAKE), str(port)]


def engine(url: str) -> Any:
    """What the gateway looks at."""
    return SimpleNamespace(client=SimpleNamespace(url=url))


@dataclass
class Bench:
    gateway: Gateway
    events: EventList
    changes: Changes
    http: aiohttp.ClientSession
    wanted: set[str] = field(default_factory=set)

    def engines(self) -> list[Any]:
        return [engine(url) for url in self.wanted]

    async def fault(self, **faults: Any) -> None:
        assert self.gateway.client is not None
        async with self.http.post(self.gateway.client.url + "/fault", json=faults):
            pass

    async def until_listed(self, *urls: str, timeout_s: float = 10.0) -> float:
        start = time.monotonic()
        self.changes.notify()
        while self.gateway.listed != set(urls):
            if time.monotonic() - start > timeout_s:
                raise AssertionError(f"{self.gateway.to_json()} {self.events.events}")
            await asyncio.sleep(0.01)
        return time.monotonic() - start

    def seen(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in self.events.events if e["kind"] == kind]


@asynccontextmanager
async def running(run: Path, program: Any = fake_program) -> AsyncIterator[Bench]:
    events, changes = EventList(), Changes()
    async with aiohttp.ClientSession() as http:
        folder = RunFolder(run)
        gateway = Gateway(
            lambda: folder, events, http, changes, lambda: bench.engines(), program=program
        )
        bench = Bench(gateway, events, changes, http)
        task = asyncio.create_task(gateway.run())
        try:
            yield bench
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    assert gateway.to_json()["pid"] is None


@pytest.mark.row("B7")
async def test_a_refused_removal_is_remembered_and_done_in_the_next_round(tmp_path: Path) -> None:
    async with running(tmp_path) as bench:
        bench.wanted = {A, B}
        await bench.until_listed(A, B)
        await bench.fault(delete_status=500)
        bench.wanted = {B}
        with pytest.raises(DeregistrationFailed, match="status 500"):
            await bench.gateway.forget(engine(A))
        assert A in bench.gateway.to_json()["known"]
        await bench.until_listed(B)
        while A in bench.gateway.to_json()["known"]:
            await asyncio.sleep(0.02)


async def test_a_refused_registration_is_tried_again(tmp_path: Path) -> None:
    async with running(tmp_path) as bench:
        await bench.until_listed()
        while bench.gateway.client is None:
            await asyncio.sleep(0.01)
        await bench.fault(add_status=503)
        bench.wanted = {A}
        await bench.until_listed(A)
        assert len(bench.seen("warn")) == 1


@pytest.mark.row("C12")
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_dead_or_silent_gateway_is_replaced_and_lists_the_same_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals
) -> None:
    monkeypatch.setattr(gateway_module, "CALL_LIMIT_S", 0.5)
    monkeypatch.setattr(gateway_module, "AUDIT_S", 0.5)
    async with running(tmp_path) as bench:
        bench.wanted = {A, B}
        await bench.until_listed(A, B)
        first = bench.gateway.to_json()["pid"]
        os.kill(first, signum)
        while bench.gateway.listed:
            await asyncio.sleep(0.01)
        assert await bench.until_listed(A, B) < 5.0
        assert bench.gateway.to_json()["pid"] != first
        assert bench.gateway.to_json()["restarts"] == 1
        [ended] = bench.seen("exit")
        reason = "killed by SIGKILL" if signum is signal.SIGKILL else "calls in a row"
        assert reason in ended["cause"]


async def test_strangers_are_taken_off_the_list(tmp_path: Path) -> None:
    async with running(tmp_path) as bench:
        bench.wanted = {A}
        await bench.until_listed(A)
        client = bench.gateway.client
        assert client is not None
        await client.add(B, 1.0)
        for _ in range(500):
            if [w.url for w in await client.workers(1.0)] == [A]:
                return
            await asyncio.sleep(0.02)
        raise AssertionError("the stranger stayed on the list")


async def test_a_taken_port_is_left_for_another_one(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports: list[int] = []

        def program(port: int, metrics_port: int) -> list[str]:
            ports.append(port)
            return smg_program(taken.getsockname()[1] if len(ports) == 1 else port, metrics_port)

        async with running(tmp_path, program) as bench:
            while bench.gateway.client is None:
                await asyncio.sleep(0.02)
            [ended] = bench.seen("exit")
            assert "Address already in use" in "".join(ended["last_lines"])
            assert bench.gateway.client.url.endswith(f":{ports[1]}")


async def test_a_gateway_that_never_starts_ends_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(port: int, metrics_port: int) -> list[str]:
        return [sys.executable, "-c", "raise SystemExit('no such thing')"]

    monkeypatch.setattr("torchtitan_rl_ft.serving.kept_child.STARTS", 2)
    async with aiohttp.ClientSession() as http:
        folder = RunFolder(tmp_path)
        gateway = Gateway(lambda: folder, EventList(), http, Changes(), list, program=program)
        with pytest.raises(ChildFailed) as failure:
            await gateway.run()
    text = str(failure.value)
    assert "was started 2 times within 60 s; last: exit code 1" in text
    assert "attempt_2.log" in text
    assert "no such thing" in text


async def test_a_dead_engine_is_forgotten_while_the_list_is_compared(tmp_path: Path) -> None:
    async with running(tmp_path) as bench:
        for _ in range(20):
            bench.wanted = {A, B}
            await bench.until_listed(A, B)
            bench.wanted = set()
            bench.changes.notify()
            await asyncio.sleep(0)
            await asyncio.gather(bench.gateway.forget(engine(A)), bench.gateway.forget(engine(B)))
            await bench.until_listed()
        assert bench.gateway.to_json()["restarts"] == 0
        assert not bench.seen("exit")
