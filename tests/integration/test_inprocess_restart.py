"""Restart inside the living process: the same pid, nothing imported again, healed bitwise. Groups
of several ranks: test_wedged_groups.py."""

import pytest
from trainer_run import TrainerRun, assert_each_step_once, assert_groups_equal

pytestmark = pytest.mark.timeout(300)

RESTARTS = 5


def together(run, n=5):
    """`n` more steps of all groups."""
    run.wait_for(lambda: run.metrics() and run.metrics()[-1]["participants"] == 2, "both groups")
    run.wait_step(len(run.metrics()) + n)


def test_a_failed_step_restarts_in_process_until_that_is_used_up(tmp_path):
    keys = {
        "recovery__inprocess_restart": True,
        "recovery__inprocess_max_restarts": RESTARTS,
        "fault_tolerance__process_group_timeout_ms": 5000,
    }
    with TrainerRun(tmp_path / "run", steps=4000, groups=2, **keys) as run:
        run.start_all(host_args=("--slow-s", "0.05"))
        together(run)
        pids = {name: run.processes[name][0].pid for name in ("trainer-0", "trainer-1")}
        for n in range(RESTARTS):
            run.order(1, ("reduce", "commit", "optimizer", "quorum")[n % 4], act="fail")
            run.wait_for(lambda n=n: len(run.lives(1)) == n + 2, f"restart {n + 1}")
            together(run)
        lives = run.lives(1)
        assert {life["pid"] for life in lives} == {pids["trainer-1"]}
        assert all(life["modules"] == lives[0]["modules"] for life in lives)
        assert all(life["trainers"] == 1 for life in lives), "an old trainer is still held"
        # The first restart starts what a process starts once (autograd's threads), and threads of
        # one old process group may be ending still: what is a leak grows with every restart.
        for held in ("threads", "fds"):
            assert lives[-1][held] <= max(life[held] for life in lives[1:4]), lives
        restarts = [e for e in run.events("restart") if e["name"] == "trainer-1"]
        assert [e["phase"] for e in restarts] == ["in_process"] * RESTARTS
        assert [e["data"]["attempt"] for e in restarts] == list(range(1, RESTARTS + 1))
        assert_each_step_once(run)
        assert sum(e["name"] == "trainer-1" for e in run.events("heal")) >= RESTARTS
        assert_groups_equal(run, (0, 1), at_least=5 * RESTARTS)
        assert run.processes["trainer-0"][0].poll() is None

        run.order(1, "reduce", act="fail")
        assert run.wait_exit("trainer-1") == [1]
        (end,) = [e for e in run.events("escalate") if e["name"] == "trainer-1"]
        assert end["phase"] == "role" and f"{RESTARTS} restarts within" in end["cause"]
        at = len(run.metrics())
        run.wait_step(at + 3)  # the other group goes on
