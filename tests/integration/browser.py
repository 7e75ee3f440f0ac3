"""A headless Chromium, asked over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp

PROGRAM = shutil.which("chromium")

FLAGS = (
    "--headless=new",
    "--no-sandbox",  # as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


@contextlib.contextmanager
def chromium(log: Path) -> Iterator[str]:
    """Started; the address of its DevTools."""
    assert PROGRAM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, open(log, "wb") as out:
        command = [PROGRAM, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        started = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            port_file, end = Path(profile) / "DevToolsActivePort", time.monotonic() + 60
            while not (port_file.exists() and port_file.read_text().count("\n")):
                assert started.poll() is None and time.monotonic() < end, log.read_text()[-2000:]
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port_file.read_text().split()[0]}"
        finally:
            started.terminate()
            try:
                started.wait(20)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()


class Tab:
    """One page of it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._last = socket, 0
        self.problems: list[str] = []  # exceptions, and what a policy has refused

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last += 1
        await self._socket.send_json({"id": self._last, "method": method, "params": params})
        while True:
            told = await self._socket.receive_json(timeout=30)
            if told.get("id") == self._last:
                assert "error" not in told, told
                return told["result"]
            if told.get("method") == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(told["params"])[:500])
            elif told.get("method") == "Log.entryAdded":
                entry = told["params"]["entry"]
                if entry["level"] == "error" and entry["source"] != "network":
                    self.problems.append(entry["text"])

    async def run(self, script: str) -> Any:
        """The value of an expression of JavaScript."""
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def wait(self, script: str, timeout_s: float = 40.0) -> Any:
        """Until the expression is true."""
        end = time.monotonic() + timeout_s
        while not (found := await self.run(script)):
            assert time.monotonic() < end, f"{script}\n{await self.run('document.body.innerText')}"
            await asyncio.sleep(0.1)
        return found

    async def look(self, width: int, height: int, scheme: str = "light") -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def picture(self, path: Path) -> bytes:
        """PNG of the whole page, also written to `path`."""
        found = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        data = base64.b64decode(found["data"])
        path.write_bytes(data)
        return data


@contextlib.asynccontextmanager
async def tab(devtools: str, url: str) -> AsyncIterator[Tab]:
    async with aiohttp.ClientSession() as http:
        async with http.put(f"{devtools}/json/new?about:blank") as answer:
            target = await answer.json(content_type=None)
        async with http.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=2**26) as socket:
            made = Tab(socket)
            for domain in ("Page", "Runtime", "Log"):
                await made.call(f"{domain}.enable")
            await made.look(1280, 900)
            await made.call("Page.navigate", url=url)
            yield made
        async with http.get(f"{devtools}/json/close/{target['id']}"):
            pass
