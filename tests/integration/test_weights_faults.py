"""Policy versions and their weights over fake engines: what is damaged, late, half done or a lie
never serves, and never holds up the others."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer
from policies import tiny_model, token_of, write_policy
from safetensors.numpy import load_file
from serving_pool import Pool, open_pool

from torchtitan_rl_ft.chaos import faults
from torchtitan_rl_ft.rpc.server import make_app
from torchtitan_rl_ft.run_folder import ProcessId, RunFolder
from torchtitan_rl_ft.serving import updates
from torchtitan_rl_ft.serving.ownership import NotOwner
from torchtitan_rl_ft.serving.releases import PublishLate, PublishRefused, Releases
from torchtitan_rl_ft.serving.routes import Routes
from torchtitan_rl_ft.weights.manifest import Manifest

MANY_STARTS = {"engine_max_restarts": 30}
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "m")


def serving(pool: Pool, version: int, n: int = 2) -> bool:
    return len(pool.service.pool.serving(version)) == n


def life(pool: Pool, slot: int) -> ProcessId:
    engine = pool.service.pool.slots[slot].engine
    assert engine is not None
    return engine.process.id


async def paths(pool: Pool, slot: int) -> list[str]:
    return [path for _, path in await pool.calls(slot)]


async def updates_of(pool: Pool, slot: int) -> int:
    return (await paths(pool, slot)).count("/update_weights_from_disk")


def flip_a_byte(file: Path) -> None:
    """The last one of the file, which belongs to the tensor that is last in it."""
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def last_tensor(file: Path) -> str:
    """safetensors puts tensors of one dtype in the order of their names."""
    return max(load_file(file))


# An update of one engine goes wrong -------------------------------------------------------------


@pytest.mark.row("D4")
@pytest.mark.row("D10")
@pytest.mark.scenario("W-1")
@pytest.mark.parametrize("fault", [{"die_at": "sync"}, {"sync_status": 500}])
async def test_the_others_wait_for_no_limit_when_one_is_lost(
    tmp_path: Path, model: Path, fault: dict
) -> None:
    """Three times in a row, with a limit that nobody could wait for."""
    async with open_pool(tmp_path, model, engines=3, install_timeout_s=60.0, **MANY_STARTS) as pool:
        await pool.publish(0)
        for step in (1, 2, 3):
            await pool.fault(1, **fault)
            start = time.monotonic()
            path, digest = write_policy(pool.folder.weights, model, step, scale=1 + step / 10)
            publishing = asyncio.create_task(
                pool.service.publish(step, token_of(step), path, digest, "all", 30.0)
            )
            await pool.until(lambda v=step + 1: {0, 2} <= slots_at(pool, v))
            assert time.monotonic() - start < 5.0
            version, installed = await publishing
            assert version == step + 1 and {0, 2} <= set(installed)
            assert (await pool.generate())[0].versions == [version] * 8
            await pool.until(lambda v=version: serving(pool, v, 3))
        if "sync_status" in fault:
            assert "Internal Server Error" in pool.seen("fault", subject="engine-1")[0]["cause"]


def slots_at(pool: Pool, version: int) -> set[int]:
    return {e.slot for e in pool.service.pool.serving(version)}


@pytest.mark.row("D4")
@pytest.mark.scenario("W-1")
async def test_an_engine_that_hangs_in_an_update_is_replaced_after_its_limit(
    tmp_path: Path, model: Path
) -> None:
    limit_s = 1.0
    async with open_pool(
        tmp_path, model, engines=3, install_timeout_s=limit_s, **MANY_STARTS
    ) as pool:
        await pool.publish(0)
        for step in (1, 2, 3):
            stopped = life(pool, 1)
            faults.stop(stopped)
            start = time.monotonic()
            version, installed = await pool.publish(step, scale=1 + step / 10, deadline_s=10.0)
            assert time.monotonic() - start < limit_s * 2 + 5.0
            assert {0, 2} <= set(installed)
            await pool.until(lambda v=version: serving(pool, v, 3))
            assert not stopped.alive() and life(pool, 1) != stopped


@pytest.mark.row("D9")
async def test_a_tensor_that_was_not_sent_is_named(tmp_path: Path, model: Path) -> None:
    async with open_pool(tmp_path, model, **MANY_STARTS) as pool:
        await pool.publish(0)
        await pool.fault(1, skip_tensor=NORM)
        _, installed = await pool.publish(1, scale=1.1, wait="first")
        await pool.until(lambda: bool(pool.seen("fault", subject="engine-1")))
        cause = pool.seen("fault", subject="engine-1")[0]["cause"]
        assert "not installed: 1 of " in cause
        assert f" parameters differ; {NORM}: the engine shows " in cause
        await pool.until(lambda: serving(pool, 2))


@pytest.mark.scenario("V-3")
@pytest.mark.parametrize("mode", ["retract", "abort"])
async def test_a_prefix_cache_of_old_weights_is_emptied_and_that_is_confirmed(
    tmp_path: Path, model: Path, mode: str
) -> None:
    async with open_pool(
        tmp_path / "a", model, engines=1, faults={0: [{"no_flush": True}]}, pause_mode=mode
    ) as pool:
        seeds = [5, 6]
        await pool.publish(0)
        old = [s.output_ids for s in await pool.generate(seeds=seeds)]
        await pool.publish(1, scale=1.5)
        new = [s.output_ids for s in await pool.generate(seeds=seeds)]
        calls = await paths(pool, 0)
        load = max(i for i, p in enumerate(calls) if p == "/update_weights_from_disk")
        flush = max(i for i, p in enumerate(calls) if p == "/flush_cache")
        go = max(i for i, p in enumerate(calls) if p == "/continue_generation")
        assert load < flush < go
    async with open_pool(tmp_path / "b", model, engines=1) as pool:
        await pool.publish(1, scale=1.5)
        fresh = [s.output_ids for s in await pool.generate(seeds=seeds)]
    assert new == fresh != old


@pytest.mark.scenario("V-3")
async def test_an_engine_that_cannot_empty_its_cache_does_not_serve(
    tmp_path: Path, model: Path
) -> None:
    async with open_pool(tmp_path, model, **MANY_STARTS) as pool:
        await pool.publish(0)
        first = life(pool, 1)
        await pool.fault(1, flush_status=400)
        assert (await pool.publish(1, scale=1.1, wait="first"))[1] == [0]
        await pool.until(lambda: serving(pool, 2))
        assert life(pool, 1) != first
        assert "Flush cache failed" in pool.seen("fault", subject="engine-1")[0]["cause"]


@pytest.mark.row("D9")
async def test_without_a_prefix_cache_nothing_is_flushed(tmp_path: Path, model: Path) -> None:
    async with open_pool(tmp_path, model, engines=1, pause_mode="in_place") as pool:
        await pool.publish(0)
        await pool.publish(1, scale=1.1)
        assert "/flush_cache" not in await paths(pool, 0)


# The release itself is wrong --------------------------------------------------------------------


@pytest.mark.row("D10")
async def test_a_flipped_byte_is_refused_and_engines_keep_what_they_hold(
    tmp_path: Path, model: Path
) -> None:
    async with open_pool(tmp_path, model) as pool:
        await pool.publish(0)
        before = [life(pool, slot) for slot in (0, 1)]
        path, digest = write_policy(pool.folder.weights, model, 1, scale=1.1)
        weights = path / "model.safetensors"
        flip_a_byte(weights)
        with pytest.raises(PublishRefused, match=f"tensor {last_tensor(weights)} differs from its"):
            await pool.service.publish(1, token_of(1), path, digest, "all", 10.0)
        assert serving(pool, 1)
        assert [life(pool, slot) for slot in (0, 1)] == before
        assert (await pool.generate())[0].versions == [1] * 8
        # Written again, it is published; the number of the refused one was never given out.
        assert await pool.publish(1, scale=1.1) == (2, [0, 1])


@pytest.mark.row("D10")
async def test_damage_after_the_announcement_costs_no_engine(tmp_path: Path, model: Path) -> None:
    """A newcomer cannot take the version, and waits for another one; who has it serves on."""
    async with open_pool(tmp_path, model) as pool:
        await pool.publish(0)
        weights = pool.folder.weights / f"step-0-{token_of(0)[-8:]}" / "model.safetensors"
        flip_a_byte(weights)
        faults.kill(life(pool, 1))
        await pool.until(lambda: bool(pool.seen("fault", subject="engine-1", version=1)))
        cause = pool.seen("fault", subject="engine-1", version=1)[0]["cause"]
        assert cause.startswith("version 1 is damaged: ")
        assert f"tensor {last_tensor(weights)} differs from its sha256" in cause
        newcomer = life(pool, 1)
        assert "/update_weights_from_disk" not in await paths(pool, 1)  # pulled, not installed
        assert {s.engine for s in await pool.generate()} == {"engine-0"}
        await asyncio.sleep(0.5)
        assert len(pool.seen("fault", subject="engine-1", version=1)) == 1
        assert await pool.publish(1, scale=1.1) == (2, [0, 1])
        assert life(pool, 1) == newcomer


@pytest.mark.row("D10")
async def test_a_damaged_version_that_nobody_holds_is_asked_for_again(
    tmp_path: Path, model: Path
) -> None:
    """No later version would ever come: its trainer waits for samples of this one."""
    async with (
        open_pool(tmp_path, model, engines=1) as pool,
        TestClient(TestServer(make_app("t", Routes(pool.service, lambda: None).table()))) as http,
    ):

        async def awaited() -> dict[str, Any]:
            headers = {"Authorization": "Bearer t"}
            async with http.get("/v1/version?after=0&timeout_s=0.1", headers=headers) as r:
                return await r.json()

        await pool.publish(0)
        assert (await awaited())["serving"] == 1
        weights = pool.folder.weights / f"step-0-{token_of(0)[-8:]}" / "model.safetensors"
        with patch.object(updates, "DAMAGED_RECHECK_S", 0.1):
            flip_a_byte(weights)
            faults.kill(life(pool, 0))
            await pool.until(lambda: pool.service.pool.damaged == 1)
            await asyncio.sleep(0.5)
        assert len(pool.seen("fault", version=1)) == 1  # told once
        found = await awaited()
        assert found["awaits_publish"] == "damaged version 1" and found["serving"] == 0
        path, digest = write_policy(pool.folder.weights, model, 0)
        again = (0, token_of(0), path, digest, "all", 20.0)
        assert await pool.service.publish(*again) == (2, [0])
        assert pool.service.pool.damaged is None and "awaits_publish" not in await awaited()
        assert await pool.service.publish(*again) == (2, [0])


@pytest.mark.row("D10")
async def test_damage_that_left_no_trace_is_told_from_a_bad_engine(
    tmp_path: Path, model: Path
) -> None:
    """The engine loaded it and showed other checksums: the bytes are looked at before it is
    blamed."""
    async with open_pool(tmp_path, model) as pool:
        await pool.publish(0)
        folder = pool.folder.weights / f"step-0-{token_of(0)[-8:]}"
        weights = folder / "model.safetensors"
        times = os.stat(weights)
        flip_a_byte(weights)
        os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
        faults.kill(life(pool, 1))
        await pool.until(lambda: bool(pool.seen("fault", subject="engine-1", version=1)))
        assert "/update_weights_from_disk" in await paths(pool, 1)
        assert "is damaged" in pool.seen("fault", subject="engine-1", version=1)[0]["cause"]
        newcomer = life(pool, 1)
        assert await pool.publish(1, scale=1.1) == (2, [0, 1])
        assert life(pool, 1) == newcomer


@pytest.mark.row("D10")
async def test_a_version_repaired_in_place_is_taken(tmp_path: Path, model: Path) -> None:
    async with open_pool(tmp_path, model) as pool:
        await pool.publish(0)
        weights = pool.folder.weights / f"step-0-{token_of(0)[-8:]}" / "model.safetensors"
        whole = weights.read_bytes()
        weights.unlink()
        with patch.object(updates, "DAMAGED_RECHECK_S", 0.2):
            faults.kill(life(pool, 1))
            await pool.until(lambda: bool(pool.seen("fault", subject="engine-1", version=1)))
            assert "model.safetensors is gone" in pool.seen("fault", version=1)[0]["cause"]
            weights.write_bytes(whole)
            await pool.until(lambda: serving(pool, 1))


@pytest.mark.row("D10")
async def test_a_full_version_needs_no_earlier_one(tmp_path: Path, model: Path) -> None:
    """v+2 on v: an engine that missed v+1 takes v+2; a fresh one too."""
    async with open_pool(tmp_path, model, engines=2, **MANY_STARTS) as pool:
        await pool.publish(0)
        await pool.fault(1, sync_s=1.0)
        assert (await pool.publish(1, scale=1.1, wait="first"))[1] == [0]
        # Its first update is under way, superseded: it is never asked for version 2 again.
        assert (await pool.publish(2, scale=1.2, wait="first"))[0] == 3
        await pool.fault(1, sync_s=0)
        await pool.until(lambda: serving(pool, 3))
        faults.kill(life(pool, 1))
        await pool.until(lambda: not serving(pool, 3))
        await pool.until(lambda: serving(pool, 3))
        installed = [e["version"] for e in pool.seen("install", subject="engine-1")]
        assert installed[0] == 1 and installed[-2:] == [3, 3]
        assert len(pool.seen("exit", subject="engine-1")) == 1


@pytest.mark.scenario("V-3")
async def test_infinite_weights_never_reach_an_engine(tmp_path: Path, model: Path) -> None:
    async with open_pool(tmp_path, model) as pool:
        await pool.publish(0)
        before = [await updates_of(pool, slot) for slot in (0, 1)]
        for bad in (np.inf, -np.inf, np.nan):
            change = {NORM: np.where(np.arange(64) == 63, bad, 1).astype(np.float32)}
            with pytest.raises(PublishRefused, match=f"{NORM} has NaN or infinite values"):
                await pool.publish(1, change=change)
        assert [await updates_of(pool, slot) for slot in (0, 1)] == before
        assert serving(pool, 1)


# Deadlines --------------------------------------------------------------------------------------


async def test_a_file_system_that_hangs_holds_up_no_caller(tmp_path: Path, model: Path) -> None:
    """The publish goes on meanwhile, and is found when the same state is announced again."""
    prove = Releases._prove

    def hang(self: Releases, path: Path) -> tuple[Manifest, dict]:
        time.sleep(1.5)
        return prove(self, path)

    async with open_pool(tmp_path, model) as pool:
        await pool.publish(0)
        path, digest = write_policy(pool.folder.weights, model, 1, scale=1.1)
        announce = (1, token_of(1), path, digest, "all")
        with patch.object(Releases, "_prove", hang):
            start = time.monotonic()
            with pytest.raises(PublishLate, match=r"step 1 is not announced after 0\.3 s"):
                await pool.service.publish(*announce, 0.3)
            assert time.monotonic() - start < 1.0
            assert (await pool.generate())[0].versions == [1] * 8  # nobody else was held up
            assert await pool.service.publish(*announce, 10.0) == (2, [0, 1])
        assert pool.seen("publish", version=2) and not pool.seen("publish", version=3)


@pytest.mark.row("D6")
async def test_another_job_waits_for_no_file_system_of_its_predecessor(
    tmp_path: Path, model: Path
) -> None:
    """What the former job was publishing gets no version, and no number is given out twice."""
    prove, hang = Releases._prove, threading.Event()

    def hanging(self: Releases, path: Path) -> tuple[Manifest, dict]:
        if path.parent.parent == tmp_path:
            hang.wait(20)
        return prove(self, path)

    async with open_pool(tmp_path / "a", model, engines=1) as pool:
        await pool.publish(0)
        path, digest = write_policy(tmp_path / "weights", model, 1, scale=1.1)
        with patch.object(Releases, "_prove", hanging):
            late = asyncio.create_task(
                pool.service.publish(1, token_of(1), path, digest, "none", 20.0)
            )
            await asyncio.sleep(0.1)
            pool.folder = RunFolder(tmp_path / "b")
            start = time.monotonic()
            await pool.service.move(pool.folder)
            assert (await pool.publish(1, scale=1.2)) == (2, [0])
            assert time.monotonic() - start < 5.0
            hang.set()
            with pytest.raises(PublishRefused, match="serving works for another job"):
                await late
        assert (await pool.publish(2, scale=1.3)) == (3, [0])


@pytest.mark.row("D7")
async def test_who_lost_the_session_while_its_weights_were_read_gets_no_version(
    tmp_path: Path, model: Path
) -> None:
    asked: list[str] = []

    def permit() -> None:
        asked.append("")
        raise NotOwner("not yours")

    async with open_pool(tmp_path, model, engines=1) as pool:
        await pool.publish(0)
        path, digest = write_policy(pool.folder.weights, model, 1, scale=1.1)
        with pytest.raises(NotOwner, match="not yours"):
            await pool.service.publish(1, token_of(1), path, digest, "none", 10.0, permit)
        assert asked and pool.service.version == 1 and pool.states() == ["serving"]


@pytest.mark.row("D6")
async def test_a_trainer_that_died_while_it_published_holds_its_successor_up_for_nothing(
    tmp_path: Path, model: Path
) -> None:
    """What it left: a caller that has gone, and half a folder."""
    async with open_pool(tmp_path, model) as pool:
        await pool.publish(0)
        path, digest = write_policy(pool.folder.weights, model, 1, scale=1.1)
        old = asyncio.create_task(pool.service.publish(1, token_of(1), path, digest, "all", 10.0))
        await asyncio.sleep(0)  # it has begun
        old.cancel()
        half, _ = write_policy(pool.folder.weights, model, 2, scale=1.2)
        (half / "manifest.json").unlink()
        with pytest.raises(PublishRefused, match="never completed"):
            await pool.service.publish(2, token_of(2), half, "", "none", 10.0)
        start = time.monotonic()
        version, installed = await pool.publish(2, scale=1.2)
        assert time.monotonic() - start < 5.0
        assert installed == [0, 1] and version > 1
        assert (await pool.generate())[0].versions == [version] * 8


# Which version a pool is at ---------------------------------------------------------------------


@pytest.mark.row("D3")
async def test_engines_that_disagree_are_never_asked_for_one_batch(
    tmp_path: Path, model: Path
) -> None:
    """A pool of {1, 2}, of {start weights, 2} and of an engine without a number: only those that
    proved the required version answer, until all have it."""
    async with open_pool(tmp_path, model, **MANY_STARTS) as pool:
        await pool.publish(0)
        await pool.fault(1, sync_s=1.0)
        assert await pool.publish(1, scale=1.1, wait="first") == (2, [0])
        assert [e["version"] for e in pool.service.status()["engines"]] != [2, 2]
        samples = [s for _ in range(4) for s in await pool.generate()]
        assert {(s.engine, v) for s in samples for v in s.versions} == {("engine-0", 2)}
        await pool.fault(1, sync_s=0)
        await pool.until(lambda: serving(pool, 2))  # converged

        faults.kill(life(pool, 1))
        await pool.until(lambda: pool.states()[1] in ("starting", "stale"))
        samples = [s for _ in range(4) for s in await pool.generate()]
        assert {s.engine for s in samples} == {"engine-0"}
        await pool.until(lambda: serving(pool, 2))

        await pool.fault(1, no_version=True)
        assert (await pool.publish(2, scale=1.2, wait="first"))[1] == [0]
        await pool.until(lambda: bool(pool.seen("fault", subject="engine-1", version=3)))
        cause = pool.seen("fault", subject="engine-1", version=3)[0]["cause"]
        assert "the engine reports version None, not 3" in cause
        await pool.until(lambda: serving(pool, 3))


@pytest.mark.row("D4")
async def test_an_engine_that_hangs_is_given_up_however_often_versions_come(
    tmp_path: Path, model: Path
) -> None:
    async with open_pool(tmp_path, model, install_timeout_s=1.0) as pool:
        await pool.publish(0)
        await pool.fault(1, freeze_at="sync")
        start = time.monotonic()
        step = 0
        while "retired" not in pool.moves(1):
            step += 1
            path, digest = write_policy(pool.folder.weights, model, step, scale=1 + step / 100)
            await pool.service.publish(step, token_of(step), path, digest, "none", 1.0)
            await asyncio.sleep(0.3)
            assert time.monotonic() - start < 1.0 + 5.0
        await pool.until(lambda: serving(pool, pool.service.version))
        assert len(pool.seen("exit")) == 1
