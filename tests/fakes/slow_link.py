"""A link between two groups that is slow, or breaks in the middle, from a test's wish."""

from __future__ import annotations

import asyncio
import time

from torchtitan_rl_ft.chaos.proxy import ProxyThread, TcpProxy

CHUNK_BYTES = 4096


class SlowLink(TcpProxy):
    """Forwards after `delay_s`, at `rate_bytes_s`, and cuts a connection after `cut_after_bytes`.
    0: at once, no limit."""

    delay_s = 0.0
    rate_bytes_s = 0.0
    cut_after_bytes = 0

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(self.delay_s)
        sent, started_s = 0, time.monotonic()
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
            sent += len(data)
            if self.cut_after_bytes and sent > self.cut_after_bytes:
                raise ConnectionAbortedError
            if self.rate_bytes_s:
                await asyncio.sleep(started_s + sent / self.rate_bytes_s - time.monotonic())
        writer.write_eof()


class SlowLinkThread(ProxyThread):
    """A SlowLink with an event loop of its own."""

    proxy_class = SlowLink

    @property
    def link(self) -> SlowLink:
        assert isinstance(self._proxy, SlowLink)
        return self._proxy
