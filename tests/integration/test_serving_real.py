"""The serving role over real SGLang engines."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import httpx
import psutil
import pytest
import transcript
from conftest import FAKES, TOKEN, ServingRole, living, serving_role, start_serving, tree_of
from policies import tiny_model, token_of, write_policy
from tombstone import Tombstone

from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.host.footprint import IPC_PREFIXES, SHM
from torchtitan_rl_ft.observability.events import EventList
from torchtitan_rl_ft.rpc.client import RoleRefused
from torchtitan_rl_ft.run_folder import TOKEN_ENV
from torchtitan_rl_ft.serving.changes import Changes
from torchtitan_rl_ft.serving.engine_client import EngineClient
from torchtitan_rl_ft.serving.requests import GenerateRequest
from torchtitan_rl_ft.serving.router import Router
from torchtitan_rl_ft.serving.samples import Sample
from torchtitan_rl_ft.weights.engine_hashes import cpu_hash
from torchtitan_rl_ft.weights.installer import Installer
from torchtitan_rl_ft.weights.proof import EngineLayout, Proof, make_proofs
from torchtitan_rl_ft.weights.transports.base import Release
from torchtitan_rl_ft.weights.transports.disk import DiskTransport

pytestmark = pytest.mark.timeout(150)

LONG = {"max_new_tokens": 480, "ignore_eos": True}


def shared_memory() -> set[str]:
    return {p.name for p in SHM.iterdir() if p.name.startswith(IPC_PREFIXES)}


def ask_many(role: ServingRole, names: list[str], **fields: object) -> list[list[dict]]:
    with ThreadPoolExecutor(len(names)) as threads:
        return list(threads.map(lambda n: role.generate(n, **fields), names))


@pytest.mark.row("D1")
def test_engines_serve_what_was_published_and_proved(real_serving: ServingRole) -> None:
    version = real_serving.publish(1, scale=1.01)["version"]
    shown = real_serving.client.get("/v1/version", after=version - 1, timeout_s=5, deadline_s=10)
    assert shown == {"version": version, "step": 1, "token": token_of(1), "serving": 2}
    assert real_serving.status()["proof"] == "exact"
    for engine in real_serving.engines():
        info = httpx.get(engine["url"] + "/model_info").json()
        assert info["weight_version"] == str(version)
    samples = [s for g in ask_many(real_serving, [f"d1-{i}" for i in range(4)]) for s in g]
    assert {s["engine"] for s in samples} == {"engine-0", "engine-1"}
    for sample in samples:
        assert sample["versions"] == [version] * 8
        assert len(sample["logprobs"]) == len(sample["output_ids"]) == 8
        assert sample["finish_reason"] == "length"


def test_seeds_give_the_same_tokens_whatever_the_order(real_serving: ServingRole) -> None:
    one = real_serving.generate("s1", n=4, seeds=[11, 12, 13, 14])
    two = real_serving.generate("s2", n=4, seeds=[14, 13, 12, 11])
    assert [s["output_ids"] for s in one] == [s["output_ids"] for s in reversed(two)]
    assert len({tuple(s["output_ids"]) for s in one}) == 4
    free = real_serving.generate("s3", n=4)
    assert len({tuple(s["output_ids"]) for s in free}) == 4
    again = real_serving.generate("s3", n=4)
    assert again == free  # one request, asked twice


def test_an_answer_ends_with_the_end_token(real_serving: ServingRole) -> None:
    sampling = {"max_new_tokens": 64, "temperature": 1.0}
    samples = real_serving.generate("e1", n=8, sampling=sampling)
    stopped = [s for s in samples if s["finish_reason"] == "stop"]
    assert stopped
    assert all(s["output_ids"][-1] == 2 and 2 not in s["output_ids"][:-1] for s in stopped)


def test_bad_requests_name_what_is_wrong(real_serving: ServingRole) -> None:
    cases = [
        ({"input_ids": [3, 99]}, "the model's vocabulary is 0..15"),
        ({"input_ids": [3] * 600}, "longer than the model's context length"),
        ({"sampling": {"no_such": 1}}, "unknown field `no_such`"),
        ({"sampling": {"n": 2}}, "set by n and seeds"),
        ({"seeds": [1]}, "1 seeds for 2 samples"),
        ({"n": 0}, "n is 0"),
        ({"timeout_s": 0}, "timeout_s is missing or no positive number"),
    ]
    for i, (fields, message) in enumerate(cases):
        with pytest.raises(RoleRefused, match=message) as refused:
            real_serving.generate(f"bad-{i}", **fields)
        assert refused.value.status == 400
    assert real_serving.states() == ["serving", "serving"]


@pytest.mark.scenario("S-2")
def test_every_route_needs_the_token(real_serving: ServingRole) -> None:
    address = real_serving.folder.role("serving")
    assert address is not None
    assert address.url.startswith("http://127.0.0.1:")
    routes = [("GET", "status"), ("GET", "version"), ("POST", "publish"), ("POST", "generate")]
    for method, route in [*routes, ("POST", "shutdown"), ("GET", "no/such")]:
        response = httpx.request(method, f"{address.url}/v1/{route}")
        assert response.status_code == 401
    holders = [
        file
        for file in real_serving.folder.path.rglob("*")
        if file.is_file() and TOKEN.encode() in file.read_bytes()
    ]
    [kept] = holders  # for the next job of the session
    assert (kept.name, kept.parent.parent.name) == ("token", "sessions")
    assert kept.stat().st_mode & 0o777 == 0o600


@pytest.mark.row("D8")
def test_a_running_answer_spans_versions(real_serving: ServingRole) -> None:
    status = real_serving.status()
    before, drawn, wasted = (status[k] for k in ("version", "drawn_tokens", "wasted_tokens"))
    published = threading.Event()

    def ask(i: int) -> list[dict[str, Any]]:
        """One answer after the other: some are under way whenever the version changes."""
        samples: list[dict[str, Any]] = []
        while not (samples and published.is_set()):
            samples += real_serving.generate(f"span-{i}-{len(samples)}", n=4, sampling=LONG)
        return samples

    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(ask, i) for i in range(8)]
        try:
            real_serving.until(lambda: real_serving.status()["in_flight"] == 32, 20)
            real_serving.until(lambda: real_serving.status()["drawn_tokens"] > drawn + 32 * 32, 20)
            answer = real_serving.publish(2, scale=1.02)
        finally:
            published.set()
        samples = [s for future in asked for s in future.result()]
    assert answer == {"version": before + 1, "installed": [0, 1]}
    for sample in samples:
        versions = sample["versions"]
        assert len(versions) == 480
        assert versions == sorted(versions)
        assert set(versions) <= {before, before + 1}
    assert any((s["min_version"], s["max_version"]) == (before, before + 1) for s in samples)
    assert real_serving.status()["wasted_tokens"] == wasted


def test_transcript_of_the_real_engine(real_serving: ServingRole) -> None:
    weights, _ = write_policy(
        real_serving.folder.path / "transcript", real_serving.model, 77, scale=1.5
    )
    found = transcript.replay(real_serving.engines()[1]["url"], weights)
    expected = json.loads(transcript.RECORDED.read_text())
    for name, answer in expected.items():
        assert without_state(found[name]) == without_state(answer), name
    real_serving.publish(3, scale=1.03)  # the engine holds what the role says again


def without_state(answer: dict) -> dict:
    """Versions before the first update and checksums depend on what was served before."""
    return {k: v for k, v in answer.items() if k not in ("version", "versions", "sums")}


@pytest.mark.scenario("L-3")
@pytest.mark.row("C10")
@pytest.mark.row("D8")
@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
def test_installs_in_each_pause_mode(real_serving: ServingRole, mode: str) -> None:
    """On one engine, beside the role, with 16 long requests; a publish afterwards brings it back
    under the role."""
    url = real_serving.engines()[0]["url"]
    start = {"retract": 100, "in_place": 110, "abort": 120}[mode]

    async def run() -> tuple[list[Sample], Router]:
        async with aiohttp.ClientSession() as http:
            client, told = EngineClient(http, url, "engine-0"), asyncio.Semaphore(0)
            router = router_of_one(client, start, told.release)
            installer = Installer(DiskTransport(), mode, 20.0)
            releases = [await prepared(real_serving, mode, start, i) for i in range(3)]
            await installer.install(client, *releases[0], None)
            asked = [asyncio.create_task(router.generate(long(seed))) for seed in range(16)]
            for release, proof in releases[1:]:
                for _ in asked:  # each has told something
                    await told.acquire()
                took = await installer.install(client, release, proof, None)
                assert took.paused_s < 10
            return [s for answer in await asyncio.gather(*asked) for s in answer], router

    samples, router = asyncio.run(run())
    assert len(samples) == 16
    for sample in samples:
        assert sample.finish_reason == "length"
        assert len(sample.output_ids) == 480
        assert sample.versions == sorted(sample.versions)
        assert len(set(sample.versions)) >= 2
    assert router.wasted_tokens == 0
    if mode == "abort":
        assert router.continued_tokens >= 16
    else:
        assert router.continued_tokens == 0
    step = {"retract": 4, "in_place": 5, "abort": 6}[mode]
    assert real_serving.publish(step, scale=1.1)["installed"] == [0, 1]


async def prepared(role: ServingRole, mode: str, start: int, i: int) -> tuple[Release, Proof]:
    path, digest = write_policy(role.folder.path / mode, role.model, i, scale=1 + i / 50)
    layout = EngineLayout("float32", 1, cpu_hash)
    proof = (await asyncio.to_thread(make_proofs, path, [layout]))[1][layout]
    return Release(start + i, i, token_of(i), str(path), digest), proof


def long(seed: int) -> GenerateRequest:
    return GenerateRequest(f"r{seed}", [3, 4], 1, LONG, [seed], 60.0)


def router_of_one(client: EngineClient, version: int, told: Callable[[], None]) -> Router:
    """A router that knows one engine, which serves whatever happens. `told`: it told tokens."""
    engine = SimpleNamespace(
        slot=0,
        name=client.name,
        client=client,
        version=version,
        group=SimpleNamespace(name="policy"),
        gone=asyncio.Event(),
        in_flight=0,
        begin=lambda samples: None,
        end=lambda samples: None,
        made_progress=told,
    )
    pool: Any = SimpleNamespace(servers=lambda group: [engine])
    return Router(pool, Changes(), EventList(), 60.0, 32, {"policy": set()})


@pytest.mark.scenario("O-2")
def test_an_abandoned_request_ends_in_the_engine_too(real_serving: ServingRole) -> None:
    address = real_serving.folder.role("serving")
    assert address is not None
    body = {
        "request_id": "abandoned",
        "input_ids": [3, 4, 5],
        "n": 48,
        "sampling": LONG,
        "timeout_s": 60,
    }
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{address.url}/v1/generate", json=body, headers=headers, timeout=0.5)
    took = real_serving.until(lambda: real_serving.status()["in_flight"] == 0, 10)
    assert took < 2.0
    took += real_serving.until(lambda: not running_requests(real_serving), 10)
    assert took < 2.0


def running_requests(role: ServingRole) -> int:
    """Requests that SGLang itself counts."""
    loads = [httpx.get(e["url"] + "/v1/loads").json()["loads"][0] for e in role.engines()]
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


@pytest.mark.row("B9")
@pytest.mark.row("C1")
@pytest.mark.row("C2")
@pytest.mark.row("C3")
@pytest.mark.row("C4")
@pytest.mark.row("C7")
@pytest.mark.row("D1")
@pytest.mark.scenario("V-1")
def test_a_killed_engine_is_replaced_and_loses_no_request(real_serving: ServingRole) -> None:
    first, second = real_serving.engines()
    before = real_serving.status()["version"]
    victims = tree_of(second["pid"])
    with ThreadPoolExecutor(16) as threads:
        asked = [
            threads.submit(real_serving.generate, f"kill-{i}", n=4, sampling=LONG)
            for i in range(16)
        ]
        time.sleep(1.0)
        os.kill(second["pid"], signal.SIGKILL)
        killed = time.monotonic()
        real_serving.until(lambda: real_serving.engines()[1]["state"] != "serving", 5)
        assert time.monotonic() - killed < 1.0
        real_serving.until(lambda: exits_of(real_serving, second["pid"]) != [], 10)
        tombstone = Tombstone(second["url"])
        samples = [s for future in asked for s in future.result()]
    assert len(samples) == 64
    assert all(len(s["output_ids"]) == 480 for s in samples)
    # The check at the end of a rollout, versions that are published while the new one boots, and
    # requests.
    began = time.monotonic()
    checked = real_serving.client.post("/v1/check", {"timeout_s": 5}, deadline_s=10)
    assert time.monotonic() - began < 5.0
    assert checked == {"checked": 1, "retired": []}  # the survivor is all there is
    for step in (7, 8):
        assert real_serving.publish(step, scale=1 + step / 100, wait="first")["installed"] == [0]
        assert {s["engine"] for s in real_serving.generate(f"beside-{step}")} == {"engine-0"}
    real_serving.client.post("/v1/check", {"timeout_s": 5}, deadline_s=10)
    version = real_serving.status()["version"]
    real_serving.until_served(version)
    tombstone.close()
    assert tombstone.visits == []
    now_first, now_second = real_serving.engines()
    assert (now_first["pid"], now_first["url"]) == (first["pid"], first["url"])
    assert now_second["pid"] != second["pid"]
    assert now_second["restarts"] == 1
    assert not living(victims)
    [exit_event] = exits_of(real_serving, second["pid"])
    assert exit_event["data"]["signal"] == signal.SIGKILL
    assert exit_event["data"]["last_lines"]
    # Out of routing; dead, forgotten, started, up, installed at the newest version, proved, only
    # then serving.
    assert version == before + 2
    life = [e for e in real_serving.events() if e.get("data", {}).get("subject") == "engine-1"]
    [*_, last] = [e for e in life[: life.index(exit_event)] if e["kind"] == "transition"]
    assert last["data"]["new"] == "retired"
    life = life[life.index(exit_event) :]
    order = [(e["kind"], e["data"].get("new"), e.get("version")) for e in life]
    assert [o for o in order if o[0] in ("exit", "spawn", "ready", "install", "transition")] == [
        ("exit", None, None),
        ("spawn", None, None),
        ("ready", None, None),
        ("transition", "stale", None),
        ("transition", "installing", None),
        ("install", None, version),
        ("transition", "serving", version),
    ]
    info = httpx.get(now_second["url"] + "/model_info").json()
    assert info["weight_version"] == str(version)


def exits_of(role: ServingRole, pid: int) -> list[dict]:
    return [e for e in role.events("exit") if e["data"]["pid"] == pid]


@pytest.mark.row("B1")
@pytest.mark.scenario("D-2")
def test_killed_workers_are_noticed_at_once(real_serving: ServingRole) -> None:
    """The scheduler of one engine, the detokenizer of the other: the servers are still up."""
    workers = ["sglang::scheduler", "sglang::detokenizer"]
    engines = real_serving.engines()
    trees = set[int]().union(*(tree_of(e["pid"]) for e in engines))
    for engine, worker in zip(engines, workers, strict=True):
        [child] = [
            c
            for c in psutil.Process(engine["pid"]).children(recursive=True)
            if " ".join(c.cmdline()).startswith(worker)
        ]
        child.kill()
    pids = {e["pid"] for e in engines}
    assert real_serving.until(lambda: not pids & {e["pid"] for e in real_serving.engines()}) < 2.0
    exits = real_serving.events("exit")
    for engine, worker in zip(engines, workers, strict=True):
        [cause] = [e["cause"] for e in exits if e["data"]["pid"] == engine["pid"]]
        assert worker in cause
    assert real_serving.generate("waits for a new engine")
    real_serving.until_served(real_serving.status()["version"])
    assert not living(trees)


# Roles of their own -----------------------------------------------------------------------------


@pytest.mark.scenario("Z-1")
@pytest.mark.row("D1")
@pytest.mark.row("D2")
def test_engines_outlive_a_killed_role_and_versions_go_on(tmp_path: Path) -> None:
    """In the middle of requests; then a standby engine takes over; then nothing is left."""
    before = shared_memory()
    settings = {"engines": 1, "standby_engines": 1}
    role = start_serving(tmp_path, **settings)
    try:
        role.until(lambda: role.states() == ["stale", "standby"])
        assert role.publish(0)["version"] == 1
        engines = role.engines()
        trees = set().union(*(tree_of(e["pid"]) for e in engines))
        assert len(trees) >= 6
        with ThreadPoolExecutor(1) as threads:
            lost = threads.submit(role.generate, "lost", n=24, sampling=LONG, timeout_s=5)
            role.until(lambda: running_requests(role) >= 24, 10)
            role.process.kill()
            role.process.wait(10)
            assert lost.exception() is not None
    finally:
        role.process.kill()
        role.client.close()
    killed = time.monotonic()
    with serving_role(tmp_path, **settings) as again:
        again.until(lambda: again.states() == ["serving", "standby"])
        print(f"serving again {time.monotonic() - killed:.2f} s after the role was started")
        assert [e["pid"] for e in again.engines()] == [e["pid"] for e in engines]
        assert living(trees) == trees
        installs = again.events("install")
        assert [e["data"]["load_ms"] > 0 for e in installs] == [True, False]  # proved, not loaded
        assert running_requests(again) == 0
        assert {v for s in again.generate("a") for v in s["versions"]} == {1}
        assert again.publish(0)["version"] == 1
        assert again.publish(1, scale=1.1)["version"] == 2

        os.kill(engines[0]["pid"], signal.SIGKILL)
        took = again.until(lambda: again.engines()[1]["state"] == "serving")
        print(f"the standby engine serves {took:.2f} s after the kill")
        assert took < 5.0  # 0.3 s on an idle machine
        shown = again.engines()
        assert [e["duty"] for e in shown] == ["standby", "active"]
        assert (shown[1]["pid"], shown[1]["version"]) == (engines[1]["pid"], 2)
        assert {s["engine"] for s in again.generate("b")} == {"engine-1"}
        trees |= set().union(*(tree_of(e["pid"]) for e in again.engines() if e["pid"]))
        assert again.client.post("/v1/shutdown", {}, deadline_s=30) == {}
        assert again.process.wait(10) == 0
    assert not living(trees)
    assert shared_memory() - before == set()
    assert not list((tmp_path / "serving").glob("engine-*"))


def test_a_model_without_tokenizer_is_refused_at_once(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    given = {"run": str(tmp_path), "model": str(model), "rollout": {}}
    done = subprocess.run(
        [sys.executable, str(FAKES / "serving_host.py"), json.dumps(given)],
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, TOKEN_ENV: TOKEN},
    )
    assert done.returncode == 2
    assert done.stderr.strip().endswith(
        "holds no tokenizer (tokenizer.json): SGLang cannot start from it"
    )


@pytest.mark.row("C12")
def test_an_engine_that_refuses_its_arguments_ends_the_role_with_its_words(tmp_path: Path) -> None:
    role = start_serving(
        tmp_path, engines=1, engine_args=["--no-such-argument"], engine_max_restarts=3
    )
    assert role.process.wait(60) == ExitCode.CONFIG  # a restart would meet it again
    role.client.close()
    text = role.log()
    assert "rollout.min_engines is 1" in text
    assert "engine-0 refused its command line (rollout.engine_args)" in text
    assert "unrecognized arguments: --no-such-argument" in text
    assert "attempt_1.log" in text
