"""Wedged ranks of real trainers are ended by the watcher; the others go on, and it comes back."""

import signal
import time

import pytest
from trainer_run import TrainerRun, assert_each_step_once, assert_groups_equal
from watching import watched

pytestmark = pytest.mark.timeout(300)

SILENCE_S, PHASE_S = 6, 9
KEYS = {
    "recovery__rank_silence_timeout_s": SILENCE_S,
    "recovery__enable_ft_package": True,
    "recovery__phase_timeouts": f'["reduce={PHASE_S}"]',
    "fault_tolerance__process_group_timeout_ms": 3000,
}


def longest_stall_s(run, since_step):
    times = [e["mono_s"] for e in run.events("commit") if e["step"] >= since_step]
    return max(b - a for a, b in zip(times, times[1:], strict=False))


@pytest.mark.row("G1")
def test_what_hangs_is_ended_within_its_limit_and_the_others_go_on(tmp_path):
    """A call of C that holds the interpreter (torchft's beat goes on: the other group cannot form
    a quorum until this one is ended), a stopped process, and a hang that has let go of the GIL."""
    hangs = {"hold": SILENCE_S, "stop": SILENCE_S, "sleep": PHASE_S}
    with (
        TrainerRun(tmp_path / "run", steps=4000, groups=2, forked=True, **KEYS) as run,
        watched(run.run),
    ):
        run.start_all(host_args=("--slow-s", "0.05"))
        for n, (act, limit_s) in enumerate(hangs.items()):
            run.wait_for(
                lambda: run.metrics() and run.metrics()[-1]["participants"] == 2, "both groups"
            )
            at = len(run.metrics())
            run.wait_step(at + 3)
            victim = run.processes["trainer-1"][0]
            run.order(1, "reduce", act=act, sleep_s=600)
            run.wait_for(lambda v=victim: v.poll() is not None, f"the end of what hangs ({act})")
            assert victim.returncode == -signal.SIGKILL
            run.wait_for(
                lambda n=n: sum(e.get("phase") == "wedged" for e in run.events("fault")) == n + 1,
                "the event",
            )
            run.wait_step(len(run.metrics()) + 3)
            # Limit, a look, the time for stacks, and what kill -9 costs.
            stall_s = longest_stall_s(run, at)
            assert stall_s < limit_s + 10, f"{act}: no commit for {stall_s:.1f} s"
            run.processes.pop("trainer-1")
            run.start("trainer-1")
        run.wait_for(lambda: run.metrics()[-1]["participants"] == 2, "the group's return")
        run.wait_step(len(run.metrics()) + 5)
        told = [e for e in run.events("fault") if e.get("phase") == "wedged"]
        assert [e["data"]["in_phase"] for e in told] == ["reduce"] * 3
        assert [e["data"]["limit_of"] for e in told] == [
            "recovery.rank_silence_timeout_s",
            "recovery.rank_silence_timeout_s",
            "configured",
        ]
        log = (run.run.path / "trainer-1.0.log").read_text()
        assert log.count("(most recent call first)") >= 2 and "in obey" in log
        assert_each_step_once(run)
        assert_groups_equal(run, (0, 1), at_least=10)


def test_waiting_is_no_fault_and_limits_are_learned_for_the_next_start(tmp_path):
    """No batch for a while, and a quorum below its minimum, both longer than every limit of a
    phase in which something is done."""
    keys = {
        **KEYS,
        "recovery__calc_ft_timeouts": True,
        "recovery__phase_timeout_s": 60,
        "fault_tolerance__min_replica_size": 2,
    }
    with (
        TrainerRun(tmp_path / "run", steps=4000, groups=2, forked=True, **keys) as run,
        watched(run.run),
    ):
        run.start("host", "lighthouse", "trainer-0", host_args=("--slow-s", "0.05"))
        run.wait_for(
            lambda: any(e["phase"] == "quorum" for e in run.events("phase")),
            "the quorum that does not form",
        )
        time.sleep(PHASE_S + 3)
        run.start("trainer-1")
        run.wait_step(12)
        pause = run.run.path / "pause-host"
        pause.touch()
        time.sleep(PHASE_S + 3)
        pause.unlink()
        run.wait_step(len(run.metrics()) + 5)
        assert not [e for e in run.events("fault") if e.get("phase") == "wedged"]
        learned = run.run.phases / "limits.json"
        run.wait_for(lambda: '"reduce": ' in learned.read_text().partition("limits_s")[2], "limits")
