"""A file system that hangs takes no thread that anything else needs."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from torchtitan_rl_ft.weights.reading import READERS, read_in_thread


async def test_reads_that_hang_leave_the_threads_of_the_event_loop_alone() -> None:
    answers = threading.Event()
    hung = [asyncio.create_task(read_in_thread(answers.wait, 30.0)) for _ in range(3 * READERS)]
    try:
        await asyncio.sleep(0.1)
        start = time.monotonic()
        assert await asyncio.to_thread(lambda: "done") == "done"
        assert time.monotonic() - start < 5.0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await read_in_thread(lambda: None)  # its turn does not come
    finally:
        answers.set()
    assert all(await asyncio.gather(*hung))
    assert await read_in_thread(lambda *, a: a, a=3) == 3
