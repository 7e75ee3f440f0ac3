"""One pair of real SGLang engines behind a real serving role, for the whole session."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

FAKES = Path(__file__).parents[1] / "fakes"
sys.path.insert(0, str(FAKES))

from policies import tiny_model, token_of, write_policy  # noqa: E402

from torchtitan_rl_ft.rpc.client import RoleClient  # noqa: E402
from torchtitan_rl_ft.run_folder import TOKEN_ENV, RunFolder  # noqa: E402
from torchtitan_rl_ft.serving.engine_process import end_recorded  # noqa: E402
from torchtitan_rl_ft.serving.engine_records import EngineRecords  # noqa: E402

TOKEN = "token-of-the-integration-tests"


def tree_of(pid: int) -> set[int]:
    root = psutil.Process(pid)
    return {root.pid, *(c.pid for c in root.children(recursive=True))}


def living(pids: set[int]) -> set[int]:
    found = set()
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.add(pid)
        except psutil.NoSuchProcess:
            continue
    return found


@dataclass
class ServingRole:
    """A serving role in a process of its own."""

    folder: RunFolder
    model: Path
    process: subprocess.Popen[bytes]
    client: RoleClient

    def status(self) -> dict[str, Any]:
        return self.client.get("/v1/status", deadline_s=10)

    def engines(self) -> list[dict[str, Any]]:
        return self.status()["engines"]

    def states(self) -> list[str]:
        return [e["state"] for e in self.engines()]

    def publish(
        self, step: int, *, wait: str = "all", deadline_s: float = 60.0, **policy: Any
    ) -> dict[str, Any]:
        path, digest = write_policy(self.folder.weights, self.model, step, **policy)
        body = {
            "step": step,
            "token": policy.get("token") or token_of(step),
            "path": str(path),
            "manifest_digest": digest,
            "wait": wait,
            "deadline_s": deadline_s,
        }
        return self.client.post("/v1/publish", body, deadline_s=deadline_s + 5)

    def generate(self, name: str, **fields: Any) -> list[dict[str, Any]]:
        body = {
            "request_id": name,
            "input_ids": [3, 4, 5],
            "n": 2,
            "sampling": {"max_new_tokens": 8, "ignore_eos": True},
            "seeds": None,
            "timeout_s": 60.0,
            **fields,
        }
        return self.client.post("/v1/generate", body, deadline_s=70)["samples"]

    def until(self, predicate: Any, timeout_s: float = 60.0) -> float:
        """Seconds until `predicate()` holds."""
        start = time.monotonic()
        while not predicate():
            if time.monotonic() - start > timeout_s:
                raise AssertionError(f"not within {timeout_s} s: {self.status()}")
            if self.process.poll() is not None:
                raise AssertionError(f"serving has ended: {self.log()[-2000:]}")
            time.sleep(0.05)
        return time.monotonic() - start

    def until_served(self, version: int) -> float:
        return self.until(
            lambda: all(e["state"] == "serving" and e["version"] == version for e in self.engines())
        )

    def log(self) -> str:
        return (self.folder.path / "role.log").read_text()

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        lines = self.folder.events.read_text().splitlines()
        return [e for e in map(json.loads, lines) if kind in (None, e["kind"])]


def fake_engine_program(folder: Path) -> str:
    """For `rollout.engine_python`: runs the fake engine whatever it is asked to run."""
    program = folder / "fake-python"
    command = f'exec {sys.executable} {FAKES / "fake_sglang.py"} "$@"'
    program.write_text(f"#!/bin/sh\nshift\n{command}\n")
    program.chmod(0o755)
    return str(program)


def start_serving(
    run: Path, *, weights: dict[str, Any] | None = None, **rollout: Any
) -> ServingRole:
    """A role that is ready; its engines come up meanwhile."""
    folder = RunFolder(run)
    model = tiny_model(folder.model)
    given = {
        "run": str(run),
        "model": str(model),
        "rollout": {"engines": 2, **rollout},
        "weights": weights or {},
    }
    with open(run / "role.log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, str(FAKES / "serving_host.py"), json.dumps(given)],
            env={
                **os.environ,
                TOKEN_ENV: TOKEN,
                "OMP_NUM_THREADS": "1",
                "XDG_STATE_HOME": str(run / "state"),
            },
            stdout=log,
            stderr=subprocess.STDOUT,
        )

    def url() -> str | None:
        address = folder.role("serving")
        return address.url if address is not None and address.pid == process.pid else None

    role = ServingRole(folder, model, process, RoleClient("serving", url, TOKEN))
    end = time.monotonic() + 20
    while url() is None:
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise AssertionError(f"serving did not start: {role.log()[-2000:]}")
        time.sleep(0.02)
    return role


def end_sessions(run: Path) -> None:
    """End what a killed role has left: its engines, and its warden, which goes with the folder."""
    for session in (run / "state" / "torchtitan_rl_ft" / "sessions").glob("*"):
        for record in EngineRecords(session / "engines.json").read():
            asyncio.run(end_recorded(record, time.monotonic() + 5))
        shutil.rmtree(session, ignore_errors=True)


@contextmanager
def serving_role(run: Path, **rollout: Any) -> Iterator[ServingRole]:
    role = start_serving(run, **rollout)
    try:
        yield role
    finally:
        if role.process.poll() is None:
            role.process.send_signal(signal.SIGTERM)
            role.process.wait(30)
        role.client.close()


@pytest.fixture(scope="session")
def real_serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingRole]:
    """Two real engines that serve a version."""
    # Several tests kill its engines.
    with serving_role(tmp_path_factory.mktemp("serving"), engine_max_restarts=20) as role:
        role.until(lambda: "starting" not in role.states())
        role.publish(0)
        yield role
