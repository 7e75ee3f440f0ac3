"""Groups of engines: frozen ones, units of several processes, prefill and decode. Fake engines."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

FAKES = Path(__file__).parents[1] / "fakes"
sys.path.insert(0, str(FAKES))

from policies import tiny_model  # noqa: E402
from serving_pool import Pool, open_pool  # noqa: E402

from torchtitan_rl_ft.config.sections import EngineGroup  # noqa: E402
from torchtitan_rl_ft.models.tiny import make_tiny_model  # noqa: E402
from torchtitan_rl_ft.rollout.generation import GenerationFailed, checked_samples  # noqa: E402
from torchtitan_rl_ft.serving.requests import RequestRejected  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another checkpoint of the same shape."""
    return make_tiny_model(tmp_path_factory.mktemp("reference") / "m", seed=7)


def groups(*given: EngineGroup) -> dict[str, Any]:
    return {"groups": list(given)}


def entry(pool: Pool, slot: int) -> dict[str, Any]:
    return pool.service.status()["engines"][slot]


async def serves_again(pool: Pool, slots: list[int], pids: dict[int, int]) -> None:
    """Every slot has another engine that serves."""

    def back() -> bool:
        found = [entry(pool, s) for s in slots]
        return all(
            e["state"] == "serving" and e["pid"] not in (pids[e["slot"]], None) for e in found
        )

    await pool.until(back, 30.0)


def nodes_of(pool: Pool, slot: int) -> list[int]:
    engine = pool.service.pool.slots[slot].engine
    assert engine is not None
    return [p.pid for p in engine.process.processes]


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


# Frozen -----------------------------------------------------------------------------------------


@pytest.mark.row("C11")
async def test_a_frozen_engine_reloads_its_own_checkpoint(
    tmp_path: Path, model: Path, reference: Path
) -> None:
    frozen = EngineGroup(name="reference", role="frozen", model=str(reference))
    async with open_pool(tmp_path, model, **groups(EngineGroup(name="policy"), frozen)) as pool:
        # It waits for no version of the policy.
        await pool.until(lambda: entry(pool, 1)["state"] == "serving")
        before = entry(pool, 1)
        assert (before["group"], before["version"]) == ("reference", 0)
        assert await pool.publish(0) == (1, [0])
        assert await pool.publish(1, scale=1.2) == (2, [0])
        assert entry(pool, 1)["version"] == 0
        assert entry(pool, 0)["digest"] != before["digest"]
        os.kill(before["pid"], signal.SIGKILL)
        await serves_again(pool, [1], {1: before["pid"]})
        after = entry(pool, 1)
        assert after["digest"] == before["digest"]
        paths = [path for _, path in await pool.calls(1)]
        assert "/update_weights_from_disk" not in paths
        assert "/pause_generation" not in paths
        assert pool.moves(1)[-3:] == ["stale", "installing", "serving"]
        assert [g["version"] for g in pool.service.status()["groups"]] == [2, None]


@pytest.mark.row("C11")
async def test_a_frozen_engine_with_other_weights_does_not_serve(
    tmp_path: Path, model: Path, reference: Path
) -> None:
    """It was given something by somebody: the next one has the checkpoint again."""
    frozen = EngineGroup(name="reference", role="frozen", model=str(reference))
    async with open_pool(tmp_path, model, **groups(EngineGroup(name="policy"), frozen)) as pool:
        await pool.until(lambda: entry(pool, 1)["state"] == "serving")
        engine = pool.service.pool.slots[1].engine
        assert engine is not None
        proof = pool.service._shared.targets["reference"].proof
        await engine.client.load(str(model), 3, True, 5.0)
        with pytest.raises(Exception, match="reports version 3, not None"):
            await pool.service._shared.installers[engine.slot].prove_own(engine.client, proof)


# Nodes ------------------------------------------------------------------------------------------


@pytest.mark.row("C11")
async def test_an_engine_of_two_nodes_ends_and_starts_as_one(tmp_path: Path, model: Path) -> None:
    big = EngineGroup(name="policy", engines=2, nodes_per_engine=2)
    async with open_pool(tmp_path, model, **groups(big)) as pool:
        assert await pool.publish(0) == (1, [0, 1])
        before, other = nodes_of(pool, 0), nodes_of(pool, 1)
        assert len(before) == 2
        pids = {0: entry(pool, 0)["pid"]}
        os.kill(before[1], signal.SIGKILL)
        await serves_again(pool, [0], pids)
        assert all(gone(pid) for pid in before)
        assert len(nodes_of(pool, 0)) == 2
        assert nodes_of(pool, 1) == other
        [end] = pool.seen("exit", subject="engine-0")
        assert end["cause"] == "node 1: killed by SIGKILL while serving"
        assert len(pool.seen("spawn", subject="engine-0")) == 2
        assert len(await pool.generate()) == 2


# Prefill and decode -----------------------------------------------------------------------------


@pytest.mark.row("C11")
@pytest.mark.timeout(120)
async def test_prefill_and_decode_answer_together_and_are_rebuilt_together(
    tmp_path: Path, model: Path
) -> None:
    halves = groups(
        EngineGroup(name="p", role="prefill"), EngineGroup(name="d", role="decode", engines=2)
    )
    async with open_pool(tmp_path, model, **halves) as pool:
        assert await pool.publish(0) == (1, [0, 1, 2])
        first = await pool.generate(n=4, seeds=[1, 2, 3, 4])
        assert {s.engine for s in first} == {"engine-0+engine-1"}
        assert all(s.min_version == 1 and len(s.output_ids) == 8 for s in first)
        # Samples without seeds share no room either; both halves' groups name the pair.
        assert len(await pool.generate("d", n=3, group="d")) == 3
        assert len(await pool.generate("p", n=1, group="p")) == 1
        for slot in (0, 1):
            before = {e["slot"]: e["pid"] for e in pool.service.status()["engines"]}
            port = entry(pool, 0)["bootstrap_port"]
            await pool.fault(1, token_s=0.1)
            await pool.fault(2, token_s=0.1)
            asked = [
                # The requests that shared a room with the victim fail there and go on.
                pool.generate(f"{slot}-{i}", seeds=[i, i + 1])
                for i in range(4)
            ]
            running = [asyncio.create_task(a) for a in asked]
            await asyncio.sleep(0.3)
            os.kill(before[slot], signal.SIGKILL)
            await serves_again(pool, [0, 1, 2], before)
            assert all(gone(pid) for pid in before.values())
            for i, samples in enumerate(await asyncio.gather(*running)):
                assert len(samples) == 2, i
                assert all(len(s.output_ids) == 8 for s in samples)
            # Decode engines meet the new prefill engine at another port.
            assert entry(pool, 0)["bootstrap_port"] not in (port, None)
            again = await pool.generate(f"again-{slot}", n=4, seeds=[1, 2, 3, 4])
            assert [s.output_ids for s in again] == [s.output_ids for s in first]
        assert pool.seen("exit", subject="engine-1", phase="fault")[0]["cause"].startswith(
            "engine-0 of its unit was retired: killed by SIGKILL"
        )
        # Both members take versions, and prove them.
        assert await pool.publish(1, scale=1.2) == (2, [0, 1, 2])
        installs = pool.seen("install", version=2)
        assert {e["subject"] for e in installs} == {"engine-0", "engine-1", "engine-2"}
        assert all(e["proof"] == "exact" for e in installs)
        newer = await pool.generate("newer", n=4, seeds=[1, 2, 3, 4])
        assert [s.output_ids for s in newer] != [s.output_ids for s in first]


@pytest.mark.row("C11")
async def test_a_unit_beside_another_goes_on(tmp_path: Path, model: Path) -> None:
    halves = groups(
        EngineGroup(name="p", role="prefill", engines=2),
        EngineGroup(name="d", role="decode", engines=2),
    )
    async with open_pool(tmp_path, model, **halves) as pool:
        assert await pool.publish(0) == (1, [0, 1, 2, 3])
        pids = {e["slot"]: e["pid"] for e in pool.service.status()["engines"]}
        os.kill(pids[0], signal.SIGKILL)
        await pool.until(lambda: entry(pool, 2)["pid"] != pids[2])
        samples = await pool.generate(n=2)
        assert {s.engine for s in samples} == {"engine-1+engine-3"}
        assert (entry(pool, 1)["pid"], entry(pool, 3)["pid"]) == (pids[1], pids[3])


@pytest.mark.row("A1")
@pytest.mark.row("B1")
async def test_every_group_is_watched(tmp_path: Path, model: Path, reference: Path) -> None:
    """A hung engine is found in each, the halves included, and a healthy one is never accused."""
    every = groups(
        EngineGroup(name="policy-a"),
        EngineGroup(name="p", role="prefill"),
        EngineGroup(name="d", role="decode"),
        EngineGroup(name="reference", role="frozen", model=str(reference)),
    )
    health = {
        "health_check_first_wait": 0.0,
        "health_check_interval": 0.5,
        "health_check_timeout": 1.5,
    }
    async with open_pool(tmp_path, model, **every, **health) as pool:
        assert await pool.publish(0) == (1, [0, 1, 2])
        await pool.until(lambda: entry(pool, 3)["state"] == "serving")
        await asyncio.sleep(3)
        assert pool.seen("exit") == []
        for slot in range(4):
            assert "probe" in [path for _, path in await pool.calls(slot)]
        for slot in (0, 2, 3):
            await pool.fault(slot, freeze=True)
        pids = {e["slot"]: e["pid"] for e in pool.service.status()["engines"]}
        await serves_again(pool, [0, 1, 2, 3], pids)
        causes = {e["subject"]: e["cause"] for e in pool.seen("exit")}
        assert all("no token progress" in causes[f"engine-{i}"] for i in (0, 2, 3))
        assert causes["engine-1"].startswith("engine-2 of its unit was retired")


@pytest.mark.row("C11")
async def test_requests_stay_in_their_group(tmp_path: Path, model: Path, reference: Path) -> None:
    both = groups(
        EngineGroup(name="policy"),
        EngineGroup(name="reference", role="frozen", model=str(reference)),
    )
    async with open_pool(tmp_path, model, **both) as pool:
        await pool.publish(0)
        await pool.until(lambda: entry(pool, 1)["state"] == "serving")
        policy = await pool.generate("a", seeds=[1, 2])
        frozen = await pool.generate("b", seeds=[1, 2], group="reference")
        assert {s.engine for s in policy} == {"engine-0"}
        assert {s.engine for s in frozen} == {"engine-1"}
        assert [s.output_ids for s in policy] != [s.output_ids for s in frozen]
        shown = frozen[0].to_json()
        assert (shown["versions"], shown["min_version"], shown["max_version"]) == (None,) * 3
        answer = {"samples": [s.to_json() for s in frozen]}
        with pytest.raises(GenerationFailed, match="of a frozen group, not of the policy"):
            checked_samples(answer, 2)
        with pytest.raises(RequestRejected, match="group 'judge' is unknown: policy, reference"):
            await pool.generate("c", group="judge")
