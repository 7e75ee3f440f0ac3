"""Standby trainers under the real supervisor: killed again and again, on real trainers."""

import os
import signal
import statistics
import sys
import time
from pathlib import Path

import pytest
from job_run import SUPERVISOR, Job
from trainer_run import assert_each_step_once

from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.observability.events import Kind
from torchtitan_rl_ft.run_folder import ProcessId

pytestmark = [pytest.mark.timeout(300), pytest.mark.row("M3")]

TRAINERS_JOB = str(Path(__file__).parents[1] / "fakes" / "trainers_job.py")
GROUP, STANDBY = "trainer-1", "standby-0"
LIMIT_S = 120.0


def ready(job: Job, other_than: int = 0) -> ProcessId:
    """The standby, once it waits."""

    def waits() -> bool:
        role = job.folder.role(STANDBY)
        return role is not None and role.alive() and role.pid != other_than

    job.wait_for(waits, "a standby", LIMIT_S)
    role = job.folder.role(STANDBY)
    return ProcessId(role.pid, role.start_time)


def kill(*targets: ProcessId) -> float:
    """When: a monotonic time."""
    at_s = time.monotonic()
    for target in targets:
        os.kill(target.pid, signal.SIGKILL)
    return at_s


def commits_again(job: Job, killed_s: float) -> float:
    """Seconds from the kill to the first commit that the group reports."""

    def reports():
        phases = job.events(Kind.PHASE)
        return [e for e in phases if e.name == GROUP and e.phase == "report"]

    def after():
        return [e for e in reports() if e.mono_s > killed_s]

    job.wait_for(after, f"{GROUP} to commit again", LIMIT_S)
    return after()[0].mono_s - killed_s


def both_train(job: Job) -> None:
    step = job.step()
    job.wait_for(
        lambda: any(m["step"] > step and m["participants"] == 2 for m in job.metrics()[-20:]),
        "both groups to train",
        LIMIT_S,
    )


def test_kills_of_a_group_of_its_standby_of_both_and_of_the_supervisor(tmp_path):
    (tmp_path / "run").mkdir()
    with Job(tmp_path / "run") as job:
        job.spawn(
            SUPERVISOR,
            *(sys.executable, TRAINERS_JOB, "--job.dump_folder", str(job.folder.path)),
            *("--training.steps", "100000", "--recovery.standby", "spare"),
            *("--recovery.replica_hash_interval", "1", "--recovery.role_max_restarts", "10"),
        )
        promoted_s = []
        standby = ready(job)
        for n in range(1, 4):
            both_train(job)
            promoted_s.append(commits_again(job, kill(job.process_of(GROUP))))
            assert job.process_of(GROUP) == standby
            assert len(job.events(Kind.PROMOTE, subject=GROUP, standby=STANDBY)) == n
            standby = ready(job, other_than=standby.pid)
        assert not job.events(Kind.RESTART)

        kill(standby)
        job.wait_event(Kind.RESTART, subject=STANDBY)
        standby = ready(job, other_than=standby.pid)
        assert len(job.events(Kind.EXIT)) == 4  # nothing else was touched
        both_train(job)

        cold_s = commits_again(job, kill(standby, job.process_of(GROUP)))
        assert job.process_of(GROUP) != standby
        assert len(job.events(Kind.PROMOTE)) == 3
        assert statistics.median(promoted_s) < 0.5 * cold_s

        both_train(job)
        members = [e.data["members"] for e in job.events(Kind.QUORUM)]
        assert {m for each in members for m in each} == {
            "torchtitan_ft_00000",
            "torchtitan_ft_00001",
        }
        standby = ready(job, other_than=standby.pid)
        status = job.command("status", str(job.folder.path)).stdout
        assert f"{STANDBY}  process {standby.pid}" in status
        job.kill()  # the supervisor: its death is the end of the standby, too
        job.wait_for_none_alive(within_s=20.0)
        assert not standby.alive()
        assert not job.audit().problems
        assert_each_step_once(job)
        # A standby that is just dying may still have been asked.
        faults = [e for e in job.events(Kind.FAULT) if e.data.get("subject") != STANDBY]
        assert not faults, job.story()
        assert not job.left(within_s=10.0)


def test_a_group_is_replaced_in_the_place_of_an_engine_which_comes_back(tmp_path):
    with Job(tmp_path / "run") as job:
        job.start("--training.steps", "100000", "--recovery.standby", "from_rollout")
        standby = ready(job)
        job.wait_event(Kind.READY, 2, LIMIT_S, adopted=False)
        both_train(job)
        commits_again(job, kill(job.process_of(GROUP)))
        assert job.process_of(GROUP) == standby

        (lent,) = job.events(Kind.LEND)[:1]
        assert (lent.phase, GROUP in lent.cause) == ("lend", True)
        slot = lent.data["subject"]
        job.wait_for(
            lambda: [e.phase for e in job.events(Kind.LEND)] == ["lend", "return"], "the return"
        )
        returned = job.events(Kind.LEND)[-1]
        assert returned.data["subject"] == slot
        job.wait_for(
            lambda: any(
                e.mono_s > returned.mono_s
                for e in job.events(Kind.TRANSITION, subject=slot, new="serving")
            ),
            f"{slot} to serve again",
            LIMIT_S,
        )
        both_train(job)
        job.interrupt()
        assert job.end() == ExitCode.INTERRUPTED, job.story()
        assert not job.audit().problems
        assert not job.left(within_s=10.0)
