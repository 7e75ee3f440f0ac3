"""Holders hand a version on: real processes, real NIXL."""

from __future__ import annotations

from pathlib import Path

import pytest
from integration.holder_site import Policy, holder_site

from torchtitan_rl_ft.weights.manifest import read_and_verify

pytest.importorskip("nixl_cu13")

pytestmark = [pytest.mark.row("D10"), pytest.mark.timeout(180)]

OVER = pytest.mark.parametrize("tls", ["", "tcp"], ids=["default", "tcp"])


@OVER
async def test_a_version_goes_from_two_ranks_through_one_relay_to_others(tmp_path, tls):
    policy = Policy.make(12)
    async with holder_site(tmp_path) as site:
        sources = [await site.start(f"trainer-0.{i}", "source", ucx_tls=tls) for i in range(2)]
        relays = [await site.start(f"relay-{i}", "relay", ucx_tls=tls) for i in range(3)]
        for source, ranges in zip(sources, policy.halves(), strict=True):
            await site.offer(source, policy, ranges)
        site.want(policy)
        found = [await site.fetch(r, policy) for r in relays]
        for fetched in found:
            folder = Path(fetched.path)
            assert (folder / "model.safetensors").read_bytes() == policy.data
            manifest = read_and_verify(folder)
            assert (manifest.step, manifest.token) == policy.key
            assert manifest.digest == fetched.manifest_digest
            assert (folder / "config.json").exists()
        assert set(found[0].bytes_from) == {"trainer-0.0", "trainer-0.1"}
        assert set(found[1].bytes_from) == {"relay-0"}
        print(found)
