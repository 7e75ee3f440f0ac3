"""Faults that a job's own configuration asks for, injected into a real debug job."""

from __future__ import annotations

import json

import pytest
from job_run import Job

from torchtitan_rl_ft.chaos import faults
from torchtitan_rl_ft.chaos.trace import load
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.observability.events import Event, Kind

pytestmark = pytest.mark.timeout(240)

STEPS = 140
"""Long enough for an engine to come back, whatever else the machine does."""

KILL = "kill engine-1 at step 2"
STOP = "stop rollout for 3 s at step 6"
DARK = "blackhole engine-0 for 1 s at step 10"
FAIL = "fail trainer-1 all-reduce at step 14 plus 0.1 s"
NEVER = (
    *("--rollout.health_check_first_wait", "600"),
    *("--rollout.health_check_interval", "600"),
)
"""No check but those at the end of each rollout."""
IN_SERVICE = {"stale", "installing", "serving"}
"""States of an engine that has joined: between versions, or at one."""


@pytest.mark.row("B2")
@pytest.mark.row("G4")
@pytest.mark.row("J4")
def test_a_configured_fault_is_a_real_crash_that_happens_once(tmp_path) -> None:
    with Job(tmp_path / "run") as job:
        plan = json.dumps([KILL, STOP, DARK, FAIL])
        job.start("--training.steps", str(STEPS), "--chaos.enable", "--chaos.faults", plan, *NEVER)
        job.wait_event(Kind.CHAOS, n=7, timeout_s=120)
        # The injector itself is restarted, and injects nothing again.
        faults.kill(job.process_of("chaos"))
        assert job.end(timeout_s=180) == ExitCode.DONE, job.story()
        assert job.attempts("chaos") == 2
        assert job.step() == STEPS

        kill, stop, dark, fail = [e for e in job.events(Kind.CHAOS) if e.phase == "inject"]
        assert [e.cause for e in (kill, stop, dark, fail)] == [KILL, STOP, DARK, FAIL]
        check_kill(job, kill)
        check_stop(job, stop)
        check_dark(job, dark)
        check_fail(job, fail)
        assert [f.deed for f in load(job.folder.events)] == [
            "kill engine-1",
            "stop rollout for 3 s",
            "blackhole engine-0 for 1 s",
            "fail trainer-1 all-reduce",
        ]
        found = job.audit()
        assert found.problems == []
        assert [c.step for c in found.history] == list(range(1, STEPS + 1))
        assert job.left() == []


def check_kill(job: Job, kill: Event) -> None:
    victim = job.events(Kind.SPAWN, subject="engine-1")[0].data
    assert (kill.data["pid"], kill.data["start_time"]) == (victim["pid"], victim["start_time"])
    commits = {e.step: e.mono_s for e in job.events(Kind.COMMIT)}
    assert kill.data["planned_mono_s"] == commits[2]
    assert commits[2] < kill.mono_s < commits[2] + 5
    # Registered and in service when it was hit, and nobody had been told.
    assert kill.data["listed"] in IN_SERVICE
    moves = job.events(Kind.TRANSITION, subject="engine-1")
    before = [e.data["new"] for e in moves if e.mono_s < kill.mono_s]
    assert before[-1] in IN_SERVICE and "retired" not in before
    # One recovery: one exit, one restart, one engine that serves again.
    [ended] = [e for e in job.events(Kind.EXIT, subject="engine-1") if e.phase == "fault"]
    assert ended.data["pid"] == victim["pid"]
    assert kill.mono_s < ended.mono_s < kill.mono_s + 5
    assert len(job.events(Kind.RESTART, subject="engine-1")) == 1
    # Retired before the trainer could receive a batch that was complete after the kill.
    retired = next(e.mono_s for e in moves if e.data["new"] == "retired")
    sealed = [e.mono_s for e in job.events(Kind.SEAL)]
    assert retired - kill.mono_s < 2
    assert not [t for t in sealed if kill.mono_s + 0.2 < t < retired]
    after = [e.data["new"] for e in moves if e.mono_s > ended.mono_s]
    assert "serving" in after
    summary = job.out().partition("\noutcome ")[2]
    assert "engine-1: " in summary
    assert f"injected: {KILL}" in summary


def check_stop(job: Job, stop: Event) -> None:
    """It stood still for the time, and was not restarted."""
    lift = lift_of(job, stop)
    assert 3 <= lift.mono_s - stop.mono_s < 7
    others = [e for e in job.events() if e.name == "rollout" and e.pid == stop.data["pid"]]
    assert not [e for e in others if stop.mono_s + 0.3 < e.mono_s < lift.mono_s - 0.3]
    assert job.attempts("rollout") == 1


def check_dark(job: Job, dark: Event) -> None:
    """For so long it answered nothing; then it went on, and nobody took it for dead."""
    lift = lift_of(job, dark)
    assert 1 <= lift.mono_s - dark.mono_s < 3
    answers = [e.mono_s for e in job.events(Kind.INSTALL, subject="engine-0")]
    assert not [t for t in answers if dark.mono_s + 0.3 < t < lift.mono_s - 0.1]
    assert [t for t in answers if t > lift.mono_s]
    assert job.attempts("engine-0") == 1


def check_fail(job: Job, fail: Event) -> None:
    """One attempt was refused by both groups, whose processes stay; the same batch was trained."""
    commits = {e.step: e.mono_s for e in job.events(Kind.COMMIT)}
    assert fail.data["planned_mono_s"] == pytest.approx(commits[14] + 0.1)
    refused = [e for e in job.events(Kind.REFUSE) if e.mono_s > fail.mono_s]
    assert {e.name for e in refused} == {"trainer-0", "trainer-1"}
    assert lift_of(job, fail).mono_s > fail.mono_s
    assert job.attempts("trainer-0") == job.attempts("trainer-1") == 1


def lift_of(job: Job, inject: Event) -> Event:
    [lift] = [e for e in job.events(Kind.CHAOS) if e.phase == "lift" and e.cause == inject.cause]
    return lift
