"""Random kills of replica groups, one every few seconds on the mean: `make soak`."""

import random
import time

import pytest
from job_run import Job

from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.observability.events import Kind

KILLS = 10
MTBF_S = 5.0
STEPS = 300
GROUPS = ("trainer-0", "trainer-1")
OTHERS = ("lighthouse", "serving", "rollout", "engine-0")


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.row("L2")
def test_ten_random_kills_of_groups_touch_nobody_else_and_the_last_step_is_reached(tmp_path):
    random_kills = random.Random(0)
    with Job(tmp_path / "run") as job:
        keys = ["--training.steps", str(STEPS), "--rollout.engines", "1", "--rl.eval_prompts", "0"]
        job.start(*keys, "--recovery.role_max_restarts", "30")
        job.wait_step(3)
        others = {name: job.process_of(name) for name in OTHERS}
        kills = 0
        while kills < KILLS:
            time.sleep(random_kills.expovariate(1 / MTBF_S))
            victim = job.process_of(random_kills.choice(GROUPS))
            if victim.alive():
                process.kill(victim)
                kills += 1
            assert job.processes["supervisor"].poll() is None, job.story()
        assert {name: job.process_of(name) for name in OTHERS} == others
        assert all(each.alive() for each in others.values())
        assert job.end(timeout_s=400) == 0, job.story()
        assert job.step() == STEPS and job.audit().problems == []
        for group in GROUPS:
            pauses_s = [e.data["delay_s"] for e in job.events(Kind.RESTART, subject=group)]
            assert pauses_s == sorted(pauses_s) and (len(pauses_s) < 3 or pauses_s[-1] > 1.0)
        print(f"{KILLS} kills in {job.events()[-1].mono_s - job.events()[0].mono_s:.0f} s")
