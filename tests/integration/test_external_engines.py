"""Engines that somebody else owns: the test does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from policies import tiny_model, token_of, write_policy
from serving_pool import FAKE, Pool, open_pool

from torchtitan_rl_ft.host.ports import HOST, free_ports
from torchtitan_rl_ft.serving.engine_records import EngineRecords
from torchtitan_rl_ft.serving.pool import PoolFailed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "m")


class Owner:
    """Starts and ends one engine, at one address."""

    def __init__(self, model: Path) -> None:
        self._model, self._port = model, free_ports(1)[0]
        self.url = f"http://{HOST}:{self._port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        argv = [sys.executable, str(FAKE), "--model-path", str(self._model)]
        self.process = subprocess.Popen([*argv, "--port", str(self._port)], start_new_session=True)

    async def until_up(self) -> None:
        async with aiohttp.ClientSession() as http:
            for _ in range(1500):
                with contextlib.suppress(aiohttp.ClientError):
                    async with http.get(self.url + "/health"):
                        return
                await asyncio.sleep(0.02)
        raise AssertionError(f"{self.url} does not come up")

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None


@pytest.fixture
def owners(model: Path) -> Iterator[list[Owner]]:
    made = [Owner(model), Owner(model)]
    yield made
    for owner in made:
        owner.kill()


FAST = {
    "engines": 0,
    "health_check_first_wait": 0.0,
    "health_check_interval": 0.5,
    "health_check_timeout": 1.5,
}


def serving(pool: Pool, version: int) -> list[str]:
    return sorted(e.name for e in pool.service.pool.serving(version))


@pytest.mark.row("A1")
@pytest.mark.scenario("Z-3")
async def test_externals_serve_die_and_come_back_and_nothing_of_theirs_is_touched(
    tmp_path: Path, model: Path, owners: list[Owner]
) -> None:
    for owner in owners:
        owner.start()
    urls = [o.url + "/" for o in owners]
    async with open_pool(tmp_path, model, external_urls=urls, **FAST) as pool:
        assert await pool.publish(0) == (1, [0, 1])
        assert {s["duty"] for s in pool.service.status()["engines"]} == {"external"}
        groups = [asyncio.create_task(pool.generate(f"g{i}")) for i in range(8)]
        owners[0].kill()
        await asyncio.gather(*groups)
        await pool.until(lambda: "retired" in pool.moves_of("external-0"))
        await pool.until(lambda: bool(pool.seen("fault", duty="external")))
        shown = pool.service.status()["engines"][0]
        assert (shown["state"], shown["pid"], shown["url"]) == ("retired", None, owners[0].url)
        [lost] = pool.seen("fault", duty="external")
        assert "looked for again, at last every 0.5 s (health_check_interval)" in lost["cause"]
        path, digest = write_policy(pool.folder.weights, model, 1, scale=1.1)
        await pool.service.publish(1, token_of(1), path, digest, "first", 10.0)
        await pool.until(lambda: serving(pool, 2) == ["external-1"])
        # Back on the same address, with the weights that it was started with.
        owners[0].start()
        await pool.until(lambda: serving(pool, 2) == ["external-0", "external-1"])
        moves = pool.moves_of("external-0")
        assert moves[moves.index("retired") :] == ["retired", "stale", "installing", "serving"]
        groups = await asyncio.gather(*(pool.generate(f"h{i}") for i in range(8)))
        samples = [s for group in groups for s in group]
        assert {s.engine for s in samples} == {"external-0", "external-1"}
        assert {s.min_version for s in samples} == {2}
        assert not pool.seen("spawn")
        assert not pool.seen("exit")
        assert not list(EngineRecords(tmp_path / "serving" / "engines.json").read())
    assert all(o.alive for o in owners)


async def test_an_engine_restarted_between_two_looks_does_not_serve_its_own_weights(
    tmp_path: Path, model: Path, owners: list[Owner]
) -> None:
    owners[0].start()
    slow = {**FAST, "health_check_interval": 60.0}
    async with open_pool(tmp_path, model, external_urls=[owners[0].url], **slow) as pool:
        await pool.publish(0)
        owners[0].kill()
        owners[0].start()
        samples = await pool.generate(timeout_s=30.0)
        assert {s.min_version for s in samples} == {1}
        assert "retired" in pool.moves_of("external-0")


async def test_externals_are_left_running_and_unpaused(
    tmp_path: Path, model: Path, owners: list[Owner]
) -> None:
    owners[0].start()
    async with open_pool(tmp_path, model, external_urls=[owners[0].url], **FAST) as pool:
        await pool.publish(0)
        await pool.fault(0, freeze_at="sync")
        publishing = asyncio.create_task(pool.publish(1, scale=1.1))
        await pool.until(lambda: pool.states() == ["installing"])
        await asyncio.sleep(0.2)
        assert "/update_weights_from_disk" in [path for _, path in await pool.calls(0)]
        http = pool.http
        await pool.service.close()
        publishing.cancel()
        async with http.get(owners[0].url + "/calls") as r:
            paths = [path for _, path in await r.json() if path != "/calls"]
        assert paths[-1] == "/continue_generation"
    assert owners[0].alive


@pytest.mark.row("C12")
async def test_an_address_that_never_answers_ends_the_pool_when_the_floor_needs_it(
    tmp_path: Path, model: Path, owners: list[Owner]
) -> None:
    owners[0].start()
    await owners[0].until_up()
    limits = {**FAST, "engine_start_timeout_s": 1.5}
    urls = [o.url for o in owners]
    async with open_pool(tmp_path, model, external_urls=urls, **limits) as pool:
        watch = asyncio.create_task(pool.service.run_until_failed())
        await pool.until(lambda: pool.service.status()["engines"][1]["given_up"])
        assert await pool.publish(0) == (1, [0])
        assert not watch.done()
        owners[1].start()
        await pool.until(lambda: serving(pool, 1) == ["external-0", "external-1"])
        owners[0].kill()
        owners[1].kill()
        began = time.monotonic()
        with pytest.raises(PoolFailed) as failure:
            async with asyncio.timeout(20):
                await watch
        assert time.monotonic() - began > 1.0
        assert "0 of 2 engines are left, rollout.min_engines is 1: external-" in str(failure.value)
        assert "rollout.external_urls) did not answer; 1.5 s are over" in str(failure.value)


async def test_externals_beside_engines_of_ours(
    tmp_path: Path, model: Path, owners: list[Owner]
) -> None:
    owners[0].start()
    mixed = {**FAST, "engines": 1, "min_engines": 2}
    async with open_pool(tmp_path, model, external_urls=[owners[0].url], **mixed) as pool:
        assert await pool.publish(0) == (1, [0, 1])
        assert len(pool.seen("spawn")) == 1
    assert owners[0].alive


async def test_a_server_that_is_no_engine_ends_the_pool_with_the_reason(
    tmp_path: Path, model: Path
) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({}, status=200 if request.path == "/model_info" else 404)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    port = free_ports(1)[0]
    await web.TCPSite(runner, HOST, port).start()
    limits = {**FAST, "engine_start_timeout_s": 1.0}
    urls = [f"http://{HOST}:{port}"]
    try:
        async with open_pool(tmp_path, model, external_urls=urls, **limits) as pool:
            path, digest = write_policy(pool.folder.weights, model, 0)
            await pool.service.publish(0, token_of(0), path, digest, "none", 1.0)
            with pytest.raises(PoolFailed, match=r"does not serve: version 1 not installed: .*404"):
                async with asyncio.timeout(20):
                    await pool.service.run_until_failed()
    finally:
        await runner.cleanup()
