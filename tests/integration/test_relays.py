"""Policies from holders: relays are kept up and current, engines load from them, and what dies,
lies or is lost holds up nobody else. Holders and engines are fakes, processes all."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from policies import tiny_model, token_of, write_policy
from safetensors.numpy import load_file
from serving_pool import TOKEN, Pool, open_pool, start_fake_holder

from torchtitan_rl_ft.config.weights import WeightsSection
from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.run_folder import ProcessId
from torchtitan_rl_ft.serving.kept_child import ChildFailed
from torchtitan_rl_ft.serving.releases import Announcement, PublishRefused
from torchtitan_rl_ft.weights.holder import launch
from torchtitan_rl_ft.weights.holder.launch import Start
from torchtitan_rl_ft.weights.holder.settings import HolderSettings
from torchtitan_rl_ft.weights.image import WEIGHTS_FILE, Image
from torchtitan_rl_ft.weights.manifest import read_manifest
from torchtitan_rl_ft.weights.proof import make_proofs

HEADERS = {"Authorization": f"Bearer {TOKEN}"}
LIMIT_S = 30.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "m")


class Source:
    """A trainer rank's holder, which has whole policies."""

    def __init__(self, pool: Pool, name: str, start: Start = start_fake_holder) -> None:
        self._pool, self.name, self._is_fake = pool, name, start is start_fake_holder
        settings = HolderSettings(
            name,
            "source",
            "trainers",
            WeightsSection(memory_folder=str(pool.folder.path / "memory")),
            ProcessId.current(),
            serving_url=pool.url,
        )
        log = pool.folder.path / f"{name}.log"
        self.child = start(settings, token=TOKEN, log=log, env=dict(os.environ))

    async def offer(self, folder: Path) -> None:
        if self._is_fake:
            await self._ask("/v1/offer", {"folder": str(folder)})
            return
        manifest, image = read_manifest(folder), image_of(folder)
        key = {"step": manifest.step, "token": manifest.token}
        header = base64.b64encode(image.header).decode()
        file = (await self._ask("/v1/reserve", {**key, "header": header}))["file"]
        with open(file, "r+b") as f:
            f.write((folder / WEIGHTS_FILE).read_bytes())
        ranges = [[len(image.header), image.nbytes]]
        offer = {**key, "file": file, "ranges": ranges, "assets": str(folder)}
        await self._ask("/v1/offer", offer)

    async def fault(self, **faults: Any) -> None:
        await self._ask("/fault", faults)

    async def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        url = (await until(self._pool, lambda found: shown(found, self.name)))["url"]
        return await ask(self._pool, url, path, body)

    def kill(self) -> None:
        self.child.send(signal.SIGKILL)


@contextlib.asynccontextmanager
async def source(
    pool: Pool, name: str = "source-0.0", start: Start = start_fake_holder
) -> AsyncIterator[Source]:
    made = Source(pool, name, start)
    try:
        yield made
    finally:
        made.kill()
        await made.child.wait()


async def ask(pool: Pool, url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with pool.http.post(url + path, json=body, headers=HEADERS) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def until(pool: Pool, find: Any, limit_s: float = LIMIT_S) -> Any:
    """What `find` finds in GET /v1/holders, as soon as it does."""
    async with asyncio.timeout(limit_s):
        while True:
            async with pool.http.get(pool.url + "/v1/holders", headers=HEADERS) as response:
                if found := find(await response.json()):
                    return found
            await asyncio.sleep(0.05)


def shown(found: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((h for h in found["holders"] if h["name"] == name), None)


def image_of(folder: Path) -> Image:
    tensors = read_manifest(folder).tensors
    return Image({n: (t.dtype, t.shape) for n, t in tensors.items()})


def announced(folder: Path, **fields: Any) -> dict[str, Any]:
    manifest, image = read_manifest(folder), image_of(folder)
    return {
        "step": manifest.step,
        "token": manifest.token,
        "layout_digest": image.layout_digest,
        "nbytes": image.nbytes,
        "wait": "all",
        "deadline_s": LIMIT_S,
        **fields,
    }


async def publish(pool: Pool, folder: Path, **fields: Any) -> tuple[int, dict[str, Any]]:
    body = announced(folder, **fields)
    async with pool.http.post(pool.url + "/v1/publish", json=body, headers=HEADERS) as response:
        return response.status, await response.json()


def policy(pool: Pool, step: int, **changes: Any) -> Path:
    """In a trainer's memory: no engine is told of this folder."""
    return write_policy(pool.folder.path / "trainer", pool.model, step, **changes)[0]


async def relay_process(pool: Pool, name: str) -> ProcessId:
    found = await until(pool, lambda all_: shown(all_, name))
    return ProcessId(found["pid"], found["start_time"])


def serving(pool: Pool, version: int) -> int:
    return len(pool.service.pool.serving(version))


async def ready(pool: Pool) -> None:
    await pool.until(lambda: not {"starting", "retired"} & set(pool.working_states()))


HOLDERS = {"fake": start_fake_holder}
if find_spec("nixl_cu13") is not None:
    HOLDERS["nixl"] = launch.start


@pytest.mark.row("D1")
@pytest.mark.row("D2")
@pytest.mark.parametrize("start", HOLDERS.values(), ids=HOLDERS)
async def test_engines_load_what_their_relay_has_got_from_a_trainer(
    tmp_path: Path, model: Path, start: Start
) -> None:
    weights = {"holders": 2, "piece_mb": 1}
    async with (
        open_pool(tmp_path, model, weights=weights, start_holder=start, engines=3) as pool,
        source(pool, start=start) as trainer,
    ):
        await ready(pool)
        for step in (1, 2, 3):
            folder = policy(pool, step, scale=1.0 + step)
            await trainer.offer(folder)
            status, answer = await publish(pool, folder, wait_relays="all")
            assert (status, answer["version"]) == (200, step), answer
            assert answer["installed"] == [0, 1, 2]
            assert answer["relays"] == ["relay-0", "relay-1"]
            again = await publish(pool, folder)
            assert again[1]["version"] == step, "the same state has the same version"
        installs = pool.seen("install", version=3)
        assert {e["transport"] for e in installs} == {"nixl"}
        assert {e["proof"] for e in installs} == {"exact"}
        loaded = [await pool.calls(slot) for slot in range(3)]
        assert all("/update_weights_from_disk" in [path for _, path in calls] for calls in loaded)
        fetched = pool.seen("fetch")
        assert {e["subject"] for e in fetched} == {"relay-0", "relay-1"}
        assert all(sum(e["bytes_from"].values()) == e["nbytes"] for e in fetched)
        status = pool.service.status()
        assert status["transport"] == "nixl"
        assert [r["name"] for r in status["relays"]] == ["relay-0", "relay-1"]
        memory = tmp_path / "memory"
        assert len(list(memory.glob("*/session/relay-0/step-*"))) <= 3, "old ones are dropped"
    assert not list(memory.glob("*/session")), "it ends with serving"


@pytest.mark.row("D10")
@pytest.mark.row("M4")
async def test_a_relay_that_dies_in_a_fetch_is_started_again_and_goes_on(
    tmp_path: Path, model: Path
) -> None:
    """The other relay, its engines, and the trainer's announcement wait for nothing."""
    async with (
        open_pool(tmp_path, model, weights={"holders": 2}, engines=2) as pool,
        source(pool) as trainer,
    ):
        await ready(pool)
        folder = policy(pool, 1)
        await trainer.offer(folder)
        found = await until(pool, lambda all_: shown(all_, "relay-1"))
        await ask(pool, found["url"], "/fault", {"die_in_fetch": True})
        status, answer = await publish(pool, folder, wait="first")
        assert (status, answer["version"]) == (200, 1)
        await pool.until(lambda: serving(pool, 1) == 2, LIMIT_S)
        (exit_,) = pool.seen("exit", subject="relay-1")
        assert (exit_["phase"], exit_["signal"]) == ("fault", 9)
        assert pool.seen("restart", subject="relay-1")
        assert [e["subject"] for e in pool.seen("spawn")].count("relay-0") == 1
        assert not pool.seen("exit", subject="engine-1"), "its engine has waited"


@pytest.mark.row("M4")
@pytest.mark.parametrize("start", HOLDERS.values(), ids=HOLDERS)
async def test_a_new_engine_and_a_new_relay_get_the_version_outside_any_round(
    tmp_path: Path, model: Path, start: Start
) -> None:
    async with open_pool(
        tmp_path, model, weights={"holders": 2}, start_holder=start, engines=2
    ) as pool:
        async with source(pool, start=start) as trainer:
            await ready(pool)
            folder = policy(pool, 1)
            await trainer.offer(folder)
            await publish(pool, folder, wait_relays="all")
        # No trainer any more: what relay-1 lacks comes from relay-0.
        dead = await relay_process(pool, "relay-1")
        memory = next(tmp_path.glob("memory/*/session/relay-1"))
        for held in memory.glob("step-*"):
            shutil.rmtree(held)
        os.kill(dead.pid, signal.SIGKILL)
        engine = pool.service.pool.slots[1].engine
        assert engine is not None
        os.kill(engine.process.id.pid, signal.SIGKILL)
        await pool.until(lambda: len(pool.seen("install", subject="engine-1")) == 2, LIMIT_S)
        refetched = pool.seen("fetch", subject="relay-1")[-1]
        assert set(refetched["bytes_from"]) == {"relay-0"}


@pytest.mark.row("D10")
@pytest.mark.parametrize("start", HOLDERS.values(), ids=HOLDERS)
async def test_a_byte_that_flips_in_memory_is_found_and_got_anew(
    tmp_path: Path, model: Path, start: Start
) -> None:
    async with (
        open_pool(tmp_path, model, weights={"holders": 2}, start_holder=start, engines=2) as pool,
        source(pool, start=start) as trainer,
    ):
        await ready(pool)
        folder = policy(pool, 1)
        await trainer.offer(folder)
        await publish(pool, folder, wait_relays="all")
        file = next(tmp_path.glob(f"memory/*/session/relay-1/step-*/{WEIGHTS_FILE}"))
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        engine = pool.service.pool.slots[1].engine
        assert engine is not None
        os.kill(engine.process.id.pid, signal.SIGKILL)
        await pool.until(lambda: len(pool.seen("install", subject="engine-1")) == 2, LIMIT_S)
        damage = [e["cause"] for e in pool.seen("fault", subject="engine-1")]
        assert any("differs from its sha256" in cause for cause in damage), damage
        assert pool.seen("exit", subject="relay-1"), "it was replaced"
        assert serving(pool, 1) == 2


async def test_a_state_that_relays_gave_up_is_got_again_when_it_is_current_again(
    tmp_path: Path, model: Path
) -> None:
    """A trainer that goes back to a checkpoint publishes what it has published before."""
    async with (
        open_pool(tmp_path, model, weights={"holders": 2}, engines=1) as pool,
        source(pool) as trainer,
    ):
        await ready(pool)
        folders = [policy(pool, step) for step in (1, 2, 3)]
        for folder in folders:
            await trainer.offer(folder)
            status, _ = await publish(pool, folder, wait_relays="all")
            assert status == 200
        kept = "memory/*/session/relay-*/step-1-*"
        await pool.until(lambda: not list(tmp_path.glob(kept)), LIMIT_S)
        relays = pool.service.status()["relays"]
        assert all(1 not in relay["holds"] for relay in relays)
        status, answer = await publish(pool, folders[0], wait_relays="all")
        assert (status, answer["version"]) == (200, 4), answer
        assert answer["installed"] == [0] and len(answer["relays"]) == 2


async def test_an_engine_is_not_kept_waiting_while_its_relay_gets_a_later_version(
    tmp_path: Path, model: Path
) -> None:
    weights = {"stall_timeout_s": LIMIT_S}
    async with (
        open_pool(tmp_path, model, weights=weights, engines=1) as pool,
        source(pool) as trainer,
    ):
        await ready(pool)
        first, second = policy(pool, 1), policy(pool, 2)
        await trainer.offer(first)
        assert (await publish(pool, first))[0] == 200
        await trainer.offer(second)
        await trainer.fault(hang_push=True)
        publishing = asyncio.create_task(publish(pool, second))
        await until(pool, lambda found: (shown(found, trainer.name) or {}).get("gives_to"))
        engine = pool.service.pool.slots[0].engine
        assert engine is not None
        os.kill(engine.process.id.pid, signal.SIGKILL)
        await pool.until(lambda: len(pool.seen("install", version=1)) == 2, LIMIT_S)
        assert not [e for e in pool.seen("fault") if "not installed" in e["cause"]]
        publishing.cancel()


async def test_an_engine_whose_relay_is_slower_than_the_trainer_is_kept(
    tmp_path: Path, model: Path
) -> None:
    """Each version is superseded before the relay has it."""
    async with (
        open_pool(tmp_path, model, weights={"holders": 2}, engines=2) as pool,
        source(pool) as trainer,
    ):
        await ready(pool)
        slow = (await until(pool, lambda all_: shown(all_, "relay-1")))["url"]
        await ask(pool, slow, "/fault", {"fetch_status": 410})
        for step in (1, 2, 3):
            folder = policy(pool, step)
            await trainer.offer(folder)
            assert (await publish(pool, folder, wait="first"))[0] == 200
            tried = f"version {step} not installed: step {step}"
            await pool.until(lambda tried=tried: tried in reasons(pool, "engine-1"), LIMIT_S)
        await ask(pool, slow, "/fault", {"fetch_status": 0})
        await pool.until(lambda: serving(pool, 3) == 2, LIMIT_S)
        assert not pool.seen("exit", subject="engine-1")
        assert not pool.seen("fault", subject="engine-1")


def reasons(pool: Pool, name: str) -> str:
    return "\n".join(str(e) for e in pool.seen("transition", subject=name))


async def test_all_relays_are_not_waited_for_when_one_cannot_get_the_version(
    tmp_path: Path, model: Path
) -> None:
    async with (
        open_pool(tmp_path, model, weights={"holders": 2}, engines=2) as pool,
        source(pool) as trainer,
    ):
        await ready(pool)
        found = await until(pool, lambda all_: shown(all_, "relay-1"))
        await ask(pool, found["url"], "/fault", {"fetch_status": 507})
        folder = policy(pool, 1)
        await trainer.offer(folder)
        status, answer = await publish(pool, folder, wait="none", wait_relays="all", deadline_s=600)
        assert (status, answer["relays"]) == (200, ["relay-0"])
        assert "as told" in pool.service.status()["relays"][1]["problem"]


async def test_a_trainer_goes_on_with_the_first_relay_or_with_all(
    tmp_path: Path, model: Path
) -> None:
    async with (
        open_pool(tmp_path, model, weights={"holders": 2}, engines=1) as pool,
        source(pool) as trainer,
    ):
        await ready(pool)
        slow = (await until(pool, lambda all_: shown(all_, "relay-1")))["url"]
        await ask(pool, slow, "/fault", {"fetch_status": 410})
        folder = policy(pool, 1)
        await trainer.offer(folder)
        status, answer = await publish(pool, folder, wait="none", wait_relays="first")
        assert (status, answer["relays"]) == (200, ["relay-0"])
        waiting = asyncio.create_task(publish(pool, folder, wait="none", wait_relays="all"))
        await asyncio.wait({waiting}, timeout=1.0)
        assert not waiting.done()
        await ask(pool, slow, "/fault", {"fetch_status": 0})
        status, answer = await waiting
        assert (status, answer["relays"]) == (200, ["relay-0", "relay-1"])


async def test_a_relay_that_hangs_is_replaced(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtitan_rl_ft.serving.relays.SILENT_LIMIT_S", 2.0)
    async with open_pool(tmp_path, model, weights={}, engines=1) as pool:
        frozen = await relay_process(pool, "relay-0")
        os.kill(frozen.pid, signal.SIGSTOP)
        await pool.until(lambda: len(pool.seen("ready", subject="relay-0")) == 2, LIMIT_S)
        assert not frozen.alive()
        (exit_,) = pool.seen("exit", subject="relay-0")
        assert "told nothing for 2 s" in exit_["cause"]


@pytest.mark.parametrize(
    "program, told",
    [("import sys; sys.exit(1)", "was started 5 times"), ("import sys; sys.exit(2)", "refused")],
)
async def test_a_relay_that_does_not_stay_up_ends_serving(
    tmp_path: Path, model: Path, program: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtitan_rl_ft.serving.budget.FIRST_DELAY_S", 0.01)

    def start(settings: HolderSettings, *, token: str, log: Path, env: Any) -> process.Child:
        return process.spawn([sys.executable, "-c", program], log=log, env=env)

    async with open_pool(tmp_path, model, weights={}, start_holder=start, engines=1) as pool:
        with pytest.raises(ChildFailed, match=told) as failed:
            async with asyncio.timeout(LIMIT_S):
                await pool.service.run_until_failed()
        assert failed.value.in_vain == (told == "refused")
        assert "relay-0 (weights.holders)" in str(failed.value)


@pytest.mark.parametrize("start", HOLDERS.values(), ids=HOLDERS)
async def test_a_policy_that_is_damaged_at_a_relay_before_it_has_a_number_comes_again(
    tmp_path: Path, model: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer, whose policy is right, is told to ask again, not that it is refused."""
    damaged: list[Path] = []

    def damaging(path: Path, layouts: Any) -> Any:
        if not damaged:
            damaged.append(path)
            with open(path / WEIGHTS_FILE, "r+b") as f:
                f.seek(-1, os.SEEK_END)
                byte = f.read(1)[0]
                f.seek(-1, os.SEEK_END)
                f.write(bytes([byte ^ 1]))
        return make_proofs(path, layouts)

    monkeypatch.setattr("torchtitan_rl_ft.serving.releases.make_proofs", damaging)
    async with (
        open_pool(tmp_path, model, weights={}, start_holder=start, engines=1) as pool,
        source(pool, start=start) as trainer,
    ):
        await ready(pool)
        folder = policy(pool, 1)
        await trainer.offer(folder)
        status, answer = await publish(pool, folder)
        assert status == 503
        assert "differs from its sha256" in answer["error"] and str(damaged[0]) in answer["error"]
        async with asyncio.timeout(LIMIT_S):
            while status == 503:  # its last life may not be over
                status, answer = await publish(pool, folder)
        assert (status, answer.get("version")) == (200, 1), answer
        await pool.until(lambda: serving(pool, 1) == 1, LIMIT_S)
        assert len(pool.seen("ready", subject="relay-0")) == 2


# Bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", HOLDERS.values(), ids=HOLDERS)
async def test_what_is_no_policy_of_this_job_is_refused_and_nothing_is_lost(
    tmp_path: Path, model: Path, start: Start
) -> None:
    async with (
        open_pool(tmp_path, model, weights={}, start_holder=start, engines=1) as pool,
        source(pool, start=start) as trainer,
    ):
        await ready(pool)
        folder = policy(pool, 1)
        await trainer.offer(folder)
        assert (await publish(pool, folder))[0] == 200
        name = "model.norm.weight"
        norm = load_file(folder / WEIGHTS_FILE)[name]
        other = policy(pool, 2, change={name: np.zeros(len(norm) + 2, np.float32)})
        status, answer = await publish(pool, other)
        assert status == 409
        assert "is not that of earlier versions" in answer["error"]
        for bad, told in (
            ({"nbytes": 0}, "nbytes is 0"),
            ({"nbytes": "many"}, "nbytes is missing or no int"),
            ({"layout_digest": None}, "layout_digest is missing"),
            ({"wait_relays": "some"}, "first or all"),
        ):
            status, answer = await publish(pool, policy(pool, 3), **bad)
            assert status == 400
            assert told in answer["error"]
        assert serving(pool, 1) == 1
        nan = policy(pool, 4, change={name: np.full(len(norm), np.nan, np.float32)})
        await trainer.offer(nan)
        status, answer = await publish(pool, nan)
        assert status == 409
        assert name in answer["error"] and "NaN" in answer["error"]
        good = policy(pool, 5)
        await trainer.offer(good)
        assert (await publish(pool, good))[1]["version"] == 2
        await pool.until(lambda: serving(pool, 2) == 1, LIMIT_S)


@pytest.mark.skipif("nixl" not in HOLDERS, reason="weights over UCX need the extra ucx")
async def test_a_trainer_with_another_library_is_told_so(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other" / "nixl_cu13-0.0.1.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: nixl-cu13\nVersion: 0.0.1\n")
    weights = {"fetch_timeout_s": 6.0}
    async with open_pool(
        tmp_path, model, weights=weights, start_holder=launch.start, engines=1
    ) as pool:
        await ready(pool)
        path = [str(other.parent), *(p for p in sys.path if p)]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
        async with source(pool, start=launch.start) as trainer:
            folder = policy(pool, 1)
            await trainer.offer(folder)
            status, answer = await publish(pool, folder, deadline_s=LIMIT_S)
            assert status == 503, answer
            assert "did not come whole" in answer["error"]
            assert "this holder nixl-cu13 0.0.1: install the same version" in answer["error"]


async def test_what_nobody_holds_is_to_be_asked_again(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtitan_rl_ft.serving.relays.LOST_S", 1.0)
    async with open_pool(tmp_path, model, weights={}, engines=1) as pool:
        await ready(pool)
        folder = policy(pool, 1)
        status, answer = await publish(pool, folder)
        assert status == 503
        assert "no holder has step 1" in answer["error"]
        async with source(pool) as trainer:
            await trainer.offer(folder)
            assert (await publish(pool, folder))[1]["version"] == 1


async def test_a_serving_role_without_relays_says_so(tmp_path: Path, model: Path) -> None:
    async with open_pool(tmp_path, model, engines=1) as pool:
        asked = Announcement(1, token_of(1), None, "", lambda: None, "0" * 64, 10)
        with pytest.raises(PublishRefused, match="no relays"):
            await pool.service.publish_image(asked, "none", "first", 5.0)


async def test_every_route_needs_the_token_and_understands_what_it_takes(
    tmp_path: Path, model: Path
) -> None:
    async with open_pool(tmp_path, model, weights={}, engines=0) as pool:
        for path in ("/v1/holders", "/v1/holders/lease", "/v1/holders/returned"):
            async with pool.http.post(pool.url + path, json={}) as response:
                assert response.status == 401
            async with pool.http.post(pool.url + path, json={}, headers=HEADERS) as response:
                assert response.status == 400, path
                assert (await response.json())["error"]
        told = {
            "name": "source-0.0",
            "kind": "source",
            "url": "http://x",
            "pid": 1,
            "start_time": 1.0,
            "host": socket.gethostname(),
        }
        held = {"step": 1, "token": "t", "layout_digest": "L", "whole": False}
        for bad in (
            {"kind": "other"},
            {"url": "ftp://x"},
            {"held": [{**held, "pieces": [[5, 5, "0" * 64]]}]},
            {"held": [{**held, "pieces": [[0, 5, "short"]]}]},
            {"held": [{**held, "step": -1}]},
        ):
            body = {**told, "held": [], **bad}
            async with pool.http.post(
                pool.url + "/v1/holders", json=body, headers=HEADERS
            ) as response:
                assert response.status == 400, bad


# Memory that serving's end leaves -----------------------------------------------------------------


@pytest.mark.timeout(150)
@pytest.mark.parametrize("start", HOLDERS.values(), ids=HOLDERS)
async def test_a_restarted_serving_goes_on_with_what_relays_had(
    tmp_path: Path, model: Path, start: Start
) -> None:
    """Its predecessor was killed: relays are new processes, their memory is still there."""
    async with open_pool(tmp_path, model, weights={}, start_holder=start, engines=1) as pool:
        async with source(pool, start=start) as trainer:
            await ready(pool)
            folder = policy(pool, 1)
            await trainer.offer(folder)
            await publish(pool, folder)
        memory = tmp_path / "memory"
        kept = tmp_path / "kept"
        memory.rename(kept)
    kept.rename(memory)
    async with open_pool(
        tmp_path, model, weights={}, start_holder=start, engines=1, engine_start_timeout_s=60.0
    ) as pool:
        assert pool.service.version == 1, "it never falls back"
        await pool.until(lambda: serving(pool, 1) == 1, 60.0)
        assert not pool.seen("publish")


async def test_what_no_relay_has_any_more_is_wanted_from_the_trainer_again(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtitan_rl_ft.serving.relays.LOST_S", 1.0)
    async with (
        open_pool(tmp_path, model, weights={}, engines=1) as pool,
        source(pool) as trainer,
    ):
        await ready(pool)
        folder = policy(pool, 1)
        await trainer.offer(folder)
        await publish(pool, folder)
    async with open_pool(tmp_path, model, weights={}, engines=1) as pool:
        asked = pool.url + "/v1/version?timeout_s=1"

        async def awaited() -> dict[str, Any]:
            async with asyncio.timeout(LIMIT_S):
                while True:
                    async with pool.http.get(asked, headers=HEADERS) as response:
                        answer = await response.json()
                    if answer.get("awaits_publish"):
                        return answer

        answer = await awaited()
        assert (answer["version"], answer["serving"]) == (1, 0)
        assert answer["awaits_publish"] == "lost version 1"
        async with source(pool) as trainer:
            await trainer.offer(folder)
            status, published = await publish(pool, folder)
            assert (status, published["version"]) == (200, 2), published
            await pool.until(lambda: serving(pool, 2) == 1, LIMIT_S)
        async with pool.http.get(asked, headers=HEADERS) as response:
            assert "awaits_publish" not in await response.json()


async def test_a_version_that_is_lost_while_serving_runs_is_wanted_again_and_costs_no_engine(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtitan_rl_ft.serving.relays.LOST_S", 1.0)
    limits = {"install_timeout_s": 20.0}
    async with open_pool(tmp_path, model, weights={}, engines=1, **limits) as pool:
        async with source(pool) as trainer:
            await ready(pool)
            folder = policy(pool, 1)
            await trainer.offer(folder)
            await publish(pool, folder)
        for held in tmp_path.glob("memory/*/session/relay-0/step-*"):
            shutil.rmtree(held)
        os.kill((await relay_process(pool, "relay-0")).pid, signal.SIGKILL)
        engine = pool.service.pool.slots[0].engine
        assert engine is not None
        os.kill(engine.process.id.pid, signal.SIGKILL)
        await pool.until(lambda: pool.service.awaits_publish is not None, LIMIT_S)
        (lost,) = [e for e in pool.seen("fault") if "is lost" in e["cause"]]
        assert "no holder has step 1" in lost["cause"]
        async with source(pool, "source-0.1") as trainer:
            await trainer.offer(folder)
            assert (await publish(pool, folder))[1]["version"] == 2
            await pool.until(lambda: serving(pool, 2) == 1, LIMIT_S)
        assert len(pool.seen("exit", subject="engine-0")) == 1, "the one that was killed"


async def test_a_folder_is_taken_as_before(tmp_path: Path, model: Path) -> None:
    """Initial weights, and a trainer that cannot do otherwise, come over the file system."""
    async with open_pool(tmp_path, model, weights={}, engines=1) as pool:
        version, slots = await pool.publish(0)
        assert (version, slots) == (1, [0])
        (install,) = pool.seen("install")
        assert install["transport"] == "disk"
