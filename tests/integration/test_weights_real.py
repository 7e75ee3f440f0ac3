"""Weights of real engines: what goes wrong in the middle of an update."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from conftest import ServingRole

from torchtitan_rl_ft.chaos import faults
from torchtitan_rl_ft.run_folder import ProcessId

pytestmark = pytest.mark.timeout(150)


def process_of(engine: dict[str, Any]) -> ProcessId:
    return ProcessId(engine["pid"], engine["start_time"])


def scheduler_of(engine: dict[str, Any]) -> ProcessId:
    [found] = [
        p.pid
        for p in psutil.Process(engine["pid"]).children(recursive=True)
        if " ".join(p.cmdline()).startswith("sglang::scheduler")
    ]
    return ProcessId.of(found)


@pytest.mark.row("D4")
@pytest.mark.scenario("W-1")
def test_a_real_engine_that_dies_in_an_update_holds_nobody_up(real_serving: ServingRole) -> None:
    """Its scheduler is stopped, so that the death falls into the update for certain."""
    real_serving.publish(200, scale=1.2)
    survivor, victim = real_serving.engines()
    before = real_serving.status()["version"]
    faults.stop(scheduler_of(victim), whole_tree=False)
    with ThreadPoolExecutor(1) as threads:
        publishing = threads.submit(real_serving.publish, 201, scale=1.3)
        real_serving.until(lambda: real_serving.engines()[0]["version"] == before + 1, 20)
        assert real_serving.engines()[1]["state"] == "installing"
        faults.kill(process_of(victim))
        killed = time.monotonic()
        answer = publishing.result(timeout=30)
        assert time.monotonic() - killed < 5.0
    assert answer == {"version": before + 1, "installed": [0]}
    samples = real_serving.generate("after a death in an update")
    assert {(s["engine"], v) for s in samples for v in s["versions"]} == {("engine-0", before + 1)}
    real_serving.until_served(before + 1)
    first, second = real_serving.engines()
    assert (first["pid"], first["restarts"]) == (survivor["pid"], survivor["restarts"])
    assert second["pid"] != victim["pid"]
