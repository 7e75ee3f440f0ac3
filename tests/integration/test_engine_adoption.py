"""A serving role that was killed: the next one takes its engines over. And one whose engines are
beyond help. Fake engines, real roles."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import (
    ServingRole,
    end_sessions,
    fake_engine_program,
    living,
    start_serving,
    tree_of,
)
from safetensors.numpy import load_file, save_file

from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.models.tiny import make_tiny_model
from torchtitan_rl_ft.run_folder import ProcessId


def crash(role: ServingRole) -> float:
    role.process.kill()
    role.process.wait(10)
    role.client.close()
    return time.monotonic()


class Run:
    """Serving roles, one after the other, in one run folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._settings = {
            "engine_python": fake_engine_program(folder),
            "engine_start_timeout_s": 20.0,
            "install_timeout_s": 10.0,
            "cleanup_timeout": 5.0,
        }
        self._last: ServingRole | None = None

    @property
    def records(self) -> Path:
        """What the session knows of its engines; gone with it."""
        sessions = self._folder / "state" / "torchtitan_rl_ft" / "sessions"
        return next(sessions.glob("*/engines.json"), sessions / "none")

    def start(self, **settings: Any) -> ServingRole:
        self._settings |= settings
        self._last = start_serving(self._folder, **self._settings)
        return self._last

    def started(self, **settings: Any) -> ServingRole:
        """With all engines serving version 1, or in standby."""
        role = self.start(**settings)
        role.until(lambda: not {"starting", "retired"} & set(role.states()))
        role.publish(0)
        return role

    def close(self) -> None:
        """End the role, or what a killed one has left."""
        assert self._last is not None
        if self._last.process.poll() is None:
            self._last.process.send_signal(signal.SIGTERM)
            self._last.process.wait(20)
        self._last.client.close()
        end_sessions(self._folder)


@contextmanager
def run_in(folder: Path) -> Iterator[Run]:
    run = Run(folder)
    try:
        yield run
    finally:
        run.close()


def pids(role: ServingRole) -> list[int]:
    return [e["pid"] for e in role.engines()]


def calls(engine: dict[str, Any]) -> list[str]:
    return [path for _, path in httpx.get(engine["url"] + "/calls").json()]


@pytest.mark.row("D1")
@pytest.mark.row("D2")
@pytest.mark.row("D9")
def test_engines_outlive_a_killed_role_and_serve_under_the_next_one(tmp_path: Path) -> None:
    """Same processes, no load; the version stays and goes on growing; then an orderly end."""
    with run_in(tmp_path) as run:
        first = run.started()
        before = first.engines()
        trees = tree_of(before[0]["pid"]) | tree_of(before[1]["pid"])
        crash(first)
        assert living(trees) == trees
        second = run.start()
        second.until_served(1)
        after = second.engines()
        for name in ("pid", "start_time", "url", "log"):
            assert [e[name] for e in after] == [e[name] for e in before]
        assert [e["restarts"] for e in after] == [0, 0]
        assert [calls(e).count("/update_weights_from_disk") for e in after] == [1, 1]
        assert {v for s in second.generate("r") for v in s["versions"]} == {1}
        assert second.publish(0)["version"] == 1
        assert second.publish(1, scale=1.1) == {"version": 2, "installed": [0, 1]}
        # An adopted engine that dies is noticed and replaced like any other.
        os.kill(before[1]["pid"], signal.SIGKILL)
        second.until(lambda: second.engines()[1]["pid"] not in (None, before[1]["pid"]))
        second.until_served(2)
        [exit_event] = second.events("exit")
        assert exit_event["cause"] == "ended, exit code unknown (it was adopted) while serving"
        assert "returncode" not in {k for k, v in exit_event["data"].items() if v is not None}
        trees |= tree_of(second.engines()[1]["pid"])
        assert second.client.post("/v1/shutdown", {}, deadline_s=20) == {}
        assert second.process.wait(10) == 0
        assert not living(trees)
        assert not list((tmp_path / "serving").glob("engine-*"))


def test_an_engine_in_any_state_is_brought_to_the_version(tmp_path: Path) -> None:
    """One left paused, one half updated, both with requests of the dead role."""
    with run_in(tmp_path) as run:
        first = run.started(engines=3)
        engines = first.engines()
        for engine in engines[:2]:
            httpx.post(engine["url"] + "/fault", json={"token_s": 0.2})
        asking = threading.Thread(target=lambda: _lost(first), daemon=True)
        asking.start()
        first.until(lambda: first.status()["in_flight"] >= 16)
        crash(first)
        installed = len(first.events("install"))
        httpx.post(engines[0]["url"] + "/pause_generation", json={"mode": "retract"})
        httpx.post(engines[1]["url"] + "/fault", json={"half_sync": True})
        httpx.post(engines[1]["url"] + "/pause_generation", json={"mode": "retract"})
        weights = next((tmp_path / "weights").glob("step-*"))
        other = tmp_path / "other"
        _scaled(weights, other)
        body = {"model_path": str(other), "weight_version": "2"}
        assert not httpx.post(engines[1]["url"] + "/update_weights_from_disk", json=body).json()[
            "success"
        ]
        httpx.post(engines[1]["url"] + "/fault", json={"half_sync": False})
        second = run.start()
        second.until_served(1)
        assert pids(second) == [e["pid"] for e in engines]
        slots = [e["data"] for e in second.events("install")][installed:]
        loads = {s["slot"]: s["load_ms"] for s in slots}
        assert loads[0] == loads[2] == 0.0  # proved
        assert loads[1] > 0.0  # had to be loaded
        [warning] = [e for e in second.events("warn") if "has to install" in e["cause"]]
        assert "parameters differ" in warning["cause"]
        for engine in engines:
            assert "/abort_request" in calls(engine)
            httpx.post(engine["url"] + "/fault", json={"token_s": 0})
        assert {v for s in second.generate("r", n=6) for v in s["versions"]} == {1}


def _lost(role: ServingRole) -> None:
    try:
        role.generate("lost", n=16, sampling={"max_new_tokens": 400, "ignore_eos": True})
    except Exception:  # the role is killed while it answers
        return


def _scaled(weights: Path, to: Path) -> None:
    shutil.copytree(weights, to)
    tensors = {n: a * 1.5 for n, a in load_file(to / "model.safetensors").items()}
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.row("B5")
def test_memory_that_the_trainer_has_stays_with_it_over_a_crash(tmp_path: Path) -> None:
    """Nobody takes it back, and nobody is started in its place, before the next version."""
    with run_in(tmp_path) as run:
        first = run.started(placement="colocated")
        before = pids(first)
        assert first.client.post("/v1/release", {"timeout_s": 10.0}, deadline_s=15)["released"]
        crash(first)
        second = run.start()
        second.until(lambda: second.states() == ["stale", "stale"])
        time.sleep(1.0)
        assert pids(second) == before and all(e["released"] for e in second.engines())
        assert second.client.get("/v1/version", deadline_s=10)["serving"] == 2
        for engine in second.engines():
            assert "/resume_memory_occupation" not in calls(engine)
        second.publish(1, scale=1.1)
        assert pids(second) == before and not any(e["released"] for e in second.engines())
        assert {v for s in second.generate("r", n=2) for v in s["versions"]} == {2}


@pytest.mark.timeout(120)
def test_an_adopted_engine_that_is_frozen_has_no_start_before_it(tmp_path: Path) -> None:
    with run_in(tmp_path) as run:
        first = run.started(engine_start_timeout_s=100.0, install_timeout_s=5.0)
        stopped, other = first.engines()
        crash(first)
        os.kill(stopped["pid"], signal.SIGSTOP)
        second = run.start()
        second.until(lambda: stopped["pid"] not in pids(second), timeout_s=40.0)
        [exit_event] = second.events("exit")[-1:]
        assert exit_event["cause"].startswith("was up, and did not answer within 5 s")
        assert other["pid"] in pids(second)


@pytest.mark.timeout(120)
def test_an_adopted_engine_whose_scheduler_hangs_is_waited_for_once(tmp_path: Path) -> None:
    """Its server answers. What cannot show what it holds will not install anything either."""
    with run_in(tmp_path) as run:
        first = run.started(install_timeout_s=4.0)
        hung, other = first.engines()
        crash(first)
        for worker in tree_of(hung["pid"]) - {hung["pid"]}:
            os.kill(worker, signal.SIGSTOP)
        second = run.start()
        second.until(lambda: hung["pid"] not in pids(second), timeout_s=40.0)
        [exit_event] = second.events("exit")[-1:]
        assert exit_event["cause"].startswith("the adopted engine cannot show what it holds")
        assert not [e for e in second.events("fault") if "not installed" in (e["cause"] or "")]
        assert other["pid"] in pids(second)


def test_a_version_announced_before_the_crash_is_installed_after_it(tmp_path: Path) -> None:
    with run_in(tmp_path) as run:
        first = run.started()
        before = pids(first)
        first.publish(1, scale=1.1, wait="none")
        crash(first)
        second = run.start()
        second.until_served(2)
        assert pids(second) == before


def test_only_engines_that_fit_are_adopted(tmp_path: Path) -> None:
    with run_in(tmp_path) as run:
        first = run.started(engines=3)
        before = first.engines()
        trees = [tree_of(e["pid"]) for e in before]
        crash(first)
        os.kill(before[1]["pid"], signal.SIGKILL)  # dies while nobody looks
        records = json.loads(run.records.read_text())
        records["2"]["fingerprint"] = "of another command line"
        run.records.write_text(json.dumps(records))
        second = run.start()
        second.until_served(1)
        after = pids(second)
        assert after[0] == before[0]["pid"]
        assert not set(after[1:]) & {e["pid"] for e in before}
        assert not living(trees[1] | trees[2])
        causes = [e["cause"] for e in second.events("warn")]
        assert any("engine 1 " in c and "ended meanwhile" in c for c in causes)
        assert any("engine 2 " in c and "another command line" in c for c in causes)


def test_a_standby_engine_stays_one(tmp_path: Path) -> None:
    with run_in(tmp_path) as run:
        first = run.started(engines=1, standby_engines=1)
        first.until(lambda: first.states() == ["serving", "standby"])
        before = pids(first)
        crash(first)
        os.kill(before[0], signal.SIGKILL)
        second = run.start()
        second.until(lambda: second.states()[1] == "serving", 5)
        assert pids(second)[1] == before[1]
        assert [e["duty"] for e in second.engines()] == ["standby", "active"]
        # And the promotion holds after the next crash.
        second.until(lambda: second.states() == ["standby", "serving"])
        before = pids(second)
        crash(second)
        third = run.start()
        third.until(lambda: third.states() == ["standby", "serving"])
        assert pids(third) == before
        assert calls(third.engines()[0]).count("/update_weights_from_disk") == 0


def test_a_stranger_with_a_recorded_pid_is_left_alone(tmp_path: Path) -> None:
    """The machine has given the pid out again: pid and start time have to agree."""
    with run_in(tmp_path) as run:
        crash(run.started(engines=1))
        records = json.loads(run.records.read_text())
        real = ProcessId(records["0"]["pid"], records["0"]["start_time"])
        me = ProcessId.current()
        records["0"]["processes"][0] = {"pid": me.pid, "start_time": 1.0, "log": "/dev/null"}
        run.records.write_text(json.dumps(records))
        second = run.start()
        second.until_served(1)
        assert not real.alive()  # still a member of the recorded engine
        assert me.alive()


def test_unreadable_records_end_the_role_with_what_to_do(tmp_path: Path) -> None:
    with run_in(tmp_path) as run:
        crash(run.started(engines=1))
        whole = run.records.read_bytes()
        run.records.write_bytes(whole[:40])
        with pytest.raises(AssertionError, match=r"engines\.json cannot be read"):
            run.start()
        run.records.write_bytes(whole)


@pytest.mark.row("C12")
@pytest.mark.scenario("W-4")
def test_a_role_whose_engines_are_all_beyond_help_ends_with_the_cause(tmp_path: Path) -> None:
    """Both are killed and replacements die at once: an exit code, the log, no endless wait."""
    with run_in(tmp_path) as run:
        role = run.started(engine_max_restarts=2)
        weights = sorted(p for p in (tmp_path / "weights").rglob("*") if p.is_file())
        broken = "#!/bin/sh\necho no device is left\nexit 5\n"
        (tmp_path / "fake-python").write_text(broken)
        for engine in role.engines():
            os.kill(engine["pid"], signal.SIGKILL)
        assert role.process.wait(20) == ExitCode.FAILED
        text = role.log()
        assert "0 of 2 engines are left" in text
        assert "exit code 5 while starting" in text
        assert "no device is left" in text
        assert "attempt_2.log" in text
        assert sorted(p for p in (tmp_path / "weights").rglob("*") if p.is_file()) == weights


@pytest.mark.row("C11")
@pytest.mark.timeout(120)
def test_units_and_frozen_engines_are_taken_over_as_they_are(tmp_path: Path) -> None:
    reference = make_tiny_model(tmp_path / "reference", seed=7)
    groups = [
        {"name": "prefill", "role": "prefill"},
        {"name": "decode", "role": "decode"},
        {"name": "big", "nodes_per_engine": 2, "engine_args": ["--tp-size=2"]},
        {"name": "reference", "role": "frozen", "model": str(reference)},
    ]
    with run_in(tmp_path) as run:
        role = run.started(groups=groups)
        before = role.engines()
        first = role.generate("a", group="decode", seeds=[1, 2])
        frozen = role.generate("b", group="reference", seeds=[1, 2])
        crash(role)
        again = run.start()
        again.until(lambda: again.states() == ["serving"] * 4)
        after = again.engines()
        assert [e["pid"] for e in after] == [e["pid"] for e in before]
        assert after[0]["bootstrap_port"] == before[0]["bootstrap_port"] is not None
        assert [e["digest"] for e in after] == [e["digest"] for e in before]
        same = again.generate("c", group="decode", seeds=[1, 2])
        assert [s["output_ids"] for s in same] == [s["output_ids"] for s in first]
        same = again.generate("d", group="reference", seeds=[1, 2])
        assert [s["output_ids"] for s in same] == [s["output_ids"] for s in frozen]
        assert "/update_weights_from_disk" not in calls(after[3])
        # The nodes are still one engine, and the halves one unit.
        nodes = json.loads(run.records.read_bytes())["2"]["processes"]
        assert len(nodes) == 2
        os.kill(nodes[1]["pid"], signal.SIGKILL)
        os.kill(after[1]["pid"], signal.SIGKILL)
        pids_before = {e["pid"] for e in after[:3]}
        again.until(
            lambda: (
                again.states() == ["serving"] * 4
                and not pids_before & {e["pid"] for e in again.engines()}
            )
        )
        assert living(pids_before) == set()
        assert again.engines()[3]["pid"] == before[3]["pid"]
        assert again.generate("e", group="prefill", seeds=[1, 2])
