"""Standby trainers: real TorchTitan, real torchft, a real ledger."""

import time

import psutil
import pytest
from trainer_run import TrainerRun, assert_each_step_once, assert_groups_equal

pytestmark = [pytest.mark.timeout(240), pytest.mark.row("M3")]

IDLE_LOOK_S = 2.0


def cpu_s(processes):
    times = [psutil.Process(p.pid).cpu_times() for p in processes]
    return sum(t.user + t.system for t in times)


def test_a_standby_of_two_ranks_waits_asleep_and_takes_a_lost_groups_place(tmp_path):
    with TrainerRun(tmp_path / "run", steps=100_000, groups=2, ranks=2) as run:
        run.start_all()
        run.start("standby-0")
        run.wait_for(lambda: run.ready("standby-0"), "the standby")
        waiting = run.processes["standby-0"]
        run.wait_step(10)
        before = cpu_s(waiting)
        time.sleep(IDLE_LOOK_S)
        assert cpu_s(waiting) - before < 0.02 * IDLE_LOOK_S * len(waiting)
        assert max(len(e["data"]["members"]) for e in run.events("quorum")) == 2

        run.kill("trainer-1")
        killed_mono_s = time.monotonic()
        run.promote("standby-0", "trainer-1")
        run.wait_for(
            lambda: any(
                e["name"] == "trainer-1" and e["mono_s"] > killed_mono_s for e in run.events("heal")
            ),
            "the promoted group to heal",
        )
        back = len(run.metrics())
        run.wait_step(back + 10)
        assert run.metrics()[-1]["participants"] == 2
        assert_each_step_once(run)
        assert_groups_equal(run, (0, 1), at_least=10)
        assert run.probe(1)[max(run.probe(1))]["step"] > back
        healed = [e for e in run.events("heal") if e["mono_s"] > killed_mono_s]
        assert healed[0]["pid"] == waiting[0].pid and healed[0]["attempt"] == 2


def test_without_a_living_group_a_standby_resumes_where_a_new_process_does(tmp_path):
    """The same step, and bitwise the same result of it, as in the first life."""
    path = tmp_path / "run"
    with TrainerRun(path, steps=100_000, groups=1, checkpoint__interval=5) as run:
        run.start_all()
        run.start("standby-0")
        run.wait_for(lambda: run.ready("standby-0"), "the standby")
        for how in ("standby", "cold"):
            run.wait_step(len(run.metrics()) + 12)
            before = run.probe(0)
            run.kill("trainer-0")
            killed_mono_s = time.monotonic()
            if how == "standby":
                run.promote("standby-0", "trainer-0")
            else:
                run.start("trainer-0")
            run.wait_for(lambda at=killed_mono_s: restored(run, at), f"a restore ({how})")
            step = restored(run, killed_mono_s)[0]["step"]
            assert step % 5 == 0
            last = max(before)
            run.wait_for(
                lambda at=killed_mono_s, last=last: commits(run, at)[-1:] > [last],
                f"step {last + 1} ({how})",
            )
            assert commits(run, killed_mono_s)[0] == step + 1
            after = run.probe(0)
            for s in range(step + 1, last + 1):
                same = ("parameters", "optimizer", "lr")
                assert [before[s][k] for k in same] == [after[s][k] for k in same]


def restored(run, since_mono_s):
    return [e for e in run.events("restore") if e["mono_s"] > since_mono_s]


def commits(run, since_mono_s):
    """Steps that were committed since then."""
    return [e["step"] for e in run.events("commit") if e["mono_s"] > since_mono_s]
