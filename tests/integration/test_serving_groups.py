"""Groups of engines: frozen ones, units of several processes, prefill and decode. Fake engines."""

from __future__ import annotations

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
            await pool.service._shared.installer.prove_own(engine.client, proof)


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
