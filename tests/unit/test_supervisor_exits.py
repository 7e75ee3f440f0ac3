"""What SIGTERM does to a keeper: stand-in roles, real processes and signals."""

import signal
import time

import pytest
from test_supervisor_keeper import Job, end_all, sh

from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.observability.events import Kind
from torchtitan_rl_ft.roles.exits import SAME_SIGNAL_S

STUBBORN = sh("trap '' TERM; while :; do sleep 0.05; done")


@pytest.fixture
def start(tmp_path):
    jobs = []

    def make(driver, worker, **options):
        roles = [("rollout", "driver", driver), ("trainer-0", "worker", worker)]
        jobs.append(Job(tmp_path, roles, **options))
        for name, _, _ in roles:
            jobs[-1].wait_for(Kind.SPAWN, name)
        time.sleep(0.3)  # the stand-ins set their traps
        return jobs[-1]

    yield make
    end_all(jobs)


def ends_when_asked(folder, code):
    """A role that heeds what the ledger was asked, not signals."""
    return sh(
        f"trap '' TERM; while [ ! -e {folder}/asked ]; do sleep 0.02; done; sleep 0.3; exit {code}"
    )


@pytest.mark.row("H1")
def test_sigterm_asks_and_the_run_ends_with_the_code_to_be_started_again(start, tmp_path):
    both = [ends_when_asked(tmp_path, 75)] * 2
    job = start(*both, graceful=[30, 30])
    for _ in range(2):  # the same signal, to the process and its group
        job.process.send_signal(signal.SIGTERM)
    assert job.outcome()[:2] == (ExitCode.REQUEUE, "to be started again")
    assert (tmp_path / "asked").read_text() == "SIGTERM to the supervisor"
    assert [e.phase for e in job.events(Kind.EXIT)] == ["finished", "finished"]
    assert not job.events(Kind.RESTART)


def test_a_trainer_that_dies_on_the_way_to_the_boundary_is_not_started_again(start, tmp_path):
    job = start(ends_when_asked(tmp_path, 75), ends_when_asked(tmp_path, 1), graceful=[30, 30])
    job.process.send_signal(signal.SIGTERM)
    assert job.outcome()[0] == ExitCode.REQUEUE
    assert not job.events(Kind.RESTART)


def test_without_a_boundary_the_run_ends_at_the_limit_and_goes_on_from_its_checkpoint(start):
    job = start(STUBBORN, STUBBORN, graceful=[1.0, 1.0])
    job.process.send_signal(signal.SIGTERM)
    code, cause, _ = job.outcome()
    assert code == ExitCode.REQUEUE
    assert cause == "no step boundary within 1 s: goes on from the newest checkpoint"


@pytest.mark.row("H6")
def test_a_second_sigterm_leaves_a_save_a_bounded_time(start):
    job = start(STUBBORN, STUBBORN, graceful=[60.0, 0.5])
    job.process.send_signal(signal.SIGTERM)
    time.sleep(SAME_SIGNAL_S + 0.5)
    job.process.send_signal(signal.SIGTERM)
    code, cause, _ = job.outcome()
    assert code == ExitCode.REQUEUE and cause.startswith("SIGTERM again, and not saved within")


def test_ctrl_c_is_the_end_at_once_all_the_same(start):
    job = start(sh("exec sleep 600"), sh("exec sleep 600"), graceful=[60.0, 60.0])
    job.process.send_signal(signal.SIGTERM)
    job.process.send_signal(signal.SIGINT)
    assert job.outcome()[:2] == (ExitCode.INTERRUPTED, "stopped by SIGINT")


@pytest.mark.row("L2")
def test_a_group_that_has_left_is_not_started_again_and_the_run_goes_on(start):
    job = start(sh("sleep 1.5; exit 0"), sh("exit 75"))
    assert job.outcome()[0] == ExitCode.DONE
    assert not job.events(Kind.RESTART)
    (left,) = [e for e in job.events(Kind.EXIT) if e.data["subject"] == "trainer-0"]
    assert left.phase == "finished"
