"""A real SGLang gateway in front of fake engines, and a fake one for what a real one does not do
on demand."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from policies import tiny_model, token_of, write_policy
from serving_pool import Pool, open_pool

from torchtitan_rl_ft.host.ports import HOST

FAKE = Path(__file__).parent.parent / "fakes" / "fake_gateway.py"


def fake_program(port: int, metrics_port: int) -> list[str]:
    return [sys.executable, str(FAKE), str(port)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "m")


def gateway(pool: Pool) -> dict[str, Any]:
    return pool.service.status()["gateway"]


def listed(pool: Pool) -> list[str]:
    """Names of the engines that the gateway gives requests to."""
    urls = gateway(pool)["listed"]
    return sorted(e.name for e in pool.service.pool.engines if e.client.url in urls)


async def until_listed(pool: Pool, n: int) -> None:
    await pool.until(lambda: len(listed(pool)) == n == len(gateway(pool)["listed"]))


SLOW = {0: [{"token_s": 0.05}], 1: [{"token_s": 0.05}]}


async def test_the_gateway_gives_what_the_engines_give(tmp_path: Path, model: Path) -> None:
    seeds = [[i, i + 1, i + 2] for i in range(8)]
    async with open_pool(tmp_path / "own", model) as pool:
        await pool.publish(0)
        answers = [await pool.generate(f"g{i}", n=3, seeds=seeds[i]) for i in range(8)]
        own = [[s.output_ids for s in g] for g in answers]
    async with open_pool(tmp_path / "smg", model, router="smg", faults=SLOW) as pool:
        await pool.publish(0)
        await until_listed(pool, 2)
        work = (pool.generate(f"g{i}", n=3, seeds=seeds[i]) for i in range(8))
        groups = await asyncio.gather(*work)
        assert [[s.output_ids for s in g] for g in groups] == own
        by_group = [{s.engine for s in g} for g in groups]
        assert all(len(e) == 1 for e in by_group)
        assert set.union(*by_group) == {"engine-0", "engine-1"}
        assert {s.min_version for g in groups for s in g} == {1}
        # Off the list for an install, back at once, with the new version.
        for step in range(1, 4):
            running = [asyncio.create_task(pool.generate(f"r{step}{i}")) for i in range(4)]
            await asyncio.sleep(0.1)
            version, slots = await pool.publish(step, scale=1 + step / 10)
            assert slots == [0, 1]
            assert {s.min_version for s in await pool.generate(f"n{step}")} == {version}
            await asyncio.gather(*running)
        assert all(e.in_flight == 0 for e in pool.service.pool.engines)
        assert not pool.seen("fault")
        assert gateway(pool)["restarts"] == 0


@pytest.mark.row("C1")
@pytest.mark.row("C7")
async def test_a_dead_engine_leaves_the_list_and_its_requests_go_on_elsewhere(
    tmp_path: Path, model: Path
) -> None:
    async with open_pool(tmp_path, model, router="smg", faults=SLOW) as pool:
        await pool.publish(0)
        await until_listed(pool, 2)
        groups = [asyncio.create_task(pool.generate(f"g{i}", n=4)) for i in range(16)]
        await asyncio.sleep(0.2)
        dead = pool.service.pool.slots[1].engine
        assert dead is not None
        os.kill(dead.process.id.pid, signal.SIGKILL)
        await pool.until(lambda: bool(pool.seen("exit", subject="engine-1")))
        # By the time it is buried, it is out of the list that the gateway is brought to.
        assert listed(pool) == ["engine-0"]
        await pool.until(lambda: dead.client.url not in gateway(pool)["known"])
        samples = [s for g in await asyncio.gather(*groups) for s in g]
        assert len(samples) == 64
        assert all(len(s.output_ids) == len(s.logprobs) == 8 for s in samples)
        assert pool.service.status()["continued_tokens"] > 0
        await until_listed(pool, 2)
        # Publishing does not ask the dead one for anything.
        assert (await pool.publish(1, scale=1.1))[1] == [0, 1]


@pytest.mark.row("B7")
async def test_a_gateway_that_refuses_a_removal_once_keeps_nobody_from_the_rest(
    tmp_path: Path, model: Path
) -> None:
    async with open_pool(
        tmp_path, model, router="smg", gateway_program=fake_program, faults=SLOW
    ) as pool:
        await pool.publish(0)
        await until_listed(pool, 2)
        dead = pool.service.pool.slots[1].engine
        assert dead is not None
        async with pool.http.post(gateway(pool)["url"] + "/fault", json={"delete_status": 500}):
            pass
        groups = [asyncio.create_task(pool.generate(f"g{i}", n=4)) for i in range(8)]
        await asyncio.sleep(0.2)
        os.kill(dead.process.id.pid, signal.SIGKILL)
        await asyncio.gather(*groups)
        await pool.until(lambda: dead.client.url not in gateway(pool)["known"])
        [warning] = [w for w in pool.seen("warn") if "still registered" in w["cause"]]
        assert "status 500" in warning["cause"]
        await until_listed(pool, 2)


@pytest.mark.row("C12")
@pytest.mark.row("F2")
async def test_a_killed_gateway_is_replaced_and_requests_go_on(tmp_path: Path, model: Path) -> None:
    async with open_pool(tmp_path, model, router="smg", faults=SLOW) as pool:
        await pool.publish(0)
        await until_listed(pool, 2)
        first = gateway(pool)
        decoys = await start_decoys(int(first["url"].rpartition(":")[2]))
        engines = [e.process.id for e in pool.service.pool.engines]
        groups = [asyncio.create_task(pool.generate(f"g{i}")) for i in range(8)]
        await asyncio.sleep(0.2)
        killed = time.monotonic()
        os.kill(first["pid"], signal.SIGKILL)
        await pool.until(lambda: gateway(pool)["pid"] not in (None, first["pid"]))
        await until_listed(pool, 2)
        assert time.monotonic() - killed < 5.0
        samples = [s for g in await asyncio.gather(*groups) for s in g]
        assert all(len(s.output_ids) == 8 for s in samples)
        await pool.generate("after")
        assert [e.process.id for e in pool.service.pool.engines] == engines
        assert pool.states() == ["serving", "serving"]
        assert "suspect" not in pool.moves(0) + pool.moves(1)
        [ended] = pool.seen("exit", subject="gateway")
        assert "killed by SIGKILL" in ended["cause"]
        for calls, runner in decoys:
            assert calls == []
            await runner.cleanup()


async def start_decoys(port: int) -> list[tuple[list[str], web.AppRunner]]:
    """Listeners beside the gateway's port, where they are free, that look like gateways."""
    found = []
    for near in (port - 2, port - 1, port + 1, port + 2):
        calls: list[str] = []

        async def answer(request: web.Request, calls: list[str] = calls) -> web.Response:
            calls.append(request.path)
            return web.json_response({"workers": []})

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, HOST, near).start()
        except OSError:
            await runner.cleanup()
            continue
        found.append((calls, runner))
    assert found
    return found


async def test_an_engine_that_falls_back_behind_the_gateway_is_not_believed(
    tmp_path: Path, model: Path
) -> None:
    """Switched between registration and answer: what it says has an older version."""
    async with open_pool(tmp_path, model, router="smg", engines=1) as pool:
        await pool.publish(0)
        await pool.publish(1, scale=1.1)
        path, _ = write_policy(pool.folder.weights, model, 0)
        engine = pool.service.pool.slots[0].engine
        assert engine is not None
        await engine.client.load(str(path), 1, True, 5.0)
        with pytest.raises(Exception, match="weight version 1 of before 2"):
            await pool.generate(timeout_s=3.0)
        assert token_of(1) == (await pool.service.wait_version(0, 0.0))["token"]
