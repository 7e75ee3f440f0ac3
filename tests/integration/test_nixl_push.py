"""Holders hand a version on: real processes, real NIXL."""

from __future__ import annotations

import asyncio
import time
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


async def offered(site, policy):
    """A source that has it, and a relay that has nothing yet."""
    source = await site.start("trainer-0.0", "source")
    await site.offer(source, policy)
    site.want(policy)
    return source, await site.start("relay-0", "relay")


async def test_a_relay_that_is_started_again_has_what_it_had(tmp_path):
    policy = Policy.make(3)
    async with holder_site(tmp_path) as site:
        source, relay = await offered(site, policy)
        before = await site.fetch(relay, policy)
        for holder in (source, relay):
            holder.kill()
            await holder.child.wait()
            site.book.gone(holder.name)
        await site.start("relay-0", "relay")
        end_s = time.monotonic() + 60.0
        while site.book.to_json()["wanted"][-1]["relays"] != ["relay-0"]:  # it tells so unasked
            assert time.monotonic() < end_s
            await asyncio.sleep(0.02)
        other = await site.start("relay-1", "relay")
        fetched = await site.fetch(other, policy)
        assert set(fetched.bytes_from) == {"relay-0"}
        assert fetched.manifest_digest == before.manifest_digest
        assert Path(fetched.path, "model.safetensors").read_bytes() == policy.data


async def test_versions_take_two_files_in_turns(tmp_path):
    async with holder_site(tmp_path) as site:
        source = await site.start("trainer-0.0", "source")
        relay = await site.start("relay-0", "relay")
        inodes = {source.name: set(), relay.name: set()}
        for step in range(1, 6):
            policy = Policy.make(2, step=step)
            await site.offer(source, policy)
            site.want(policy)
            fetched = await site.fetch(relay, policy)
            assert Path(fetched.path, "model.safetensors").read_bytes() == policy.data
            for holder in (source, relay):
                files = list(holder.settings.folder.glob("*/model.safetensors"))
                assert len(files) <= 3
                inodes[holder.name] |= {f.stat().st_ino for f in files}
            end_s = time.monotonic() + 60.0
            while len(list(relay.settings.folder.glob("step-*"))) > 1:  # the older one goes
                assert time.monotonic() < end_s
                await asyncio.sleep(0.02)
        assert all(len(found) <= 3 for found in inodes.values()), inodes


async def test_wrong_checksums_name_the_tensor_and_the_rest_comes_from_another(tmp_path):
    policy = Policy.make(3)
    async with holder_site(tmp_path) as site:
        source, relay = await offered(site, policy)
        path = Path((await site.fetch(relay, policy)).path, "model.safetensors")
        span = policy.image.tensors["layer.001"]
        with open(path, "r+b") as f:
            f.seek(span.start + 5)
            f.write(bytes([policy.data[span.start + 5] ^ 1]))
        other = await site.start("relay-1", "relay")
        fetched = await site.fetch(other, policy)
        assert Path(fetched.path, "model.safetensors").read_bytes() == policy.data
        assert set(fetched.bytes_from) == {"relay-0", "trainer-0.0"}
        assert "differ from their digest; they are of tensor layer.001" in site.log(other)
