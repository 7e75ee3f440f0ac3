"""Signs of life of a process that is one event loop: one that is held, or stopped, gives none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from torchtitan_rl_ft.host.phase_file import PhaseFile

BEAT_S = 1.0


@asynccontextmanager
async def beating(folder: Path, name: str, rank: str = "") -> AsyncIterator[PhaseFile]:
    """Beat from the running loop while the body runs. Raises OSError."""
    file = PhaseFile(folder, name, rank)
    task = asyncio.create_task(_beat(file))
    try:
        yield file
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        file.close()


async def _beat(file: PhaseFile) -> None:
    while True:
        file.enter("running")
        await asyncio.sleep(BEAT_S)
