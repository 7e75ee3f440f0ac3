"""Striking a holder at a moment of its push."""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import Callable
from pathlib import Path

from integration.holder_site import Holder, Policy, Site

from torchtitan_rl_ft.weights.holder.client import Fetched

SLOWER_S, LONGEST_SLICE_S = 0.0001, 0.002


class Seen:
    """What of a policy is in a file by now; also when the file is renamed."""

    def __init__(self, path: Path, policy: Policy) -> None:
        self._policy = policy
        with open(path, "rb") as f:
            self._map = mmap.mmap(f.fileno(), policy.image.nbytes, prot=mmap.PROT_READ)

    def is_all(self, byte: bytes) -> bool:
        return self._map[:] == byte * len(self._map)

    def probes(self) -> int:
        """Of 64 places in the file, where it is the policy's."""
        size = 64
        step = (self._policy.image.nbytes - size) // 63
        at = [i * step for i in range(64)]
        return sum(self._map[i : i + size] == self._policy.data[i : i + size] for i in at)


async def until(condition: Callable[[], bool], limit_s: float = 30.0) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "it did not come to that"
        await asyncio.sleep(0.0005)


def file_of(holder: Holder, step: int | str = "*") -> Path | None:
    return next(holder.settings.folder.glob(f"step-{step}-*/model.safetensors"), None)


async def stopped_when(holder: Holder, condition: Callable[[], bool]) -> None:
    """Stop it when the condition holds; it goes on in slow motion until then, since a push takes
    some milliseconds."""
    slice_s = 0.0
    holder.stop()
    while not condition():
        holder.thaw()
        time.sleep(slice_s)
        holder.stop()
        await asyncio.sleep(0.001)
        slice_s = min(slice_s + SLOWER_S, LONGEST_SLICE_S)


async def begun(site: Site, taker: Holder, policy: Policy) -> tuple[asyncio.Task[Fetched], Path]:
    """A fetch that has memory, and the file."""
    step = policy.key.step
    fetching = asyncio.create_task(site.fetch(taker, policy))
    await until(lambda: fetching.done() or file_of(taker, step) is not None)
    path = file_of(taker, step)
    assert path is not None, fetching.result()
    return fetching, path


async def caught_half_way(
    site: Site, giver: Holder, taker: Holder, policy: Policy
) -> asyncio.Task[Fetched]:
    """`taker` fetches, and `giver` is stopped while it pushes: some is there, not all. Returns the
    fetch."""
    fetching, path = await begun(site, taker, policy)
    seen = Seen(path, policy)
    await stopped_when(giver, lambda: fetching.done() or seen.probes() > 4)
    assert not fetching.done() and seen.probes() < 64, "it was over: a larger image is needed"
    return fetching


async def until_pushes(holder: Holder, ended: tuple[str, ...], limit_s: float = 30.0) -> None:
    """Until one has ended in one of these ways."""
    end_s = time.monotonic() + limit_s
    while True:
        pushes = (await holder.client.status(5.0))["pushes"]
        if any(pushes[how] for how in ended):
            return
        assert time.monotonic() < end_s, pushes
        await asyncio.sleep(0.05)
