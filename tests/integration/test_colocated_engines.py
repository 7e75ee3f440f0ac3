"""Engines that give their memory up while the trainer computes. Fake engines, whose scheduler ends,
as the real one's does, when memory is asked for at the wrong moment."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import pytest

FAKES = Path(__file__).parents[1] / "fakes"
sys.path.insert(0, str(FAKES))

from policies import tiny_model, token_of, write_policy  # noqa: E402
from serving_pool import Pool, open_pool  # noqa: E402

from torchtitan_rl_ft.config.sections import EngineGroup  # noqa: E402
from torchtitan_rl_ft.models.tiny import make_tiny_model  # noqa: E402
from torchtitan_rl_ft.serving.memory import ReleaseFailed  # noqa: E402
from torchtitan_rl_ft.serving.service import NotColocated  # noqa: E402

COLOCATED: dict[str, Any] = {
    "placement": "colocated",
    "health_check_first_wait": 0.0,
    "health_check_interval": 0.3,
    "health_check_timeout": 2.0,
}
CALM = {**COLOCATED, "health_check_first_wait": 600.0}


NOT_OF_THE_ORDER = (
    "/v1/loads",
    "/model_info",
    "/abort_request",
    "/calls",
    "/generate",
    "probe",
    "probe answered",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "m")


async def paths(pool: Pool, slot: int) -> list[str]:
    return [path for _, path in await pool.calls(slot)]


def steps(found: list[str]) -> list[str]:
    """The calls that matter for the order."""
    return [p for p in found if p not in NOT_OF_THE_ORDER]


async def publish(
    pool: Pool, step: int, scale: float = 1.0, wait: str = "all"
) -> tuple[int, list[int]]:
    """Also while slots are empty on purpose."""
    path, digest = write_policy(pool.folder.weights, pool.model, step, scale=scale)
    return await pool.service.publish(step, token_of(step), path, digest, wait, 20.0)


@pytest.mark.row("B5")
@pytest.mark.timeout(120)
async def test_memory_goes_and_comes_in_the_right_order(tmp_path: Path, model: Path) -> None:
    async with open_pool(tmp_path, model, **COLOCATED) as pool:
        assert await pool.publish(0) == (1, [0, 1])
        first = await pool.generate("a", seeds=[1, 2])
        assert await pool.service.release(5.0) == [0, 1]
        assert pool.states() == ["paused", "paused"]
        before = len(await pool.calls(0))
        # Nothing is served, probed or asked for while the trainer computes.
        await asyncio.sleep(1.5)
        assert set((await paths(pool, 0))[before:]) <= {"/calls"}
        assert await pool.service.release(5.0) == [0, 1]  # again: nothing to do
        assert await publish(pool, 1, 1.2) == (2, [0, 1])
        order = steps(await paths(pool, 0))
        released = order.index("/release_memory_occupation")
        assert order[released - 1 : released + 8] == [
            "/flush_cache",
            "/release_memory_occupation",
            "/resume_memory_occupation",  # weights
            "/pause_generation",
            "/update_weights_from_disk",
            "/resume_memory_occupation",  # cache and graphs
            "/flush_cache",
            "/weights_checker",
            "/continue_generation",
        ]
        second = await pool.generate("b", seeds=[1, 2])
        assert [s.output_ids for s in second] != [s.output_ids for s in first]
        assert all(s.min_version == 2 for s in second)
        assert pool.seen("exit") == []


@pytest.mark.row("B5")
@pytest.mark.timeout(120)
async def test_no_probe_between_release_and_resume_over_many_turns(
    tmp_path: Path, model: Path
) -> None:
    settings = {**COLOCATED, "health_check_interval": 0.05}
    async with open_pool(tmp_path, model, engines=1, **settings) as pool:
        await pool.publish(0)
        quiet: list[tuple[float, float]] = []
        for turn in range(1, 21):
            await pool.generate(f"r{turn}", n=1)
            await asyncio.sleep(0.1)  # time for a probe
            await pool.service.release(5.0)
            begin = time.monotonic()
            await asyncio.sleep(0.05)
            quiet.append((begin, time.monotonic()))
            await pool.publish(turn, scale=1 + turn / 50)
        probes = [at for at, path in await pool.calls(0) if path == "probe"]
        assert probes
        assert not [at for at in probes for b, e in quiet if b <= at <= e]
        assert pool.seen("exit") == []


@pytest.mark.row("B5")
async def test_release_waits_for_a_probe_with_a_deadline(tmp_path: Path, model: Path) -> None:
    settings = {**COLOCATED, "health_check_timeout": 5.0}
    async with open_pool(tmp_path, model, engines=1, **settings) as pool:
        await pool.publish(0)
        await pool.fault(0, slow_probe=1.0)
        await asyncio.sleep(0.6)  # one is in work
        await pool.service.release(5.0)
        calls = await pool.calls(0)
        answered = max(at for at, path in calls if path == "probe answered")
        [released] = [at for at, path in calls if path == "/release_memory_occupation"]
        assert answered <= released
        await pool.publish(1)
        await pool.fault(0, slow_probe=4.0)
        await asyncio.sleep(0.6)
        with pytest.raises(ReleaseFailed, match="a probe did not end within 1 s"):
            await pool.service.release(1.0)


@pytest.mark.row("C9")
async def test_requests_are_aborted_and_go_on_at_the_next_version(
    tmp_path: Path, model: Path
) -> None:
    async with open_pool(tmp_path, model, **CALM) as pool:
        await pool.publish(0)
        for slot in (0, 1):
            await pool.fault(slot, token_s=0.05)
        asked = [asyncio.create_task(pool.generate(f"r{i}", n=2)) for i in range(4)]
        await asyncio.sleep(0.2)
        assert await pool.service.release(5.0) == [0, 1]
        assert pool.service.status()["in_flight"] == 0
        await pool.publish(1, scale=1.1)
        for samples in await asyncio.gather(*asked):
            assert all(len(s.output_ids) == 8 and s.max_version == 2 for s in samples)


@pytest.mark.row("C9")
@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ({"ignore_abort": True, "token_s": 0.2}, "is not idle after 1 s: in flight here 2"),
        ({"stuck_transfer": 1}, "is not idle after 1 s: prefill_inflight_queue 1"),
    ],
)
async def test_one_that_does_not_drain_goes_and_its_successor_waits(
    tmp_path: Path, model: Path, fault: dict[str, Any], named: str
) -> None:
    """Its memory is free as well then, and no new engine takes it before the trainer is done."""
    halves = [EngineGroup(name="p", role="prefill"), EngineGroup(name="d", role="decode")]
    groups = {"groups": halves} if "stuck_transfer" in fault else {"engines": 2}
    async with open_pool(tmp_path, model, **groups, **CALM) as pool:
        assert await pool.publish(0) == (1, [0, 1])
        await pool.fault(0, **fault)
        asked = asyncio.create_task(pool.generate(n=2))
        await asyncio.sleep(0.3 if "token_s" in fault else 1.0)
        pid = pool.service.status()["engines"][0]["pid"]
        began = time.monotonic()
        with pytest.raises(ReleaseFailed, match=named):
            await pool.service.release(1.0)
        assert time.monotonic() - began < 4
        assert pool.seen("exit", pid=pid)
        starts = dict(pool.launcher.starts)
        await asyncio.sleep(1.0)
        assert pool.launcher.starts == starts
        await publish(pool, 1, wait="first")
        assert len(await asked) == 2
        await pool.until(lambda: pool.launcher.starts[0] == 2)


@pytest.mark.scenario("V-3")
async def test_weights_lost_with_the_memory_are_caught(tmp_path: Path, model: Path) -> None:
    """Whatever comes back with the memory, the proof comes after it."""
    async with open_pool(tmp_path, model, engines=1, **CALM) as pool:
        await pool.publish(0)
        await pool.fault(0, wipe_on_resume=True)
        await pool.service.release(5.0)
        await publish(pool, 1, 1.1, wait="none")
        await pool.until(lambda: bool(pool.seen("fault")))
        assert "parameters differ" in pool.seen("fault")[0]["cause"]
        samples = await pool.generate(seeds=[1, 2])
        assert all(s.min_version == 2 for s in samples)


async def test_a_frozen_engine_has_its_checkpoint_back(tmp_path: Path, model: Path) -> None:
    other = make_tiny_model(tmp_path / "reference", seed=7)
    groups = [
        EngineGroup(name="policy"),
        EngineGroup(name="reference", role="frozen", model=str(other)),
    ]
    async with open_pool(tmp_path / "run", model, groups=groups, **CALM) as pool:
        await pool.publish(0)
        await pool.until(lambda: pool.states() == ["serving", "serving"])
        digest = pool.service.status()["engines"][1]["digest"]
        assert await pool.service.release(5.0) == [0, 1]
        await pool.publish(1, scale=1.1)
        await pool.until(lambda: pool.states() == ["serving", "serving"])
        assert pool.service.status()["engines"][1]["digest"] == digest
        assert "/update_weights_from_disk" not in await paths(pool, 1)
        assert pool.seen("exit") == []


async def test_a_batch_that_the_trainer_refused_is_rolled_out_again(
    tmp_path: Path, model: Path
) -> None:
    """Nobody publishes then: the next request takes the memory back."""
    async with open_pool(tmp_path, model, **CALM) as pool:
        await pool.publish(0)
        await pool.service.release(5.0)
        # A rollout role that starts now finds a policy that it can ask for samples.
        found = await pool.service.wait_version(0, 1.0)
        assert (found["version"], found["serving"]) == (1, 2)
        assert all(s.min_version == 1 for s in await pool.generate())


async def test_engines_with_devices_of_their_own_keep_their_memory(
    tmp_path: Path, model: Path
) -> None:
    async with open_pool(tmp_path, model, engines=1) as pool:
        with pytest.raises(NotColocated, match="rollout.placement"):
            await pool.service.release(1.0)
