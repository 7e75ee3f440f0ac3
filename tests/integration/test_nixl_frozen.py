"""One side of a push is stopped at a moment of it, for longer than the other waits, and goes on
later: nothing that it still does reaches weights that are in use.

Real processes and real NIXL, by its own choice of transport (on one host: CMA) and by TCP.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from integration.holder_faults import Seen, begun, stopped_when
from integration.holder_site import Policy, holder_site

pytest.importorskip("nixl_cu13")

pytestmark = [pytest.mark.row("D10"), pytest.mark.timeout(180)]

OVER = pytest.mark.parametrize("tls", ["", "tcp"], ids=["default", "tcp"])
MIB = 24
STALL_S = 1.0
MARK = b"\xa5"

SENDER_PROBES = (0, 2, 24, 56)
"""Of 64 places in the file, how many have come when a sender is stopped; 0: it has not been asked
yet."""

RECEIVER_SLICES = (0, 12)
"""Of slow motion, until a receiver is stopped."""

LOOKS_AFTER = 20


async def freeze_senders(folder: Path, tls: str, moments: list[int]) -> None:
    async with holder_site(folder) as site:
        large = {"ucx_tls": tls, "piece_mb": 32}  # what is begun goes on for long
        frozen = await site.start("trainer-0.0", "source", **large)
        other = await site.start("trainer-1.0", "source", **large)
        taker = await site.start("relay-0", "relay", ucx_tls=tls, stall_timeout_s=STALL_S)
        for cycle, probes in enumerate(moments):
            policy = Policy.make(MIB, step=2 * cycle + 1)
            await site.offer(frozen, policy)
            site.want(policy)
            fetching, path = await begun(site, taker, policy)
            seen = Seen(path, policy)
            await stopped_when(
                frozen, lambda f=fetching, s=seen, n=probes: f.done() or s.probes() >= n
            )
            await site.offer(other, policy)
            await fetching
            assert path.read_bytes() == policy.data
            # What the stopped one goes on with is the same policy: only in a file that holds
            # something else by now is it seen.
            with open(path, "r+b") as f:
                f.write(MARK * policy.image.nbytes)
            frozen.thaw()
            following = Policy.make(MIB, step=2 * cycle + 2)
            await site.offer(frozen, following)
            site.want(following)
            fetching = asyncio.create_task(site.fetch(taker, following))
            looks = 0
            while looks < LOOKS_AFTER:
                assert seen.is_all(MARK), f"written to after {probes} of 64"
                looks += fetching.done()
                await asyncio.sleep(0.005)
            fetched = fetching.result()
            assert fetched.bytes_from == {frozen.name: following.image.nbytes}
            found = Path(fetched.path, "model.safetensors").read_bytes()
            assert found == following.data
        for holder in (frozen, other, taker):
            assert holder.child.returncode is None
        assert (await taker.client.status(5.0))["fetches"]["failed"] == 0


async def freeze_receivers(folder: Path, tls: str, moments: list[int]) -> None:
    async with holder_site(folder) as site:
        source = await site.start("trainer-0.0", "source", ucx_tls=tls)
        frozen = await site.start("relay-0", "relay", ucx_tls=tls)
        other = await site.start("relay-1", "relay", ucx_tls=tls)
        for cycle, slices in enumerate(moments):
            policy = Policy.make(MIB, step=cycle + 1)
            await site.offer(source, policy)
            site.want(policy)
            fetching, path = await begun(site, frozen, policy)
            left = iter(range(slices))
            await stopped_when(frozen, lambda f=fetching, n=left: f.done() or next(n, None) is None)
            fetched = await site.fetch(other, policy)
            assert Path(fetched.path, "model.safetensors").read_bytes() == policy.data
            frozen.thaw()
            await fetching
            assert path.read_bytes() == policy.data
        for holder in (source, frozen, other):
            assert holder.child.returncode is None


@OVER
async def test_what_a_stopped_sender_does_later_lands_nowhere(tmp_path, tls):
    await freeze_senders(tmp_path, tls, list(SENDER_PROBES))


@OVER
async def test_a_stopped_receiver_holds_nobody_up_and_goes_on_later(tmp_path, tls):
    await freeze_receivers(tmp_path, tls, list(RECEIVER_SLICES))


@OVER
@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("freeze", [freeze_senders, freeze_receivers])
async def test_a_hundred_stops_at_any_moment(tmp_path, tls, freeze):
    chance = random.Random(0)
    await freeze(tmp_path, tls, [chance.randrange(65) for _ in range(100)])
