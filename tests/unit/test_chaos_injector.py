"""From the events of a run to injected faults: once, on the right process, remembered."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from torchtitan_rl_ft.chaos.injector import Injector
from torchtitan_rl_ft.chaos.memory import Memory
from torchtitan_rl_ft.chaos.plan import parse
from torchtitan_rl_ft.chaos.schedule import Schedule, keyed
from torchtitan_rl_ft.chaos.targets import Targets
from torchtitan_rl_ft.config.sections import ChaosSection, Sections
from torchtitan_rl_ft.observability.events import Event, EventLog, Kind, read_events
from torchtitan_rl_ft.roles.job import role_specs
from torchtitan_rl_ft.run_folder import ProcessId, RoleAddress, RunFolder

ENGINE = """
import subprocess, sys, time
subprocess.Popen(["sglang::scheduler", "-c", "import time; time.sleep(600)"],
                 executable=sys.executable)
print("up", flush=True)
time.sleep(600)
"""


TRAINER = """
import json, subprocess, sys, time
for name in ("trainer-0.0", "trainer-0.1"):
    settings = json.dumps({"name": name, "kind": "source"})
    module = "torchtitan_rl_ft.weights.holder"
    subprocess.Popen(["python", "-c", "import time; time.sleep(600)", "-m", module, settings],
                     executable=sys.executable)
print("up", flush=True)
time.sleep(600)
"""
"""A group of two ranks, with their sources."""

RELAY = "import time; print('up', flush=True); time.sleep(600)"


class Run:
    """A run folder with stand-ins for its processes."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path)
        self.log = EventLog(self.folder.events, run="r", role="supervisor", name="supervisor")
        self.engines: list[dict[str, Any]] = []
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        self.log.emit(Kind.RUN, phase="start")

    def spawn(self, name: str, script: str = ENGINE) -> ProcessId:
        started = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        assert started.stdout is not None
        started.stdout.readline()
        found = ProcessId.of(started.pid)
        self.started.append(started)
        self.log.emit(Kind.SPAWN, subject=name, pid=found.pid, start_time=found.start_time)
        return found

    def injector(self, *lines: str, seed: int = 0) -> Injector:
        names = ["engine-0", "engine-1", "engine-2", "trainer-0", "relay-0"]
        events = EventLog(self.folder.events, run="r", role="chaos", name="chaos")
        return Injector(
            self.folder,
            Schedule(keyed([parse(line) for line in lines]), time.monotonic()),
            Targets(self.folder, names, self.status, seed),
            Memory(self.folder),
            events,
        )

    def status(self) -> dict[str, Any] | None:
        return {"engines": self.engines} if self.engines else None

    def serves(self, slot: int, process: ProcessId) -> None:
        self.engines.append(
            {"slot": slot, "state": "serving", "pid": process.pid, "start_time": process.start_time}
        )

    def end(self) -> None:
        """End what was started, with its children."""
        for started in self.started:
            for child in children(started.pid):
                child.kill()
            started.kill()
            started.wait()
        self.log.close()

    def seen(self, kind: Kind = Kind.CHAOS, phase: str | None = "inject") -> list[Event]:
        return [e for e in read_events(self.folder.events) if (e.kind, e.phase) == (kind, phase)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    found = Run(tmp_path / "run")
    yield found
    found.end()


def children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def until(predicate: Callable[[], object], timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not predicate():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def running(injector: Injector) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=injector.run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(10)
        assert not thread.is_alive()


def stopped(process: ProcessId) -> bool:
    return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED


@pytest.mark.row("J4")
def test_a_fault_strikes_once_while_its_victim_is_listed(run: Run) -> None:
    run.start()
    engine = run.spawn("engine-1")
    run.serves(1, engine)
    line = "kill engine-1 at step 2"
    with running(run.injector(line)):
        run.log.emit(Kind.COMMIT, step=1)
        time.sleep(0.1)
        assert engine.alive() and run.seen() == []
        run.log.emit(Kind.COMMIT, step=2)
        until(lambda: not engine.alive())
        again = run.spawn("engine-1")
        run.engines[0].update(pid=again.pid, start_time=again.start_time)
        run.log.emit(Kind.COMMIT, step=3)
        time.sleep(0.1)
    [event] = run.seen()
    commit = run.seen(Kind.COMMIT, None)[1]
    assert (event.cause, event.data["subject"], event.data["fault"]) == (line, "engine-1", "kill")
    assert (event.data["pid"], event.data["start_time"]) == (engine.pid, engine.start_time)
    assert event.data["listed"] == "serving"
    assert event.data["planned_mono_s"] == commit.mono_s
    assert 0 <= event.data["late_s"] < 5
    # Neither a restarted injector nor a resumed job has it again; a new run has.
    run.log.emit(Kind.RUN, phase="resume")
    run.log.emit(Kind.COMMIT, step=4)
    run.injector(line).tick()
    assert again.alive()
    run.start()
    run.injector(line).tick()
    assert again.alive()
    run.log.emit(Kind.COMMIT, step=2)
    run.injector(line).tick()
    until(lambda: not again.alive())


def test_parts_of_engines_and_roles(run: Run) -> None:
    run.start()
    engine, lone = run.spawn("engine-0"), run.spawn("serving")
    [scheduler] = children(engine.pid)
    [child] = children(lone.pid)
    injector = run.injector("kill engine-0.scheduler after 0.01 s", "kill serving after 0.01 s")
    time.sleep(0.02)
    injector.tick()  # serving does not answer: the events tell who it is
    until(lambda: not psutil.pid_exists(scheduler.pid) or scheduler.status() == "zombie")
    assert engine.alive()
    until(lambda: not lone.alive())
    assert child.is_running()  # a role is killed alone
    child.kill()
    assert [e.data["subject"] for e in run.seen()] == ["engine-0.scheduler", "serving"]


def source_of(trainer: ProcessId, rank: str) -> psutil.Process:
    [found] = [p for p in children(trainer.pid) if f'"{rank}"' in p.cmdline()[-1]]
    return found


def test_holders_of_weights(run: Run) -> None:
    run.start()
    trainer, relay = run.spawn("trainer-0", TRAINER), run.spawn("relay-0", RELAY)
    first, second = (source_of(trainer, f"trainer-0.{rank}") for rank in range(2))
    lines = [
        "kill source of trainer-0.1 at step 1",
        "stop source of any trainer for 0.2 s at step 2",
        "kill any relay at step 3",
    ]
    with running(run.injector(*lines)):
        run.log.emit(Kind.COMMIT, step=1)
        until(lambda: second.status() == psutil.STATUS_ZOMBIE)
        run.log.emit(Kind.COMMIT, step=2)
        until(lambda: first.status() == psutil.STATUS_STOPPED)
        assert not stopped(trainer)
        until(lambda: run.seen(phase="lift"))
        run.log.emit(Kind.COMMIT, step=3)
        until(lambda: not relay.alive())
    assert trainer.alive() and first.status() != psutil.STATUS_STOPPED
    names = ["source of trainer-0.1", "source of trainer-0", "relay-0"]
    assert [e.data["subject"] for e in run.seen()] == names


def test_the_supervisor_is_found_by_its_registration(run: Run) -> None:
    run.start()
    supervisor = run.spawn("somebody else")
    [child] = children(supervisor.pid)
    name, host = "supervisor", socket.gethostname()
    run.folder.announce(RoleAddress(name, "", supervisor.pid, supervisor.start_time, 1, host))
    run.folder.announce(RoleAddress("rollout", "", child.pid, 0.0, 1, host))  # an old one
    injector = run.injector("kill supervisor after 0.01 s", "kill rollout after 0.01 s")
    time.sleep(0.02)
    injector.tick()
    until(lambda: not supervisor.alive())
    assert child.is_running()
    child.kill()


def test_any_engine_is_drawn_from_the_seed(run: Run) -> None:
    run.start()
    for slot in range(3):
        run.serves(slot, run.spawn(f"engine-{slot}"))

    def drawn(seed: int) -> str:
        targets = run.injector(seed=seed)._targets
        victim = targets.resolve("any engine", "kill any engine at step 1 #1")
        assert victim is not None
        return victim.name

    assert [drawn(s) for s in range(8)] == [drawn(s) for s in range(8)]
    assert len({drawn(s) for s in range(20)}) == 3


def test_a_stop_is_over_in_time_and_with_the_injector(run: Run) -> None:
    run.start()
    one, two = run.spawn("trainer-0"), run.spawn("rollout")
    with running(run.injector("stop trainer-0 for 0.3 s after 0.01 s", "stop rollout after 1 s")):
        until(lambda: stopped(one))
        until(lambda: not stopped(one))
        until(lambda: stopped(two))
    assert not stopped(two)
    [first, second] = run.seen(phase="lift")
    assert (first.data["subject"], second.data["subject"]) == ("trainer-0", "rollout")
    injected = run.seen()[0]
    assert 0.3 <= first.mono_s - injected.mono_s < 5
    assert Memory(run.folder).held == {}


def test_the_next_injector_lets_go_of_what_a_killed_one_held(run: Run) -> None:
    run.start()
    victim = run.spawn("rollout")
    first = run.injector("stop rollout after 0.01 s")
    time.sleep(0.02)
    first.tick()  # and is never told to end
    until(lambda: stopped(victim))
    assert len(Memory(run.folder).held) == 1
    with running(run.injector("stop rollout after 0.01 s")):
        until(lambda: not stopped(victim))
        time.sleep(0.1)
    assert not stopped(victim)
    assert len(run.seen()) == 1
    assert Memory(run.folder).held == {}
    first._ended.set()


def test_a_missing_victim_is_waited_for(run: Run) -> None:
    run.start()
    with running(run.injector("kill engine-0 at step 1")):
        run.log.emit(Kind.COMMIT, step=1)
        time.sleep(0.2)
        engine = run.spawn("engine-0")
        until(lambda: not engine.alive())
    assert run.seen()[0].data["late_s"] >= 0.2


def test_what_cannot_be_done_is_said_once(run: Run) -> None:
    run.start()
    engine = run.spawn("engine-0")
    injector = run.injector("blackhole engine-0 after 0.01 s")
    time.sleep(0.02)
    injector.tick()
    injector.tick()
    assert engine.alive() and run.seen() == []
    [warning] = run.seen(Kind.WARN, None)
    assert f"engine-0 (pid {engine.pid}) was not started behind a proxy" in (warning.cause or "")


def test_a_role_behind_a_black_hole_is_found_again(run: Run) -> None:
    run.start()
    serving = run.spawn("serving")
    address = RoleAddress(
        "serving", "http://127.0.0.1:9", serving.pid, serving.start_time, 1, socket.gethostname()
    )
    run.folder.announce(address)
    with running(run.injector("blackhole serving for 0.3 s after 0.01 s")):
        until(lambda: run.folder.role("serving") != address)
        aside = run.folder.role("serving")
        assert aside is not None and aside.pid == serving.pid and aside.alive()
        until(lambda: run.folder.role("serving") == address)
    assert len(run.seen(phase="lift")) == 1


def test_a_memory_that_cannot_be_read_is_not_started_over(run: Run) -> None:
    (run.folder.path / "chaos.json").write_text('{"struck":')
    with pytest.raises(ValueError, match="remove it to have them all again"):
        Memory(run.folder)


def test_the_injector_is_one_more_role_of_a_job_that_asks_for_it(tmp_path: Path) -> None:
    sections = Sections(chaos=ChaosSection(enable=True, faults=["kill engine-1 at step 2"]))
    folder = RunFolder(tmp_path)
    [spec] = [s for s in role_specs(sections, folder) if s.name == "chaos"]
    assert spec.argv[-4:] == ("--role", "chaos", "--run-folder", str(folder.path))
    assert "chaos" not in [s.name for s in role_specs(Sections(), folder)]
