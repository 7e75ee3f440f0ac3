"""Threads for file systems that may hang.

A read that hangs holds its thread for good. Those of the event loop are few, and all bookkeeping
needs them: engines could not even be ended any more. So weights are read by threads of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

READERS = 8
"""When all of them hang, every further read runs into its caller's limit."""

_readers = ThreadPoolExecutor(READERS, thread_name_prefix="weights")

P = ParamSpec("P")
T = TypeVar("T")


async def read_in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """As `asyncio.to_thread`. The caller sets the limit; what has begun goes on after it."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_readers, lambda: work(*args, **kwargs))
