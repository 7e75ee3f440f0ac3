"""What of a holder strangers could reach: real processes, real NIXL, everything at its default."""

from __future__ import annotations

import asyncio
import time
from urllib.parse import urlsplit

import psutil
import pytest
from integration.holder_site import Holder, Policy, holder_site

from torchtitan_rl_ft.config.weights import WeightsSection

pytest.importorskip("nixl_cu13", reason="weights over UCX need the extra ucx")

pytestmark = [pytest.mark.scenario("S-2"), pytest.mark.timeout(180)]


def listening(holder: Holder) -> set[tuple[str, int]]:
    found = psutil.Process(holder.child.pid).net_connections("inet")
    return {tuple(c.laddr) for c in found if c.status == psutil.CONN_LISTEN}


async def test_holders_listen_on_loopback_alone_and_ucx_on_the_ports_that_are_pinned(tmp_path):
    policy, ports = Policy.make(9), WeightsSection().ucx_ports
    assert ports
    async with holder_site(tmp_path) as site:
        source = await site.start("trainer-0.0", "source")
        relay = await site.start("relay-0", "relay")
        await site.offer(source, policy)
        site.want(policy)
        await site.fetch(relay, policy)
        for holder in (source, relay):
            http = (urlsplit(holder.client.url).hostname, urlsplit(holder.client.url).port)
            end_s = time.monotonic() + 60.0
            while len(found := listening(holder)) < 2:  # its agents come and go
                assert time.monotonic() < end_s, found
                await asyncio.sleep(0.05)
            assert http in found
            assert {host for host, _ in found} == {"127.0.0.1"}
            assert all(port in ports for _, port in found - {http}), found
