"""Dead engines are found, living ones are left alone: what cannot be provoked on a real engine, or
not fast. The limits are those of the checklist: W first wait, I interval, T timeout."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from policies import tiny_model, token_of, write_policy
from serving_pool import Pool, open_pool

from torchtitan_rl_ft.observability.events import EventList
from torchtitan_rl_ft.rollout.engine_check import EngineCheck
from torchtitan_rl_ft.rollout.generation import ServingClient
from torchtitan_rl_ft.rpc import server
from torchtitan_rl_ft.serving.engine import Engine
from torchtitan_rl_ft.serving.routes import Routes
from torchtitan_rl_ft.serving.states import EngineState
from torchtitan_rl_ft.serving.updates import Retire, quiet

LONG = {"max_new_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "m")


def health(w: float, i: float, t: float, **more: Any) -> dict[str, Any]:
    return {
        "health_check_first_wait": w,
        "health_check_interval": i,
        "health_check_timeout": t,
        **more,
    }


NEVER = 600.0


def engine(pool: Pool, slot: int = 0) -> Engine:
    found = pool.service.pool.slots[slot].engine
    assert found is not None
    return found


async def retired(pool: Pool, slot: int = 0, timeout_s: float = 15.0) -> float:
    """Seconds until the engine of `slot` is retired."""
    return await pool.until(lambda: "retired" in pool.moves(slot), timeout_s)


async def causes(pool: Pool, slot: int = 0) -> str:
    await pool.until(lambda: bool(pool.seen("exit", subject=f"engine-{slot}")))
    return pool.seen("exit", subject=f"engine-{slot}")[0]["cause"]


# Hangs ------------------------------------------------------------------------------------------


HANGS: list[tuple[dict[str, Any], str]] = [
    ({"freeze": True}, "no token progress for"),
    ({"probe_hang": True}, "no token progress for"),
    ({"probe_status": 503}, "status 503"),
    ({"probe_status": 404}, "status 404"),
    ({"probe_id": "probe-of-another"}, "got the answer of probe-of-another"),
]


@pytest.mark.row("B1")
@pytest.mark.row("A1")
@pytest.mark.scenario("D-2")
@pytest.mark.parametrize("legacy", [True, False])  # the flag has no effect
async def test_engines_that_do_not_generate_are_retired(
    tmp_path: Path, model: Path, legacy: bool
) -> None:
    """Each in its own way, at the same time."""
    w, i, t = 0.0, 0.5, 1.0
    hangs = HANGS if legacy else HANGS[:1]
    async with open_pool(
        tmp_path, model, engines=len(hangs), use_fault_tolerance=legacy, **health(w, i, t)
    ) as pool:
        await pool.publish(0)
        began = time.monotonic()
        await asyncio.gather(*(pool.fault(slot, **hang) for slot, (hang, _) in enumerate(hangs)))
        for slot in range(len(hangs)):
            await retired(pool, slot)
        assert time.monotonic() - began < i + t + 2.0
        for slot, (hang, layer) in enumerate(hangs):
            assert pool.moves(slot)[3:5] == ["suspect", "retired"]
            cause = await causes(pool, slot)
            assert layer in cause
            assert "2 probes failed" in cause
            assert ("stopped: sglang::scheduler" in cause) == ("freeze" in hang)
            [death] = pool.seen("exit", subject=f"engine-{slot}")
            assert death["signal"] is None  # it was ended by us
            assert death["uptime_s"] > 0
        await pool.until(lambda: len(pool.service.pool.serving(1)) == len(hangs))


async def test_a_stopped_server_is_found_beside_traffic(tmp_path: Path, model: Path) -> None:
    start = [{"token_s": 0.02}]
    async with open_pool(
        tmp_path, model, faults={0: start, 1: start}, **health(0.0, 0.5, 1.0)
    ) as pool:
        await pool.publish(0)
        groups = [asyncio.create_task(pool.generate(f"g{i}", n=2)) for i in range(8)]
        await asyncio.sleep(0.1)
        os.kill(engine(pool).process.id.pid, signal.SIGSTOP)
        assert await retired(pool) < 0.5 + 1.0 + 2.0
        assert "stopped: its server" in await causes(pool)
        assert len(await asyncio.gather(*groups)) == 8


# Checks that are asked for ----------------------------------------------------------------------


@pytest.mark.row("B2")
@pytest.mark.parametrize("fault", ["freeze", "kill"])
async def test_a_check_at_the_end_of_a_rollout_ignores_the_waits(
    tmp_path: Path, model: Path, fault: str
) -> None:
    """Over HTTP, as the rollout role asks."""
    t = 1.5
    async with (
        open_pool(tmp_path, model, **health(NEVER, NEVER, t)) as pool,
        aiohttp.ClientSession() as http,
    ):
        await pool.publish(0)
        url, runner = await server.start(
            server.make_app("token", Routes(pool.service, lambda: None).table())
        )
        client = ServingClient(http, lambda: url, "token")
        began = time.monotonic()
        assert await client.check(t) == []
        assert time.monotonic() - began < 0.5
        victim = engine(pool)
        if fault == "freeze":
            await pool.fault(0, freeze=True)
        else:
            os.kill(victim.process.id.pid, signal.SIGKILL)
        await asyncio.sleep(0.2)
        check = EngineCheck(client, EventList(), t, on_done=lambda: None)
        await check.run()
        assert check.took_s < t + 1.0
        assert victim.gone.is_set()
        assert "retired" in pool.moves(0)
        assert "retired" not in pool.moves(1)
        await runner.cleanup()


@pytest.mark.row("B4")
@pytest.mark.timeout(120)
async def test_all_engines_are_checked_under_one_deadline(tmp_path: Path, model: Path) -> None:
    t = 2.0
    async with open_pool(tmp_path, model, engines=8, **health(NEVER, NEVER, t)) as pool:
        await pool.publish(0)
        for slot in range(0, 8, 2):
            os.kill(engine(pool, slot).process.id.pid, signal.SIGSTOP)
        began = time.monotonic()
        assert await pool.service.check(60.0) == {"checked": 8, "retired": [0, 2, 4, 6]}
        assert time.monotonic() - began < t + 1.0
        for slot in range(1, 8, 2):
            assert "suspect" not in pool.moves(slot)


@pytest.mark.row("B6")
async def test_checks_at_the_same_time_retire_once(tmp_path: Path, model: Path) -> None:
    async with open_pool(tmp_path, model, engines=1, **health(NEVER, NEVER, 1.0)) as pool:
        await pool.publish(0)
        await pool.fault(0, freeze=True)
        first, prober = engine(pool), pool.service.pool._shared.prober
        pairs = [(pool.service.check(10.0), prober.check(first)) for _ in range(200)]
        answers = await asyncio.gather(*(check for pair in pairs for check in pair))
        assert {tuple(a["retired"]) for a in answers[::2]} == {(0,)}
        assert len({v.reason for v in answers[1::2]}) == 1
        await pool.until(lambda: bool(pool.seen("exit", subject="engine-0")))
        assert len(pool.seen("fault", subject="engine-0")) == 1
        assert len(pool.seen("transition", subject="engine-0", new="retired")) == 1
        await pool.until(lambda: len(pool.service.pool.serving(1)) == 1)
        assert len(pool.seen("exit", subject="engine-0")) == 1
        assert first.state is EngineState.RETIRED
        # What comes late changes nothing.
        first.suspect("late")
        first.clear_suspicion("late")
        assert not first.condemn("late")
        assert first.state is EngineState.RETIRED


async def test_a_check_that_is_given_less_time_goes_on(tmp_path: Path, model: Path) -> None:
    async with open_pool(tmp_path, model, engines=1, **health(NEVER, NEVER, 1.5)) as pool:
        await pool.publish(0)
        await pool.fault(0, freeze=True)
        began = time.monotonic()
        assert await pool.service.check(0.2) == {"checked": 1, "retired": []}
        assert time.monotonic() - began < 0.6
        assert await retired(pool) < 1.5 + 1.0


# Waits and pauses -------------------------------------------------------------------------------


@pytest.mark.row("B3")
async def test_after_every_resume_the_first_wait_holds(tmp_path: Path, model: Path) -> None:
    w, i = 1.0, 0.2
    async with open_pool(tmp_path, model, engines=1, **health(w, i, 1.0)) as pool:
        for step in range(3):
            await pool.publish(step, scale=1 + step / 10)
            await asyncio.sleep(w + i + 0.6)
        calls = await pool.calls(0)
        probes = [at for at, path in calls if path == "probe"]
        resumes = [at for at, path in calls if path == "/continue_generation"]
        assert len(resumes) == 3
        for resume, following in zip(resumes, [*resumes[1:], time.monotonic()], strict=True):
            after = [p - resume for p in probes if resume <= p < following]
            assert after
            assert min(after) >= w - 0.02  # the engine notes the resume before we do
            assert min(after) < w + i + 0.6


@pytest.mark.row("B5")
@pytest.mark.scenario("Z-3")
async def test_no_probe_beside_an_install(tmp_path: Path, model: Path) -> None:
    """Probed all the time, by a probe that takes a while, over 20 updates; and there is still one
    that probes."""
    async with open_pool(tmp_path, model, engines=1, **health(0.0, 0.001, 5.0)) as pool:
        await pool.publish(0)
        await pool.fault(0, slow_probe=0.05)
        before = len(asyncio.all_tasks())
        for step in range(1, 21):
            await pool.publish(step, scale=1 + step / 50)
            await asyncio.sleep(0.03 * (step % 4))
        assert len(asyncio.all_tasks()) < before + 10
        calls = await pool.calls(0)
        pauses = [at for at, path in calls if path == "/pause_generation"]
        resumes = [at for at, path in calls if path == "/continue_generation"]
        began = [at for at, path in calls if path == "probe"]
        ended = [at for at, path in calls if path == "probe answered"]
        assert len(pauses) == len(resumes) == 21
        assert len(began) > 20
        for start, end in zip(began, ended, strict=False):
            for pause, resume in zip(pauses, resumes, strict=True):
                assert end <= pause or start >= resume
        assert pool.moves(0).count("serving") == 21
        assert "suspect" not in pool.moves(0)


@pytest.mark.row("B5")
async def test_an_install_waits_for_a_probe_but_not_for_ever(tmp_path: Path, model: Path) -> None:
    async with open_pool(tmp_path, model, engines=1, **health(NEVER, NEVER, 8.0)) as pool:
        await pool.publish(0)
        await pool.fault(0, slow_probe=0.8)
        check = asyncio.create_task(pool.service.check(20.0))
        await asyncio.sleep(0.1)
        with pytest.raises(Retire, match=r"a probe did not end within 0\.2 s"):
            async with quiet(engine(pool), 0.2):
                pass
        began = time.monotonic()
        async with quiet(engine(pool), 5.0):
            assert 0.2 < time.monotonic() - began < 2.0
            assert check.done() or (await asyncio.wait({check}, timeout=0.1))[0]
        assert await check == {"checked": 1, "retired": []}


@pytest.mark.row("B8")
async def test_waiting_is_no_fault(tmp_path: Path, model: Path) -> None:
    """Idle, paused, installing: each for longer than interval and timeout together."""
    async with open_pool(
        tmp_path, model, engines=2, faults={1: [{"sync_s": 1.5}]}, **health(0.0, 0.2, 0.4)
    ) as pool:
        await pool.until(lambda: pool.states() == ["stale", "stale"])
        await asyncio.sleep(1.0)  # no version to take
        await pool.publish(0)  # engine 1 installs for 1.5 s
        paused = engine(pool)
        async with quiet(paused, 5.0):
            await paused.client.pause("retract", 5.0)
            paused.move(EngineState.PAUSED, "for the trainer")
        assert (await pool.service.check(2.0))["checked"] == 1
        await asyncio.sleep(2.0)  # engine 1 is idle for ten intervals
        assert pool.states() == ["paused", "serving"]
        await paused.client.resume(5.0)
        paused.move(EngineState.SERVING, "resumed")
        await asyncio.sleep(0.6)
        assert pool.states() == ["serving", "serving"]
        assert not pool.seen("fault")
        assert not pool.seen("transition", new="suspect")


# Busy is not dead -------------------------------------------------------------------------------


@pytest.mark.row("B8")
@pytest.mark.scenario("D-1")
async def test_a_silent_prefill_is_never_taken_for_a_hang(tmp_path: Path, model: Path) -> None:
    """Fifteen times the timeout without a token, as 30 s at 2 s."""
    t = 0.5
    async with open_pool(tmp_path, model, engines=1, **health(0.0, 0.3, t)) as pool:
        await pool.publish(0)
        await pool.fault(0, prefill_s=15 * t)
        began = time.monotonic()
        [sample] = await pool.generate(n=1, timeout_s=30.0)
        assert time.monotonic() - began > 15 * t
        assert len(sample.output_ids) == 8
        assert "retired" not in pool.moves(0)
        # Until it answered it got no more requests; then at once.
        assert "suspect" in pool.moves(0)
        assert (await pool.until(lambda: pool.states() == ["serving"])) < 2 * t + 1.0
        await pool.fault(0, prefill_s=0)
        # The same silence of a worker that does nothing is a hang.
        await pool.fault(0, freeze=True)
        assert await retired(pool) < 0.3 + t + 2.0


@pytest.mark.row("B8")
@pytest.mark.scenario("D-1")
async def test_tokens_outweigh_probes(tmp_path: Path, model: Path) -> None:
    """Slow probes, and 503 as of an engine whose queue is full, while tokens come."""
    async with open_pool(tmp_path, model, engines=1, **health(0.0, 0.4, 1.0)) as pool:
        await pool.publish(0)
        for fault in ({"slow_probe": 4.0}, {"slow_probe": 0, "probe_status": 503}):
            await pool.fault(0, token_s=0.01, **fault)
            end = time.monotonic() + 2.5

            async def ask(until: float = end) -> None:
                while time.monotonic() < until:
                    await pool.generate(n=1)

            asking = [asyncio.create_task(ask()) for _ in range(2)]
            while time.monotonic() < end:
                checked = await pool.service.check(2.0)  # whatever the first stage says
                assert checked["retired"] == []
            await pool.fault(0, slow_probe=0, probe_status=0)
            await asyncio.gather(*asking)
        assert "retired" not in pool.moves(0)


@pytest.mark.scenario("D-1")
async def test_a_slow_probe_makes_a_suspect_that_tokens_clear(tmp_path: Path, model: Path) -> None:
    """(a) slow from the start, within the first wait; (b) slow for a while later, an answer
    finishing meanwhile; (c) probes never run while it takes a version."""
    async with open_pool(
        tmp_path,
        model,
        engines=1,
        faults={0: [{"slow_probe": 4.0}]},
        **health(1.5, 0.3, 3.0, health_check_failure_threshold=3),
    ) as pool:
        await pool.publish(0)
        await asyncio.sleep(1.2)
        assert "suspect" not in pool.moves(0)
        await pool.fault(0, slow_probe=0)
        await asyncio.sleep(1.0)
        assert "suspect" not in pool.moves(0)
        await pool.fault(0, slow_probe=4.0, token_s=1.0)
        answer = asyncio.create_task(pool.generate(n=1, sampling={"max_new_tokens": 2}))
        await pool.until(lambda: "suspect" in pool.moves(0))
        assert len(await answer) == 1
        await pool.fault(0, slow_probe=0, token_s=0)
        await pool.until(lambda: pool.states() == ["serving"])
        for step in range(1, 4):
            await pool.publish(step, scale=1 + step / 10)
        assert pool.service.status()["engines"][0]["restarts"] == 0
        assert "retired" not in pool.moves(0)


@pytest.mark.row("B8")
async def test_one_failed_probe_and_a_good_one(tmp_path: Path, model: Path) -> None:
    async with open_pool(tmp_path, model, engines=1, **health(0.0, 0.4, 2.0)) as pool:
        await pool.publish(0)
        await pool.fault(0, probe_status=503)
        await pool.until(lambda: pool.states() == ["suspect"])
        await pool.fault(0, probe_status=0)
        await pool.until(lambda: pool.states() == ["serving"])
        assert "status 503" in pool.seen("transition", new="suspect")[0]["cause"]
        assert "retired" not in pool.moves(0)


# Exits ------------------------------------------------------------------------------------------


@pytest.mark.row("B9")
@pytest.mark.scenario("D-2")
@pytest.mark.parametrize("who", ["server", "sglang::scheduler"])
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGQUIT])
async def test_an_exit_is_noticed_at_once_and_names_its_signal(
    tmp_path: Path, model: Path, who: str, signum: signal.Signals
) -> None:
    """SIGQUIT is how SGLang's watchdog ends a server whose forward pass takes too long."""
    async with open_pool(tmp_path, model, engines=1, **health(NEVER, NEVER, NEVER)) as pool:
        await pool.publish(0)
        process = engine(pool).process
        [worker] = [m.pid for m in process.members if m != process.id]
        os.kill(process.id.pid if who == "server" else worker, signum)
        assert await retired(pool) < 1.0
        await pool.until(lambda: bool(pool.seen("exit", subject="engine-0")))
        [death] = pool.seen("exit", subject="engine-0")
        assert (death["process"], death["signal"]) == (who, signum)
        assert death["pid"] == process.id.pid
        assert death["uptime_s"] > 0
        assert f"killed by {signum.name}" in death["cause"]
        if who != "server":
            assert f"sglang::scheduler (pid {worker}) ended" in death["cause"]
            assert "the server process is up" in death["cause"]


async def test_a_hung_engine_that_has_to_take_a_version_is_found_by_its_check(
    tmp_path: Path, model: Path
) -> None:
    """The install that waits for the check takes its verdict, not two limits of its own."""
    async with open_pool(
        tmp_path, model, install_timeout_s=20.0, **health(NEVER, NEVER, 1.0)
    ) as pool:
        await pool.publish(0)
        await pool.fault(0, freeze=True)
        check = asyncio.create_task(pool.service.check(10.0))
        await asyncio.sleep(0.1)
        path, digest = write_policy(pool.folder.weights, pool.model, 1, scale=1.1)
        await pool.service.publish(1, token_of(1), path, digest, "first", 5.0)
        assert (await check)["retired"] == [0]
        with contextlib.suppress(AssertionError):
            await pool.until(lambda: len(pool.service.pool.serving(2)) == 2, 5.0)
        assert len(pool.service.pool.serving(2)) == 2
