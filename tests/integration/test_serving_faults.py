"""The serving service over fake engines: what cannot be provoked on a real one, or not fast."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import transcript
from policies import tiny_model, token_of, write_policy
from serving_pool import Pool, open_pool

from torchtitan_rl_ft.serving.launch import Launch
from torchtitan_rl_ft.serving.pool import PoolFailed
from torchtitan_rl_ft.serving.releases import PublishRefused
from torchtitan_rl_ft.serving.router import RequestFailed, RequestRejected


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "m")


def serving(pool: Pool, version: int, n: int = 2) -> bool:
    return len(pool.service.pool.serving(version)) == n


def pid(pool: Pool, slot: int) -> int:
    engine = pool.service.pool.slots[slot].engine
    assert engine is not None
    return engine.process.id.pid


# Serving --------------------------------------------------------------------------------------


@pytest.mark.row("D1")
async def test_nothing_is_served_before_a_version_is_proved(tmp_path: Path, model: Path) -> None:
    async with open_pool(tmp_path, model) as pool:
        early = asyncio.create_task(pool.generate(timeout_s=20.0))
        await pool.until(lambda: pool.states() == ["stale", "stale"])
        assert not early.done()
        assert (await pool.service.wait_version(0, 0.0))["version"] == 0
        version, slots = await pool.publish(0)
        assert (version, slots) == (1, [0, 1])
        samples = await early
        assert [s.versions for s in samples] == [[1] * 8] * 2
        for slot in (0, 1):
            assert pool.moves(slot) == ["stale", "installing", "serving"]
        assert await pool.service.wait_version(0, 1.0) == {
            "version": 1,
            "step": 0,
            "token": token_of(0),
            "serving": 2,
        }


async def test_seeds_decide_samples_and_their_order(tmp_path: Path, model: Path) -> None:
    async with open_pool(tmp_path, model) as pool:
        await pool.publish(0)
        one = await pool.generate(n=3, seeds=[7, 8, 9])
        two = await pool.generate(n=3, seeds=[9, 8, 7])
        assert [s.output_ids for s in one] == [s.output_ids for s in reversed(two)]
        drawn = await pool.generate(n=3)
        assert len({tuple(s.output_ids) for s in drawn}) == 3


async def test_a_group_goes_to_one_engine_and_load_is_spread(tmp_path: Path, model: Path) -> None:
    start = [{"token_s": 0.01}]
    async with open_pool(tmp_path, model, faults={0: start, 1: start}) as pool:
        await pool.publish(0)
        groups = await asyncio.gather(*(pool.generate(f"g{i}", n=4) for i in range(8)))
        engines = [{s.engine for s in samples} for samples in groups]
        assert all(len(e) == 1 for e in engines)
        counts = [sum(f"engine-{i}" in e for e in engines) for i in (0, 1)]
        assert counts == [4, 4]


async def test_bad_requests_are_rejected_once_and_hurt_no_engine(
    tmp_path: Path, model: Path
) -> None:
    start = [{"reject": [9, 9]}]
    async with open_pool(tmp_path, model, faults={0: start, 1: start}) as pool:
        await pool.publish(0)
        with pytest.raises(RequestRejected, match="rejected"):
            await pool.generate(input_ids=[9, 9])
        with pytest.raises(RequestRejected, match=r"token 99; the model's vocabulary is 0\.\.15"):
            await pool.generate(input_ids=[3, 99])
        with pytest.raises(RequestRejected, match="token -1"):
            await pool.generate(input_ids=[-1])
        with pytest.raises(RequestRejected, match="empty"):
            await pool.generate(input_ids=[])
        calls = [p for slot in (0, 1) for _, p in await pool.calls(slot) if p == "/generate"]
        assert len(calls) == 1
        assert pool.states() == ["serving", "serving"]


# Versions -------------------------------------------------------------------------------------


@pytest.mark.row("D2")
async def test_versions_only_grow_and_publishing_is_idempotent(tmp_path: Path, model: Path) -> None:
    async with open_pool(tmp_path, model) as pool:
        assert (await pool.publish(0))[0] == 1
        assert (await pool.publish(0))[0] == 1
        assert (await pool.publish(1, scale=1.1))[0] == 2
        path, digest = write_policy(pool.folder.weights, model, 2, scale=1.2)
        announce = (2, token_of(2), path, digest, "all", 10.0)
        repeated = await asyncio.gather(*(pool.service.publish(*announce) for _ in range(3)))
        assert [v for v, _ in repeated] == [3, 3, 3]
        # A rewound trainer announces an older state: it is current again, under a new number.
        assert (await pool.publish(1, scale=1.1))[0] == 4
        assert (await pool.generate())[0].versions[0] == 4
    async with open_pool(tmp_path, model) as again:
        await again.until(lambda: serving(again, 4))
        assert (await again.service.wait_version(0, 1.0))["step"] == 1
        assert (await again.publish(1, scale=1.1))[0] == 4
        assert (await again.publish(3, scale=1.3))[0] == 5


async def test_old_weights_are_pruned_but_never_those_in_use(tmp_path: Path, model: Path) -> None:
    async with open_pool(tmp_path, model) as pool:
        for step in range(5):
            await pool.publish(step, scale=1 + step / 10)
        folders = sorted(p.name for p in pool.folder.weights.glob("step-*"))
        assert folders == ["step-3-00000003", "step-4-00000004"]


@pytest.mark.scenario("V-3")
async def test_wrong_weights_are_refused_before_any_engine_takes_them(
    tmp_path: Path, model: Path
) -> None:
    async with open_pool(tmp_path, model) as pool:
        await pool.publish(0)
        nan = {"model.norm.weight": np.full(64, np.nan, np.float32)}
        with pytest.raises(PublishRefused, match=r"model\.norm\.weight has NaN"):
            await pool.publish(1, change=nan)
        shape = {"model.norm.weight": np.ones(32, np.float32)}
        with pytest.raises(PublishRefused, match=r"model\.norm\.weight is \('F32', \[32\]\)"):
            await pool.publish(1, change=shape)
        with pytest.raises(PublishRefused, match="no manifest.json"):
            await pool.service.publish(1, token_of(1), tmp_path / "no", "", "none", 1.0)
        assert pool.states() == ["serving", "serving"]
        assert (await pool.publish(1, scale=1.1)) == (2, [0, 1])


@pytest.mark.scenario("V-3")
@pytest.mark.parametrize("fault", ["lie_sync", "half_sync", "stale_sync", "no_version"])
async def test_an_update_that_did_not_happen_never_serves(
    tmp_path: Path, model: Path, fault: str
) -> None:
    async with open_pool(tmp_path, model, faults={1: [{}, {}]}) as pool:
        await pool.publish(0)
        await pool.fault(1, **{fault: True})
        first = pid(pool, 1)
        version, slots = await pool.publish(1, scale=1.1, wait="first")
        assert version == 2
        assert slots == [0]
        # A full reload is tried once, then the engine is replaced.
        await pool.until(lambda: serving(pool, 2))
        assert pid(pool, 1) != first
        assert len(pool.seen("fault", subject="engine-1", version=2)) == 2
        first_life = pool.moves(1)[: pool.moves(1).index("retired")]
        assert first_life == ["stale", "installing", "serving"] + ["stale", "installing"] * 2 + [
            "stale"
        ]


# Deaths ---------------------------------------------------------------------------------------


@pytest.mark.row("B9")
@pytest.mark.row("C7")
async def test_requests_of_a_killed_engine_finish_elsewhere(tmp_path: Path, model: Path) -> None:
    start = [{"token_s": 0.05}]
    async with open_pool(tmp_path, model, faults={0: start, 1: start}) as pool:
        await pool.publish(0)
        groups = [asyncio.create_task(pool.generate(f"g{i}", n=4)) for i in range(16)]
        await asyncio.sleep(0.15)
        killed = pid(pool, 1)
        os.kill(killed, signal.SIGKILL)
        took = await pool.until(lambda: "retired" in pool.moves(1))
        assert took < 1.0
        samples = [s for g in await asyncio.gather(*groups) for s in g]
        assert len(samples) == 64
        assert all(len(s.output_ids) == 8 for s in samples)
        await pool.until(lambda: bool(pool.seen("exit", pid=killed)))
        [exit_event] = pool.seen("exit", pid=killed)
        assert exit_event["signal"] == signal.SIGKILL
        assert exit_event["cause"].startswith("killed by SIGKILL while ")
        await pool.until(lambda: serving(pool, 1))
        assert pid(pool, 1) != killed


@pytest.mark.row("C12")
@pytest.mark.scenario("W-4")
async def test_engines_that_never_start_end_the_pool_with_the_reason(
    tmp_path: Path, model: Path
) -> None:
    dead = [{"die_at_start": True}]
    async with open_pool(
        tmp_path, model, faults={0: dead, 1: dead}, engine_max_restarts=2, min_engines=1
    ) as pool:
        with pytest.raises(PoolFailed) as failure:
            async with asyncio.timeout(15):
                await pool.service.run_until_failed()
        text = str(failure.value)
        assert "0 of 2 engines are left, rollout.min_engines is 1" in text
        assert "exit code 1 while starting" in text
        assert "cannot start from" in text
        assert "attempt_2.log" in text


@pytest.mark.row("C12")
async def test_a_slot_that_is_given_up_leaves_the_rest_working(tmp_path: Path, model: Path) -> None:
    dead = [{"die_at_start": True}]
    async with open_pool(tmp_path, model, faults={1: dead}, engine_max_restarts=2) as pool:
        watch = asyncio.create_task(pool.service.run_until_failed())
        await pool.until(lambda: pool.service.status()["engines"][1]["given_up"])
        assert (await pool.publish(0))[1] == [0]
        assert (await pool.publish(1, scale=1.1)) == (2, [0])
        assert {s.engine for s in await pool.generate()} == {"engine-0"}
        assert not watch.done()
        watch.cancel()


def start_first_at(pool: Pool, port: int) -> None:
    """The next engine is started there, those after it where they would be."""
    prepare = pool.launcher.prepare

    def at_the_taken_port(slot: int) -> Launch:
        pool.launcher.prepare = prepare
        launch = prepare(slot)
        [node] = launch.nodes
        node = [f"--port={port}" if a.startswith("--port=") else a for a in node]
        return replace(launch, nodes=(node,), url=f"http://127.0.0.1:{port}")

    pool.launcher.prepare = at_the_taken_port


async def test_a_port_that_was_taken_meanwhile_is_left_for_another_one(
    tmp_path: Path, model: Path
) -> None:
    async with open_pool(tmp_path, model, engines=1, engine_max_restarts=2) as pool:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            start_first_at(pool, port)
            assert await pool.publish(0) == (1, [0])
        [failed] = pool.seen("exit")
        assert failed["cause"] == "exit code 1 while starting"
        assert f"('127.0.0.1', {port}): address already in use" in failed["last_lines"][-1]


@pytest.mark.scenario("Z-1")
async def test_another_jobs_engine_at_the_port_is_not_taken_for_ours(
    tmp_path: Path, model: Path
) -> None:
    """It answers all that ours would, long before ours finds its port taken."""
    async with open_pool(tmp_path / "other", model, engines=1) as other:
        await other.publish(0, scale=1.1)
        url = other.service.status()["engines"][0]["url"]
        before = len(await other.calls(0))
        async with open_pool(tmp_path, model, engines=1, engine_max_restarts=2) as pool:
            start_first_at(pool, int(url.rpartition(":")[2]))
            assert await pool.publish(0) == (1, [0])
            assert {s.engine for s in await pool.generate()} == {"engine-0"}
        assert url not in [e["url"] for e in pool.seen("ready")]
        assert f"another process listens at its address, {url}" in [
            e["cause"] for e in pool.seen("warn", subject="engine-0")
        ]
        asked = {path for _, path in (await other.calls(0))[before:]}
        assert asked <= {"/model_info", "/calls"}


async def test_an_engine_that_does_not_come_up_in_time_is_replaced(
    tmp_path: Path, model: Path
) -> None:
    async with open_pool(
        tmp_path, model, engines=1, engine_start_timeout_s=0.05, engine_max_restarts=2
    ) as pool:
        with pytest.raises(PoolFailed, match=r"within 0\.05 s \(engine_start_timeout_s\)"):
            async with asyncio.timeout(10):
                await pool.service.run_until_failed()


@pytest.mark.scenario("V-1")
async def test_a_newcomer_ends_at_the_version_published_while_it_booted(
    tmp_path: Path, model: Path
) -> None:
    """Its first install fails: it stays out and tries again, the other one serves on."""
    faults = {1: [{}, {"half_sync": True}]}
    async with open_pool(tmp_path, model, faults=faults) as pool:
        await pool.publish(0)
        stop = asyncio.Event()
        samples: list = []

        async def ask(worker: int) -> None:
            count = 0
            while not stop.is_set():
                count += 1
                samples.extend(await pool.generate(f"w{worker}-{count}"))

        asking = [asyncio.create_task(ask(i)) for i in range(4)]
        os.kill(pid(pool, 1), signal.SIGKILL)
        await pool.until(lambda: pool.states()[1] == "starting")
        path, digest = write_policy(pool.folder.weights, model, 1, scale=1.1)
        version, _ = await pool.service.publish(1, token_of(1), path, digest, "first", 10.0)
        await pool.until(lambda: bool(pool.seen("fault", subject="engine-1", version=2)))
        assert pool.moves(0)[-1] == "serving"
        await pool.fault(1, half_sync=False)
        await pool.until(lambda: serving(pool, 2))
        stop.set()
        await asyncio.gather(*asking)
        assert version == 2
        assert {v for s in samples for v in s.versions} == {1, 2}
        second_life = pool.moves(1)[pool.moves(1).index("retired") + 1 :]
        assert second_life == ["stale", "installing", "stale", "installing", "serving"]


# Pause modes ----------------------------------------------------------------------------------


@pytest.mark.row("D8")
@pytest.mark.scenario("L-3")
@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
async def test_publishing_keeps_running_requests(tmp_path: Path, model: Path, mode: str) -> None:
    start = [{"token_s": 0.03}]
    async with open_pool(tmp_path, model, faults={0: start, 1: start}, pause_mode=mode) as pool:
        await pool.publish(0)
        sampling = {"max_new_tokens": 48, "ignore_eos": True}
        asked = [
            asyncio.create_task(pool.generate(f"r{i}", n=1, sampling=sampling)) for i in range(16)
        ]
        await asyncio.sleep(0.25)
        assert (await pool.publish(1, scale=1.1)) == (2, [0, 1])
        samples = [s for answer in await asyncio.gather(*asked) for s in answer]
        assert len(samples) == 16
        assert {s.finish_reason for s in samples} == {"length"}
        for slot in (0, 1):  # listed all the time
            assert pool.moves(slot) == ["stale", *["installing", "serving", "stale"] * 2][:-1]
        assert all(len(s.output_ids) == 48 for s in samples)
        assert all((s.min_version, s.max_version) == (1, 2) for s in samples)
        assert all(s.versions == sorted(s.versions) for s in samples)
        status = pool.service.status()
        assert status["wasted_tokens"] == 0
        moves = pool.seen("move")
        if mode == "abort":
            assert sorted(m["request"] for m in moves) == sorted(f"r{i}" for i in range(16))
            assert status["continued_tokens"] == sum(m["tokens"] for m in moves) > 16
            assert status["continued_tokens"] == sum(s.versions.count(1) for s in samples)
        else:
            assert (moves, status["continued_tokens"]) == ([], 0)


# Limits ---------------------------------------------------------------------------------------


async def test_failing_requests_are_bounded_by_count_and_time(tmp_path: Path, model: Path) -> None:
    start = [{"drop_task": 1}]
    async with open_pool(tmp_path, model, faults={0: start, 1: start}) as pool:
        await pool.publish(0)
        with pytest.raises(RequestFailed, match="after 4 failures"):
            await pool.generate()
        assert len(pool.seen("move")) == 4
        start_s = time.monotonic()
        await pool.fault(0, drop_task=0, token_s=5)
        await pool.fault(1, drop_task=0, token_s=5)
        with pytest.raises(RequestFailed, match="no answer in"):
            await pool.generate(timeout_s=0.5)
        assert time.monotonic() - start_s < 2.0
        assert pool.states() == ["serving", "serving"]  # the caller's short limit is no sign


async def test_a_poisonous_prompt_fails_alone(tmp_path: Path, model: Path) -> None:
    start = [{"poison": [7, 7, 7]}]
    async with open_pool(
        tmp_path, model, faults={0: start, 1: start}, engine_max_restarts=10
    ) as pool:
        await pool.publish(0)
        with pytest.raises(RequestFailed, match="after 4 failures"):
            await pool.generate("bad", input_ids=[7, 7, 7])
        assert len(await pool.generate("good")) == 2


# Nothing is left ------------------------------------------------------------------------------


def alive(pids: set[int]) -> set[int]:
    """Without zombies, which wait for an init that may not collect them."""
    found = set()
    for number in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(number).status() != psutil.STATUS_ZOMBIE:
                found.add(number)
    return found


@pytest.mark.row("C5")
@pytest.mark.scenario("Z-1")
@pytest.mark.parametrize("orphan", [False, True])
async def test_retiring_takes_the_whole_tree(tmp_path: Path, model: Path, orphan: bool) -> None:
    """Also a server that is stopped, and a worker in a session of its own."""
    start = [{"orphan": orphan}]
    async with open_pool(tmp_path, model, faults={0: start, 1: start}) as pool:
        await pool.publish(0)
        engine = pool.service.pool.slots[0].engine
        assert engine is not None
        tree = {m.pid for m in engine.process.members}
        assert len(tree) == 2
        os.kill(engine.process.id.pid, signal.SIGSTOP)
        others = {e.process.id.pid for e in pool.service.pool.engines}
    assert not alive(tree | others)
    assert not list((tmp_path / "serving").glob("engine-*"))


async def test_an_orphan_of_a_killed_server_is_ended(tmp_path: Path, model: Path) -> None:
    async with open_pool(tmp_path, model, engines=1, faults={0: [{"orphan": True}]}) as pool:
        await pool.publish(0)
        engine = pool.service.pool.slots[0].engine
        assert engine is not None
        tree = {m.pid for m in engine.process.members}
        os.kill(engine.process.id.pid, signal.SIGKILL)
        await pool.until(lambda: len(pool.seen("exit")) == 1)
        assert not alive(tree)


# The fake is like the real one ----------------------------------------------------------------


async def test_transcript_of_the_fake_engine(tmp_path: Path, model: Path) -> None:
    """Statuses, fields and error kinds are those recorded from a real engine."""
    async with open_pool(tmp_path, model, engines=1) as pool:
        await pool.until(lambda: pool.states() == ["stale"])
        weights, _ = write_policy(tmp_path / "transcript", model, 77, scale=1.5)
        found = await asyncio.to_thread(
            transcript.replay, pool.service.pool.slots[0].engine.client.url, weights
        )
    expected = json.loads(transcript.RECORDED.read_text())
    for name, answer in expected.items():
        assert found[name] == answer, name
