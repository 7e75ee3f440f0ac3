"""Places of engines lent to trainers, over fake engines."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from conftest import ServingRole, end_sessions, fake_engine_program, start_serving
from policies import tiny_model
from serving_pool import Pool, open_pool

from torchtitan_rl_ft.rpc.client import RoleRefused
from torchtitan_rl_ft.serving.lending import NotLent

pytestmark = pytest.mark.timeout(90)

LONG = {"max_new_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "m")


def in_flight(pool: Pool, slot: int) -> int:
    engine = pool.service.pool.slots[slot].engine
    return engine.in_flight if engine is not None else 0


async def test_requests_of_a_lent_engine_go_on_with_every_token(
    tmp_path: Path, model: Path
) -> None:
    slow = [{"token_s": 0.01}]
    async with open_pool(
        tmp_path, model, faults={0: slow, 1: slow}, stream_interval_tokens=150
    ) as pool:
        await pool.publish(0)
        seeds = [[10 * g + i for i in range(2)] for g in range(4)]
        whole = [await pool.generate(f"w{g}", seeds=seeds[g], sampling=LONG) for g in range(1)]
        asked = [
            asyncio.create_task(pool.generate(f"r{g}", seeds=seeds[g], sampling=LONG))
            for g in range(4)
        ]
        async with asyncio.timeout(20):
            while not in_flight(pool, 0) == in_flight(pool, 1) == 4:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)  # the first token is told, the others only by the abort
        lending = pool.service.lending
        assert await lending.lend("job", "trainer-0", 10.0) == 1
        engine = pool.service.status()["engines"][1]
        assert engine["pid"] is None and engine["lent"] == "trainer-0"
        assert "lent to trainer-0" in engine["reason"]
        assert pool.moves(1)[-2:] == ["draining", "retired"]
        done = [await task for task in asked]
        assert [s.output_ids for s in done[0]] == [s.output_ids for s in whole[0]]
        assert all(len(s.output_ids) == 200 for samples in done for s in samples)
        status = pool.service.status()
        assert status["wasted_tokens"] == 0 and status["continued_tokens"] > 8
        # A repeated request is granted the same; no other place can be spared.
        assert await lending.lend("job", "trainer-0", 10.0) == 1
        with pytest.raises(NotLent, match="no engine of this pool has a place"):
            await lending.lend("job", "trainer-1", 10.0, devices=2)
        with pytest.raises(NotLent, match=r"1 engines are up, and rollout.min_engines is 1"):
            await lending.lend("job", "trainer-1", 10.0)
        assert not pool.seen("fault") and not pool.seen("restart")


async def test_a_returned_place_serves_the_current_version(tmp_path: Path, model: Path) -> None:
    """At once, whatever `refill_start`, and without a start of its budget: its end was wanted."""
    async with open_pool(
        tmp_path, model, engine_max_restarts=1, refill_start="before_update"
    ) as pool:
        await pool.publish(0)
        lending, spawned = pool.service.lending, len(pool.seen("spawn", subject="engine-1"))
        for n in (1, 2, 3):
            assert await lending.lend("job", "", 10.0) == 1
            assert pool.service.pool.slots[1].engine is None
            assert (await pool.publish_to_the_rest(n))[1] == [0]
            await lending.give_back(1)
            await lending.give_back(1)  # again: nothing
            await pool.until(lambda n=n: len(pool.service.pool.serving(n + 1)) == 2)
        assert len(pool.seen("spawn", subject="engine-1")) == spawned + 3
        assert [e["phase"] for e in pool.seen("lend")] == ["lend", "return"] * 3
        assert not pool.seen("fault")
        with pytest.raises(NotLent, match="no slot 7"):
            await lending.give_back(7)


async def test_a_standby_is_lent_first_and_then_promoted_nowhere(
    tmp_path: Path, model: Path
) -> None:
    async with open_pool(tmp_path, model, standby_engines=1) as pool:
        await pool.publish(0)
        assert await pool.service.lending.lend("job", "t", 10.0) == 2
        assert pool.states() == ["serving", "serving", "retired"]
        assert await pool.service.lending.lend("job", "u", 10.0) == 1
        await pool.service.lending.reclaim("job")
        assert [e["lent"] for e in pool.service.status()["engines"]] == [None, "u", "t"]
        await pool.service.lending.reclaim("another")
        await pool.until(lambda: pool.states() == ["serving", "serving", "standby"])


async def test_an_engine_that_starts_or_installs_can_be_lent(tmp_path: Path, model: Path) -> None:
    async with open_pool(tmp_path, model, faults={1: [{"sync_s": 1.0}]}) as pool:
        await pool.publish(0, wait="first")
        await pool.until(lambda: pool.states() == ["serving", "installing"])
        assert await pool.service.lending.lend("job", "t", 0.2) == 1  # it is not waited for
        await pool.service.lending.give_back(1)
        await pool.until(lambda: pool.states() == ["serving", "starting"])
        assert await pool.service.lending.lend("job", "t", 5.0) == 1
        assert not pool.seen("fault")


async def test_colocated_engines_are_not_lent(tmp_path: Path, model: Path) -> None:
    async with open_pool(tmp_path, model, placement="colocated") as pool:
        with pytest.raises(NotLent, match="colocated"):
            await pool.service.lending.lend("job", "t", 1.0)


# Over HTTP, in a role of its own ----------------------------------------------------------------


def lend(role: ServingRole, **fields: object) -> dict:
    return role.client.post("/v1/lend", {"timeout_s": 10.0, **fields}, deadline_s=20)


def test_a_loan_outlives_the_serving_role(tmp_path: Path) -> None:
    settings = {"engine_python": fake_engine_program(tmp_path), "cleanup_timeout": 5.0}
    role = start_serving(tmp_path, **settings)
    try:
        role.until(lambda: role.states() == ["stale", "stale"])
        role.publish(0)
        assert lend(role, borrower="trainer-0") == {"slot": 1, "devices": []}
        with pytest.raises(RoleRefused, match="min_engines is 1"):
            lend(role, borrower="trainer-1")
        with pytest.raises(RoleRefused, match="not to the sender's job"):
            lend(role, borrower="trainer-0", attempt="another")
        with pytest.raises(RoleRefused, match="timeout_s"):
            lend(role, timeout_s="soon")
        with pytest.raises(RoleRefused, match="slot"):
            role.client.post("/v1/return", {"slot": "1"}, deadline_s=5)
        role.process.kill()
        role.process.wait(10)
        role.client.close()

        role = start_serving(tmp_path, **settings)
        role.until(lambda: role.engines()[0]["state"] == "serving")
        assert role.engines()[1]["lent"] == "trainer-0" and role.engines()[1]["pid"] is None
        assert lend(role, borrower="trainer-0")["slot"] == 1
        assert role.client.post("/v1/return", {"slot": 1}, deadline_s=5) == {}
        role.until_served(1)
    finally:
        role.process.terminate()
        role.process.wait(20)
        role.client.close()
        end_sessions(tmp_path)
