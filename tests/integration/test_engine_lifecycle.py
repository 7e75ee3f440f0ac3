"""Engines lost, replaced, promoted, given up: the serving service over fake engines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from policies import tiny_model, token_of, write_policy
from serving_pool import Pool, open_pool
from tombstone import Tombstone

from torchtitan_rl_ft.host.footprint import IPC_PREFIXES, SHM
from torchtitan_rl_ft.serving.deregistration import DeregistrationFailed
from torchtitan_rl_ft.serving.engine import Engine
from torchtitan_rl_ft.serving.engine_client import EngineUnreachable
from torchtitan_rl_ft.serving.launch import Launch
from torchtitan_rl_ft.serving.pool import PoolFailed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "m")


def engine(pool: Pool, slot: int) -> Engine:
    found = pool.service.pool.slots[slot].engine
    assert found is not None
    return found


def pid(pool: Pool, slot: int) -> int:
    return engine(pool, slot).process.id.pid


def pids(pool: Pool) -> set[int]:
    return {e.process.id.pid for e in pool.service.pool.engines}


def kill(pool: Pool, slot: int) -> int:
    killed = pid(pool, slot)
    os.kill(killed, signal.SIGKILL)
    return killed


def serving(pool: Pool, version: int, n: int) -> bool:
    return len(pool.service.pool.serving(version)) == n


def duties(pool: Pool) -> list[str]:
    return [e["duty"] for e in pool.service.status()["engines"]]


# Standby --------------------------------------------------------------------------------------


@pytest.mark.row("C2")
@pytest.mark.row("D1")
async def test_a_standby_engine_takes_the_place_of_a_dead_one(tmp_path: Path, model: Path) -> None:
    async with open_pool(tmp_path, model, standby_engines=1) as pool:
        await pool.until(lambda: pool.states() == ["stale", "stale", "standby"])
        assert (await pool.publish(0)) == (1, [0, 1])
        assert (await pool.publish(1, scale=1.1)) == (2, [0, 1])  # nobody waits for the standby
        assert duties(pool) == ["active", "active", "standby"]
        for i in range(4):
            await pool.generate(f"g{i}")
        asked = {path for _, path in await pool.calls(2)}
        assert not asked & {"/generate", "/pause_generation", "/update_weights_from_disk"}

        standby = pid(pool, 2)
        kill(pool, 1)
        took = await pool.until(lambda: pool.moves(2)[-1] == "serving")
        assert took < 5.0
        assert duties(pool) == ["active", "standby", "active"]
        assert pid(pool, 2) == standby
        assert pool.moves(2) == ["standby", "stale", "installing", "serving"]
        assert {s.engine for i in range(4) for s in await pool.generate(f"h{i}")} <= {
            "engine-0",
            "engine-2",
        }
        # The refilled slot is the next standby.
        await pool.until(lambda: pool.states() == ["serving", "standby", "serving"])
        kill(pool, 0)
        await pool.until(lambda: pool.moves(1)[-1] == "serving")
        assert duties(pool) == ["standby", "active", "active"]
        assert (await pool.publish(2, scale=1.2)) == (3, [1, 2])


async def test_a_dead_standby_engine_is_replaced_and_touches_nothing_else(
    tmp_path: Path, model: Path
) -> None:
    async with open_pool(tmp_path, model, standby_engines=1) as pool:
        await pool.publish(0)
        await pool.until(lambda: pool.states()[2] == "standby")
        first = kill(pool, 2)
        await pool.until(lambda: pool.states()[2] == "retired")
        await pool.until(lambda: pool.states()[2] == "standby")
        assert pid(pool, 2) != first
        assert duties(pool) == ["active", "active", "standby"]
        assert not pool.seen("promote")
        assert all(pool.moves(i) == ["stale", "installing", "serving"] for i in (0, 1))


@pytest.mark.row("C12")
async def test_a_bad_slot_is_quarantined_when_a_standby_is_there(
    tmp_path: Path, model: Path
) -> None:
    bad = [{}, {"die_at_start": True}]
    async with open_pool(
        tmp_path, model, faults={1: bad}, standby_engines=1, engine_max_restarts=3, min_engines=2
    ) as pool:
        watch = asyncio.create_task(pool.service.run_until_failed())
        await pool.publish(0)
        await pool.until(lambda: pool.states()[2] == "standby")
        kill(pool, 1)
        await pool.until(lambda: pool.moves(2)[-1] == "serving")
        assert duties(pool) == ["active", "standby", "active"]
        await pool.until(lambda: pool.service.status()["engines"][1]["given_up"])
        # The next loss: no standby is left, the good slot is refilled, the bad one stays out.
        kill(pool, 2)
        await pool.until(lambda: not serving(pool, 1, 2))
        await pool.until(lambda: serving(pool, 1, 2))
        assert [e["subject"] for e in pool.seen("spawn")].count("engine-1") == 3
        assert not watch.done()
        watch.cancel()


@pytest.mark.row("C12")
async def test_a_slot_that_never_came_up_gives_its_place_away(tmp_path: Path, model: Path) -> None:
    dead = [{"die_at_start": True}]
    async with open_pool(
        tmp_path, model, faults={0: dead}, standby_engines=1, engine_max_restarts=2
    ) as pool:
        await pool.until(lambda: pool.service.status()["engines"][0]["given_up"])
        await pool.publish(0)
        await pool.until(lambda: serving(pool, 1, 2))
        assert duties(pool)[1:] == ["active", "active"]


# Refill ---------------------------------------------------------------------------------------


@pytest.mark.row("C3")
@pytest.mark.parametrize("refill", ["at_boundary", "before_update"])
async def test_a_replacement_joins_with_the_next_version(
    tmp_path: Path, model: Path, refill: str
) -> None:
    async with open_pool(tmp_path, model, refill_start=refill) as pool:
        await pool.publish(0)
        killed = kill(pool, 1)
        await pool.until(lambda: bool(pool.seen("exit", pid=killed)))
        if refill == "at_boundary":
            await pool.until(lambda: pool.states()[1] == "stale")
        await asyncio.sleep(0.5)
        assert len(pool.seen("spawn", subject="engine-1")) == (2 if refill == "at_boundary" else 1)
        assert pool.moves(1)[-1] in ("stale", "retired")
        # Publishing the same version again is no boundary, and waits for nobody.
        start = time.monotonic()
        if refill == "at_boundary":
            assert (await pool.publish(0)) == (1, [0])
            assert time.monotonic() - start < 2.0
        path_and_digest = await publish_beside(pool, 1)
        assert path_and_digest[0] == 2
        await pool.until(lambda: serving(pool, 2, 2))
        kinds = [
            (e["kind"], e.get("new"))
            for e in pool.events.events
            if e.get("subject") == "engine-1" and e["kind"] in ("spawn", "exit", "transition")
        ]
        after = kinds[kinds.index(("exit", None)) + 1 :]
        assert after == [
            ("spawn", None),
            ("transition", "stale"),
            ("transition", "installing"),
            ("transition", "serving"),
        ]
        order = [e["kind"] for e in pool.events.events]
        publish = len(order) - 1 - order[::-1].index("publish")
        spawn = len(order) - 1 - order[::-1].index("spawn")
        assert (spawn > publish) is (refill == "before_update")


async def publish_beside(pool: Pool, step: int) -> tuple[int, list[int]]:
    """Publish without waiting for slots that have no engine."""
    path, digest = write_policy(pool.folder.weights, pool.model, step, scale=1 + step / 10)
    return await pool.service.publish(step, token_of(step), path, digest, "first", 10.0)


@pytest.mark.row("C12")
@pytest.mark.parametrize("refill", ["at_once", "at_boundary", "before_update"])
async def test_when_all_engines_die_all_are_replaced_at_once(
    tmp_path: Path, model: Path, refill: str
) -> None:
    async with open_pool(tmp_path, model, refill_start=refill) as pool:
        await pool.publish(0)
        before = {kill(pool, slot) for slot in (0, 1)}
        waiting = [asyncio.create_task(pool.generate(f"g{i}")) for i in range(8)]
        n = 2 if refill == "at_once" else 1  # the other waits for the next version
        await pool.until(lambda: serving(pool, 1, n) and not before & pids(pool))
        samples = [s for g in await asyncio.gather(*waiting) for s in g]
        assert len(samples) == 16
        assert {v for s in samples for v in s.versions} == {1}
        await publish_beside(pool, 1)
        await pool.until(lambda: serving(pool, 2, 2))


@pytest.mark.row("C12")
@pytest.mark.scenario("Z-3")
async def test_replacements_that_always_fail_leave_the_survivors_working(
    tmp_path: Path, model: Path
) -> None:
    bad = [{}, {"die_at_start": True}]
    async with open_pool(
        tmp_path, model, faults={0: bad, 1: bad}, engine_max_restarts=3, min_engines=1
    ) as pool:
        watch = asyncio.create_task(pool.service.run_until_failed())
        await pool.publish(0)
        kill(pool, 1)
        for step in range(1, 6):
            assert (await publish_beside(pool, step))[1] == [0]
            assert {s.engine for s in await pool.generate(f"s{step}")} == {"engine-0"}
            await asyncio.sleep(0.2)
        await pool.until(lambda: pool.service.status()["engines"][1]["given_up"])
        delays = [e["delay_s"] for e in pool.seen("restart", subject="engine-1")]
        assert delays == [0.0, 0.5]
        assert not watch.done()
        kill(pool, 0)
        with pytest.raises(PoolFailed) as failure:
            async with asyncio.timeout(15):
                await watch
        text = str(failure.value)
        assert "0 of 2 engines are left, rollout.min_engines is 1" in text
        assert "logs/engine-0/attempt_3.log" in text
        assert "cannot start from" in text


@pytest.mark.row("C4")
async def test_only_empty_slots_are_refilled(tmp_path: Path, model: Path) -> None:
    async with open_pool(tmp_path, model, engines=4) as pool:
        await pool.publish(0)
        before = [(pid(pool, i), engine(pool, i).client.url) for i in range(4)]
        for victims in ([2], [1, 3]):
            killed = [kill(pool, v) for v in victims]
            await pool.until(lambda k=killed: all(pool.seen("exit", pid=p) for p in k))
            await pool.until(lambda: serving(pool, 1, 4))
            after = [(pid(pool, i), engine(pool, i).client.url) for i in range(4)]
            for i in range(4):
                assert (after[i] == before[i]) is (i not in victims)
            assert len({url for _, url in after}) == 4
            before = after


# The retired engine ---------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def traffic(pool: Pool) -> AsyncIterator[list]:
    """Groups from eight callers without a pause."""
    samples: list = []
    stop = asyncio.Event()

    async def ask(caller: int) -> None:
        count = 0
        while not stop.is_set():
            count += 1
            samples.extend(await pool.generate(f"c{caller}-{count}"))

    asking = [asyncio.create_task(ask(i)) for i in range(8)]
    try:
        yield samples
    finally:
        stop.set()
        await asyncio.gather(*asking)


@pytest.mark.row("C1")
@pytest.mark.row("C2")
@pytest.mark.scenario("Z-3")
async def test_nothing_is_sent_to_the_address_of_a_retired_engine(
    tmp_path: Path, model: Path
) -> None:
    async with open_pool(
        tmp_path,
        model,
        standby_engines=1,
        health_check_first_wait=0.0,
        health_check_interval=0.3,
        health_check_timeout=2.0,
    ) as pool:
        await pool.publish(0)
        await pool.until(lambda: pool.states()[2] == "standby")
        async with traffic(pool) as samples:
            await asyncio.sleep(0.2)
            url, killed = engine(pool, 1).client.url, kill(pool, 1)
            await pool.until(lambda: bool(pool.seen("exit", pid=killed)))
            tombstone = Tombstone(url)
            for step in (1, 2):
                await publish_beside(pool, step)
                await asyncio.sleep(0.5)
            await pool.until(lambda: pool.states()[1] == "standby")
            kill(pool, 0)
            await pool.until(lambda: serving(pool, 3, 2))
        tombstone.close()
        assert tombstone.visits == []
        assert {v for s in samples for v in s.versions} == {1, 2, 3}


@pytest.mark.scenario("Z-3")
async def test_a_new_engine_at_the_address_of_a_dead_one_is_another(
    tmp_path: Path, model: Path
) -> None:
    """It gets traffic, and nothing of the dead one's is counted for it."""
    start = [{"token_s": 0.05}]
    async with open_pool(tmp_path, model, faults={0: start, 1: start}) as pool:
        await pool.publish(0)
        old = engine(pool, 1)
        port, prepare = old.client.url.rsplit(":", 1)[1], pool.launcher.prepare

        def at_the_same_address(slot: int) -> Launch:
            launch = prepare(slot)
            nodes = [
                [f"--port={port}" if a.startswith("--port=") else a for a in node]
                for node in launch.nodes
            ]
            return replace(launch, nodes=tuple(nodes), url=old.client.url)

        pool.launcher.prepare = at_the_same_address
        asking = [asyncio.create_task(pool.generate(f"g{i}", n=1)) for i in range(10)]
        await asyncio.sleep(0.15)
        assert old.in_flight == 5
        kill(pool, 1)
        samples = [s for group in await asyncio.gather(*asking) for s in group]
        assert [len(s.output_ids) for s in samples] == [8] * 10
        await pool.until(lambda: pool.moves(1)[-1] == "serving")
        new = engine(pool, 1)
        assert new is not old
        assert new.client.url == old.client.url
        assert (old.in_flight, new.in_flight, new.state) == (0, 0, "serving")
        groups = await asyncio.gather(*(pool.generate(f"h{i}") for i in range(4)))
        assert {s.engine for g in groups for s in g} == {"engine-0", "engine-1"}
        assert new.in_flight == 0


@pytest.mark.scenario("Z-3")
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_of_a_retired_engine_is_not_used(
    tmp_path: Path, model: Path, stream: bool
) -> None:
    start = [{"token_s": 0.05}]
    async with open_pool(tmp_path, model, engines=1, faults={0: start}) as pool:
        await pool.publish(0)
        client = engine(pool, 0).client
        sampling = {"max_new_tokens": 16, "ignore_eos": True}
        body = {"input_ids": [3, 4], "sampling_params": sampling, "stream": stream}
        body |= {"return_logprob": True, "rid": "late"}
        taken: list[Any] = []
        asked = asyncio.create_task(client.generate(body, taken.append, 5.0))
        await asyncio.sleep(0.6 if stream else 0.1)
        client.fence()
        before = len(taken)
        assert (before > 0) is stream
        with pytest.raises(EngineUnreachable, match="this engine is retired"):
            await asked
        assert len(taken) == before
        with pytest.raises(EngineUnreachable, match="this engine is retired"):
            await client.model_info(1.0)


@pytest.mark.row("B7")
@pytest.mark.row("C1")
@pytest.mark.row("C6")
async def test_an_engine_is_deregistered_before_it_is_killed_and_until_it_is(
    tmp_path: Path, model: Path
) -> None:
    """Also one that dies before it is up; and a router that answers an error is asked again."""
    seen: list[tuple[str, str, bool]] = []
    refuse = 1

    async def forget(old: Engine) -> None:
        nonlocal refuse
        seen.append((old.name, old.client.url, old.process.id.alive()))
        if refuse:
            refuse -= 1
            raise DeregistrationFailed("the router answered 500")

    async with open_pool(tmp_path, model, engines=2) as pool:
        await pool.publish(0)
        pool.service.pool.on_deregister(forget)
        old = engine(pool, 1)
        stop_and_lose_worker(old)
        await pool.until(lambda: bool(seen))
        assert seen[0] == ("engine-1", old.client.url, True)
        await pool.until(lambda: len(seen) == 2, 5)
        assert seen[1][:2] == seen[0][:2]
        assert "still registered" in pool.seen("warn", subject="engine-1")[0]["cause"]
        await pool.until(lambda: serving(pool, 1, 2))
        assert len(seen) == 2
    # All are deregistered at the end as well, also those that are not up yet.
    seen.clear()
    async with open_pool(tmp_path / "b", model, engines=1) as pool:
        pool.service.pool.on_deregister(forget)
        await pool.until(lambda: pool.states() == ["starting"])
        url = engine(pool, 0).client.url
    assert [s[:2] for s in seen] == [("engine-0", url)]


def stop_and_lose_worker(old: Engine) -> None:
    """Its main process is there and cannot answer, or end by itself."""
    os.kill(old.process.id.pid, signal.SIGSTOP)
    for worker in old.process.members - {old.process.id}:
        os.kill(worker.pid, signal.SIGKILL)


# Nothing grows --------------------------------------------------------------------------------


def shared_memory() -> set[str]:
    return {p.name for p in SHM.iterdir() if p.name.startswith(IPC_PREFIXES)}


@pytest.mark.row("C5")
@pytest.mark.scenario("Z-1")
@pytest.mark.timeout(120)
async def test_thirty_kills_leave_nothing_behind(tmp_path: Path, model: Path) -> None:
    start = [{"orphan": True}]
    me = psutil.Process()
    async with open_pool(
        tmp_path, model, engines=1, faults={0: start}, engine_restart_window_s=0.2
    ) as pool:
        await pool.publish(0)
        await pool.generate("warm")
        before = (me.num_fds(), me.num_threads(), shared_memory())
        trees: set[int] = set()
        for cycle in range(30):
            old = engine(pool, 0)
            trees |= {m.pid for m in old.process.members}
            if cycle % 3:
                os.kill(old.process.id.pid, signal.SIGKILL)
            else:
                stop_and_lose_worker(old)
            await pool.until(lambda o=old: pool.service.pool.slots[0].engine not in (o, None))
            await pool.until(lambda: serving(pool, 1, 1))
        await pool.generate("after")
        assert len(trees) == 60
        assert not living(trees)
        # A few come with the event loop's thread pool; a leak would give one for each cycle.
        assert me.num_fds() <= before[0] + 8
        assert me.num_threads() <= before[1] + 8
        assert shared_memory() == before[2]
        assert len(list((tmp_path / "serving").glob("engine-*"))) == 1


def living(pids: set[int]) -> set[int]:
    found = set()
    for number in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(number).status() != psutil.STATUS_ZOMBIE:
                found.add(number)
    return found


async def test_an_end_that_is_asked_for_twice_is_carried_out(tmp_path: Path, model: Path) -> None:
    """A repeated detach, or SIGTERM after it: the second call breaks nothing off."""
    async with open_pool(tmp_path, model) as pool:
        await pool.publish(0)
        engines = [psutil.Process(e["pid"]) for e in pool.service.status()["engines"]]
        closing = [asyncio.create_task(pool.service.close()) for _ in range(3)]
        await asyncio.sleep(0.01)
        closing.pop().cancel()  # its caller has gone
        await asyncio.gather(*closing, pool.service.close())
        assert len(pool.seen("exit", phase="stop")) == 2
        assert not any(e.is_running() and e.status() != psutil.STATUS_ZOMBIE for e in engines)


async def test_an_end_that_is_wanted_is_no_failure(tmp_path: Path, model: Path) -> None:
    """The gateway, and a frozen group that is still being read, are cancelled by the end."""
    async with open_pool(tmp_path, model, engines=1) as pool:
        reading = asyncio.create_task(asyncio.sleep(60))
        pool.service._frozen.append(reading)
        running = asyncio.create_task(pool.service.run_until_failed())
        await asyncio.sleep(0.1)
        await pool.service.close()
        await asyncio.sleep(0.1)
        assert reading.cancelled() and not running.done()
        running.cancel()
