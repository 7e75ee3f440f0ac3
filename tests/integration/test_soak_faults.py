"""Random kills of every role of a real debug job, overlapping ones too, for minutes (`make soak`).

After each fault the history is audited; at the end the job is interrupted, resumed and finished.
"""

from __future__ import annotations

import random
import time

import pytest
from job_run import Job
from test_main_job_faults import check_history, go_on, settle

from torchtitan_rl_ft.chaos import faults

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

DURATION_S = 150.0
VICTIMS = {  # who dies together: weight
    ("trainer-0",): 4,
    ("trainer-1",): 4,
    ("engine-0",): 2,
    ("engine-1",): 2,
    ("rollout",): 4,
    ("lighthouse",): 3,
    ("serving",): 1,
    ("trainer-0", "trainer-1"): 2,
    ("trainer-0", "rollout"): 2,
    ("trainer-1", "lighthouse"): 2,
    ("rollout", "lighthouse"): 2,
    ("trainer-0", "trainer-1", "rollout"): 1,
}
ENDLESS = (
    *("--training.steps", "100000"),
    *("--checkpoint.interval", "10"),
    *("--recovery.role_max_restarts", "1000"),
    *("--rollout.engine_max_restarts", "1000"),
)


def strike(job: Job, names: tuple[str, ...], rnd: random.Random) -> None:
    """SIGKILL, or now and then a freeze of some seconds when one process is meant."""
    victims = [job.process_of(name) for name in names]
    if len(names) == 1 and names[0].startswith("trainer") and rnd.random() < 0.2:
        with faults.stopped(victims[0]):
            time.sleep(rnd.uniform(3, 9))
        return
    for victim in victims:
        faults.kill(victim, whole_tree=False)


@pytest.mark.parametrize(
    ("seed", "overrides"),
    [(1, ()), (2, ("--rl.mode", "async", "--rl.max_policy_age", "2"))],
    ids=["sync", "async"],
)
def test_random_kills_of_every_role(tmp_path, seed, overrides):
    rnd = random.Random(seed)
    with Job(tmp_path / "run") as job:
        job.start(*ENDLESS, *overrides)
        settle(job)
        faults, end = 0, time.monotonic() + DURATION_S
        while time.monotonic() < end:
            strike(job, rnd.choices(list(VICTIMS), list(VICTIMS.values()))[0], rnd)
            faults += 1
            # Mostly time for some steps, sometimes the next fault falls into the recovery.
            time.sleep(rnd.choice([0.3, 2, 5, 10, 20]))
            assert job.processes["supervisor"].poll() is None, job.story()
            check_history(job, may_drop="too old")
        settle(job)
        go_on(job, 5)
        steps = job.step() + 2
        job.interrupt()
        assert job.end() == 130
        job.start("--recovery.auto_continue_train", "--training.steps", str(steps), *overrides)
        assert job.end(timeout_s=150) == 0, job.story()
        check_history(job, may_drop="too old")
        found = job.audit()
        print(f"{faults} faults, {len(found.history)} steps, counts {found.counts}")
        assert job.left() == []
