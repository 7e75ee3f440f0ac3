"""Standby trainers as the keeper sees them: real processes, small stand-ins."""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from test_supervisor_keeper import FOREVER, Job, end_all, sh

from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.observability.events import EventList, Kind
from torchtitan_rl_ft.observability.jsonl import read_jsonl
from torchtitan_rl_ft.roles.job import role_specs
from torchtitan_rl_ft.roles.lifecycle import Action, Duty, RestartLimits, after_exit
from torchtitan_rl_ft.roles.standby import FirstCommit, OwnPlaces, Standbys, choose
from torchtitan_rl_ft.run_folder import RunFolder

pytestmark = pytest.mark.row("M3")

FAKE = str(Path(__file__).parents[1] / "fakes" / "fake_standby.py")
ROLLOUT = ("rollout", "driver", FOREVER)


class Waiting:
    def __init__(self, name, taken=False, ready=True):
        self.name, self.taken, self.ready = name, taken, ready


@pytest.mark.parametrize(
    ("standbys", "chosen"),
    [
        ([], None),
        ([Waiting("standby-1"), Waiting("standby-0")], "standby-0"),
        ([Waiting("standby-0", taken=True), Waiting("standby-1")], "standby-1"),
        ([Waiting("standby-0", ready=False), Waiting("standby-1")], "standby-1"),
        ([Waiting("standby-0", taken=True), Waiting("standby-1", ready=False)], None),
    ],
)
def test_the_first_ready_and_free_one_is_chosen(standbys, chosen):
    found = choose(standbys, lambda s: s.ready)
    assert (found.name if found is not None else None) == chosen


@pytest.mark.parametrize(
    ("returncode", "restarts_s", "ending", "action"),
    [
        (-9, [], False, Action.RESTART),
        (0, [], False, Action.RESTART),
        (-9, [999.0, 998.0], False, Action.ABANDON),
        (ExitCode.CONFIG, [], False, Action.ABANDON),
        (-15, [], True, Action.STOPPED),
    ],
)
def test_a_standby_that_cannot_be_kept_does_not_end_the_run(returncode, restarts_s, ending, action):
    verdict = after_exit(
        Duty.STANDBY,
        returncode,
        ending=ending,
        now_s=1000.0,
        restarts_s=restarts_s,
        limits=RestartLimits(max_restarts=2, window_s=100.0),
    )
    assert verdict.action is action


def test_a_first_commit_is_one_that_its_group_reports_from_now_on(tmp_path):
    events = tmp_path / "events.jsonl"

    def report(name, mono_s, phase="report"):
        told = {"kind": "phase", "phase": phase, "name": name, "mono_s": mono_s}
        line = told | {"wall_s": time.time(), "run": "r", "role": "trainer", "attempt": 1, "pid": 1}
        with open(events, "a") as f:
            f.write(json.dumps(line) + "\n")

    report("trainer-1", time.monotonic() - 5.0)
    one, any_group = FirstCommit(events, "trainer-1"), FirstCommit(events, "")
    assert not one.seen() and not any_group.seen()
    report("trainer-0", time.monotonic())
    report("trainer-1", time.monotonic(), "quorum")
    assert not one.seen() and any_group.seen()
    report("trainer-1", time.monotonic())
    assert one.seen()


class PlacesTold(OwnPlaces):
    def __init__(self):
        self.forgone = []

    async def forgo(self, place):
        self.forgone.append(place)


def test_one_that_ends_as_it_is_promoted_is_no_group(tmp_path, monkeypatch):
    """Its end was seen while its answer was under way: it may have a successor by then."""
    monkeypatch.setenv("TORCHTITAN_RL_FT_TOKEN", "t")
    events, places = EventList(), PlacesTold()

    class Sleeping(Standbys):
        def _ask(self, standby, body):
            loop.call_soon_threadsafe(self.ended, standby)
            loop.call_soon_threadsafe(self.started, standby.name, 2, None)

        def _ready(self, standby):
            return True

    async def main():
        standbys = Sleeping(RunFolder(tmp_path), events, places)
        first = standbys.started("standby-0", 1, None)
        assert await standbys.promote("trainer-1", "killed") is None
        assert not first.promoted.done()
        assert places.forgone == ["trainer-1"]
        assert not [e for e in events.events if e["kind"] == Kind.PROMOTE]

    loop = asyncio.new_event_loop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())


def test_a_standby_that_is_not_up_yet_is_told_of(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHTITAN_RL_FT_TOKEN", "t")
    events = EventList()

    async def main():
        standbys = Standbys(RunFolder(tmp_path), events)
        assert await standbys.promote("trainer-1", "killed") is None and events.events == []
        standbys.started("standby-0", 1, None)
        assert await standbys.promote("trainer-1", "killed") is None

    asyncio.run(main())
    (told,) = events.events
    assert told["kind"] == Kind.WARN
    assert told["cause"] == "standby-0 not ready: trainer-1 is started anew"


# With processes ---------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHTITAN_RL_FT_TOKEN", "t")
    jobs = []

    def make(roles, **options):
        jobs.append(Job(tmp_path, roles, settle_timeout_s=0.1, **options))
        return jobs[-1]

    yield make
    end_all(jobs)


def waiting(folder, name="standby-0", manner="accept"):
    return (name, "standby", [sys.executable, FAKE, str(folder), name, manner])


def ready(job, name="standby-0", not_pid=None):
    """The pid of a standby that has registered."""
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        role = job.folder.role(name)
        if role is not None and role.alive() and role.pid != not_pid:
            return role.pid
        time.sleep(0.02)
    raise AssertionError(f"{name} has not registered")


def kill(event):
    os.kill(event.data["pid"], signal.SIGKILL)


def test_a_ready_standby_is_the_lost_group_from_then_on(start, tmp_path):
    job = start([ROLLOUT, ("trainer-1", "worker", FOREVER), waiting(tmp_path)], max_restarts=1)
    first = job.wait_for(Kind.SPAWN, "trainer-1")
    pid = ready(job)
    kill(first)
    second = job.wait_for(Kind.SPAWN, "trainer-1", n=2)
    assert (second.phase, second.data["pid"], second.data["attempt"]) == ("promoted", pid, 2)
    promotion = job.wait_for(Kind.PROMOTE, "trainer-1")
    assert promotion.cause == "killed by SIGKILL"
    assert promotion.data["standby"] == "standby-0" and promotion.data["promote_s"] < 5.0
    assert read_jsonl(tmp_path / "promotions.jsonl") == [
        {"replica_id": 1, "attempt": 2, "devices": None, "pid": pid}
    ]
    log = RunFolder(tmp_path).log_file("trainer-1", 2)
    assert log.resolve() == RunFolder(tmp_path).log_file("standby-0", 1)
    assert not job.events(Kind.EXIT, "standby-0") and not job.events(Kind.RESTART)

    assert ready(job, not_pid=pid) != pid  # the next one
    # It counts as a restart of the group, and its end is the group's.
    kill(second)
    exit_code, cause, _ = job.outcome()
    assert exit_code == ExitCode.FAILED and "trainer-1" in cause and "used up" in cause


def test_two_groups_are_lost_at_once_and_one_standby_takes_one_place(start, tmp_path):
    groups = [(f"trainer-{g}", "worker", FOREVER) for g in range(2)]
    job = start([ROLLOUT, *groups, waiting(tmp_path)])
    lost = [job.wait_for(Kind.SPAWN, f"trainer-{g}") for g in range(2)]
    ready(job)
    for event in lost:
        kill(event)
    again = [job.wait_for(Kind.SPAWN, f"trainer-{g}", n=2) for g in range(2)]
    assert sorted(str(e.phase) for e in again) == ["None", "promoted"]
    assert len(read_jsonl(tmp_path / "promotions.jsonl")) == 1


@pytest.mark.parametrize("manner", ["refuse", "mute", "die"])
def test_a_promotion_that_fails_falls_back_to_a_restart(start, tmp_path, manner):
    job = start([ROLLOUT, ("trainer-0", "worker", FOREVER), waiting(tmp_path, manner=manner)])
    first = job.wait_for(Kind.SPAWN, "trainer-0")
    pid = ready(job)
    kill(first)
    second = job.wait_for(Kind.SPAWN, "trainer-0", n=2, timeout_s=20.0)
    assert second.phase is None and second.data["pid"] != pid
    assert job.events(Kind.FAULT, "standby-0")
    job.wait_for(Kind.EXIT, "standby-0")  # noticed on its own, perhaps after the restart
    assert not job.events(Kind.PROMOTE)
    ready(job, not_pid=pid)  # and there is a standby again


def test_a_standby_and_its_group_die_together(start, tmp_path):
    job = start([ROLLOUT, ("trainer-0", "worker", FOREVER), waiting(tmp_path)])
    first = job.wait_for(Kind.SPAWN, "trainer-0")
    pid = ready(job)
    os.kill(pid, signal.SIGKILL)
    kill(first)
    second = job.wait_for(Kind.SPAWN, "trainer-0", n=2, timeout_s=20.0)
    assert second.phase is None
    assert job.wait_for(Kind.EXIT, "standby-0").cause == "killed by SIGKILL"
    ready(job, not_pid=pid)


def test_a_standby_that_does_not_come_up_is_given_up_and_the_run_goes_on(start, tmp_path):
    broken = ("standby-0", "standby", sh("exit 1"))
    job = start([("rollout", "driver", sh("sleep 2")), broken], max_restarts=1)
    job.wait_for(Kind.EXIT, "standby-0", n=2)
    assert job.wait_for(Kind.WARN, "standby-0").cause.startswith("given up")
    assert job.outcome()[0] == ExitCode.DONE
    assert len(job.events(Kind.SPAWN, "standby-0")) == 2


def test_a_job_has_the_standbys_that_it_asks_for(tmp_path):
    from torchtitan_rl_ft.config.resolve import resolve

    def names(*flags):
        resolved = resolve([f"--job.dump_folder={tmp_path}", *flags])
        specs = role_specs(resolved.sections, RunFolder(tmp_path))
        return {s.name: s.env.get("TORCHTITAN_RL_FT_STANDBY") for s in specs if s.env}

    assert names() == {}
    assert names("--recovery.standby=spare", "--recovery.standby_groups=2") == {
        "standby-0": "standby-0:built",
        "standby-1": "standby-1:built",
    }
    assert names("--recovery.standby=from_rollout") == {"standby-0": "standby-0:imported"}
