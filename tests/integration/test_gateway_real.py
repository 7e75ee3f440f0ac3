"""A real SGLang gateway in front of two real engines: one of ours, and one that the test owns."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from conftest import ServingRole, serving_role
from policies import tiny_model

from torchtitan_rl_ft.config.sections import RolloutSection
from torchtitan_rl_ft.run_folder import RunFolder
from torchtitan_rl_ft.serving.launch import SGLangLauncher

pytestmark = pytest.mark.timeout(240)


@dataclass
class Owner:
    """Of one real engine, at one address."""

    argv: list[str]
    env: dict[str, str]
    url: str
    log: Path
    process: subprocess.Popen[bytes] | None = None

    @classmethod
    def of(cls, folder: Path) -> Owner:
        run = RunFolder(folder)
        launcher = SGLangLauncher(RolloutSection(), tiny_model(run.model), run, on_cpu=True)
        launch = launcher.prepare(0)
        return cls(launch.nodes[0], launch.env, launch.url, folder / "engine.log")

    def start(self) -> None:
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                self.argv, env=self.env, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        tree = [*psutil.Process(self.process.pid).children(recursive=True)]
        self.process.kill()
        for child in tree:
            if child.is_running():
                child.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owner]:
    owner = Owner.of(tmp_path_factory.mktemp("owner"))
    owner.start()
    yield owner
    owner.kill()


@pytest.fixture(scope="module")
def role(owner: Owner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingRole]:
    """One engine of ours and the owner's, behind a gateway, serving version 1."""
    with serving_role(
        tmp_path_factory.mktemp("serving"),
        engines=1,
        external_urls=[owner.url],
        router="smg",
        health_check_first_wait=0.0,
        health_check_interval=1.0,
        health_check_timeout=4.0,
    ) as role:
        role.until(lambda: role.states() == ["stale", "stale"], 120)
        role.publish(0)
        until_listed(role, 2)
        yield role
    # Engines of others are left serving.
    answer = httpx.post(
        owner.url + "/generate",
        json={"input_ids": [3], "sampling_params": {"max_new_tokens": 1}},
        timeout=20,
    )
    assert answer.status_code == 200
    assert not [e for e in role.events("spawn") + role.events("exit") if "external" in str(e)]


def until_listed(role: ServingRole, n: int) -> float:
    return role.until(lambda: len(role.status()["gateway"]["listed"]) == n)


def ask_many(role: ServingRole, names: list[str], **fields: object) -> list[list[dict]]:
    with ThreadPoolExecutor(len(names)) as threads:
        return list(threads.map(lambda n: role.generate(n, **fields), names))


@pytest.mark.row("A1")
def test_both_engines_answer_through_the_gateway(role: ServingRole) -> None:
    ours, external = role.engines()
    assert (ours["duty"], external["duty"]) == ("active", "external")
    assert external["pid"] is None
    names = [f"a{i}" for i in range(8)]
    groups = ask_many(role, names, n=4, seeds=[1, 2, 3, 4])
    assert {s["engine"] for g in groups for s in g} == {"engine-0", "external-1"}
    assert len({str([s["output_ids"] for s in g]) for g in groups}) == 1
    version = role.publish(1, scale=1.01)["version"]
    until_listed(role, 2)
    groups = ask_many(role, [f"b{i}" for i in range(8)])
    assert {s["engine"] for g in groups for s in g} == {"engine-0", "external-1"}
    assert {s["min_version"] for g in groups for s in g} == {version}
    installs = [e["data"] for e in role.events("install")]
    assert {(i["subject"], i["proof"]) for i in installs} == {
        ("engine-0", "exact"),
        ("external-1", "exact"),
    }


@pytest.mark.row("C12")
def test_a_killed_gateway_is_back_with_both_engines_within_5_s(role: ServingRole) -> None:
    before = role.status()["gateway"]["pid"]
    engine = role.engines()[0]["pid"]
    with ThreadPoolExecutor(1) as threads:
        long = {"max_new_tokens": 400, "ignore_eos": True}
        running = threads.submit(role.generate, "k1", sampling=long)
        role.until(lambda: role.status()["in_flight"] > 0)
        os.kill(before, signal.SIGKILL)
        role.until(lambda: role.status()["gateway"]["pid"] not in (None, before))
        assert until_listed(role, 2) < 5.0
        assert all(len(s["output_ids"]) == 400 for s in running.result())
    assert role.engines()[0]["pid"] == engine
    assert role.status()["gateway"]["restarts"] == 1


@pytest.mark.row("C1")
@pytest.mark.row("A1")
@pytest.mark.scenario("Z-3")
def test_an_external_engine_dies_and_comes_back_as_a_new_generation(
    role: ServingRole, owner: Owner
) -> None:
    with ThreadPoolExecutor(4) as threads:
        long = {"max_new_tokens": 400, "ignore_eos": True}
        running = [threads.submit(role.generate, f"e{i}", sampling=long) for i in range(4)]
        role.until(lambda: role.engines()[1]["in_flight"] > 0)
        owner.kill()
        role.until(lambda: role.engines()[1]["state"] == "retired")
        until_listed(role, 1)
        assert role.status()["gateway"]["listed"] == [role.engines()[0]["url"]]
        for samples in (f.result() for f in running):
            assert all(len(s["output_ids"]) == len(s["logprobs"]) == 400 for s in samples)
    version = role.publish(2, scale=1.02, wait="first")["version"]
    owner.start()
    began = time.monotonic()
    role.until(lambda: role.engines()[1]["version"] == version, 120)
    until_listed(role, 2)
    assert role.engines()[1]["in_flight"] == 0
    groups = ask_many(role, [f"f{i}" for i in range(8)])
    assert {s["engine"] for g in groups for s in g} == {"engine-0", "external-1"}
    assert {s["min_version"] for g in groups for s in g} == {version}
    print(f"external engine back after {time.monotonic() - began:.1f} s")
