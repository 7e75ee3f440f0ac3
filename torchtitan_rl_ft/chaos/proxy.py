"""A TCP proxy that can go dead: connections stay open and are accepted, nothing is forwarded, and
nothing is reset. What a network that drops packets, or a machine without power, looks like."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any
from urllib.parse import urlsplit

HOST = "127.0.0.1"
CHUNK_BYTES = 64 * 1024
START_TIMEOUT_S = 10.0


class TcpProxy:
    """Forwards `url` to `upstream`. All that comes in while it is a black hole is held back, and
    goes on its way when that is lifted. Lives in one event loop; see ProxyThread for callers
    without one."""

    def __init__(self, upstream_host: str, upstream_port: int) -> None:
        self._upstream = (upstream_host, upstream_port)
        self._server: asyncio.Server | None = None
        self._open = asyncio.Event()  # clear: a black hole
        self._open.set()
        self._connections: set[asyncio.Task[None]] = set()
        self.accepted = 0
        self.port = 0

    async def start(self, port: int = 0) -> None:
        """Raises OSError when the port is taken."""
        self._server = await asyncio.start_server(self._accept, HOST, port)
        self.port = self._server.sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def blackhole(self) -> None:
        self._open.clear()

    def lift(self) -> None:
        self._open.set()

    async def close(self) -> None:
        """End all connections too."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        self.accepted += 1
        try:
            with contextlib.suppress(asyncio.CancelledError):  # by `close`; asyncio would log it
                await self._serve(reader, writer)
        finally:
            self._connections.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._open.wait()
        try:
            up_reader, up_writer = await asyncio.open_connection(*self._upstream)
        except OSError:
            # Nobody listens there: the client finds its connection closed.
            return
        try:
            there = asyncio.create_task(self._pump(reader, up_writer))
            back = asyncio.create_task(self._pump(up_reader, writer))
            try:
                await asyncio.gather(there, back)
            finally:
                there.cancel()
                back.cancel()
        finally:
            up_writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until the end of one direction, which is passed on as such (and when it was cut)."""
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(CHUNK_BYTES):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
        await self._open.wait()  # an end is news too
        with contextlib.suppress(OSError):
            writer.write_eof()


class ProxyThread:
    """A TcpProxy with an event loop of its own, for blocking callers and those in another loop. A
    context manager. Methods may be called from any thread."""

    proxy_class = TcpProxy

    def __init__(self, upstream_url: str, port: int = 0) -> None:
        """Forwards to `http://host:port`. Raises OSError when `port` is taken."""
        parts = urlsplit(upstream_url)
        if parts.hostname is None or parts.port is None:
            raise ValueError(f"{upstream_url!r} names no host and port")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._proxy = self.proxy_class(parts.hostname, parts.port)
        try:
            self._call(self._proxy.start(port))
        except OSError:
            self._end_loop()
            raise

    @property
    def url(self) -> str:
        return self._proxy.url

    @property
    def accepted(self) -> int:
        """Connections so far."""
        return self._proxy.accepted

    def blackhole(self) -> None:
        self._loop.call_soon_threadsafe(self._proxy.blackhole)

    def lift(self) -> None:
        self._loop.call_soon_threadsafe(self._proxy.lift)

    def close(self) -> None:
        if self._loop.is_running():
            self._call(self._proxy.close())
            self._end_loop()

    def __enter__(self) -> ProxyThread:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(START_TIMEOUT_S)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
