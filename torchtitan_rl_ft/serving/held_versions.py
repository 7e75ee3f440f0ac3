"""What adopted engines say they hold: numbers go on above it, whatever was lost on disk."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import aiohttp

from torchtitan_rl_ft.serving.engine_client import EngineClient, EngineRefused, EngineUnreachable
from torchtitan_rl_ft.serving.engine_records import EngineRecord
from torchtitan_rl_ft.serving.samples import AnswerInvalid

ASK_TIMEOUT_S = 2.0


async def highest_held(http: aiohttp.ClientSession, records: Iterable[EngineRecord]) -> int:
    """The highest version number among engines that tell one, 0 when none does. A start version
    ("default") is no number, and an engine that does not answer is found out about later."""
    return max(await asyncio.gather(*(_held(http, r) for r in records)), default=0)


async def _held(http: aiohttp.ClientSession, record: EngineRecord) -> int:
    client = EngineClient(http, record.url, f"engine-{record.slot}")
    try:
        return await client.held_version(ASK_TIMEOUT_S) or 0
    except (EngineUnreachable, EngineRefused, AnswerInvalid):
        return 0
