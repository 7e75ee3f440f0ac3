"""A whole job whose trainers the kernel kills for want of memory, then the same run folder again in
another layout: the same sealed batches, nothing generated or rewarded a second time."""

from __future__ import annotations

import collections
import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from fakes.memory_limit import CgroupsForbidden, out_of_memory
from job_run import Job

from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.observability.events import Kind

pytestmark = pytest.mark.timeout(300)

FAKES = Path(__file__).parents[1] / "fakes"
STEPS, SAMPLES = 16, 4
KEYS = (
    *("--training.steps", str(STEPS)),
    *("--checkpoint.interval", "6"),
    *("--rl.reward", "counted_reward:reward"),
    *("--rl.eval_prompts", "0"),
    *("--recovery.role_max_restarts", "0"),
)
OTHER_LAYOUT = (
    *("--fault_tolerance.replica_groups", "1"),
    *("--fault_tolerance.ranks_per_group", "2"),
    *("--parallelism.tensor_parallel_degree", "2"),
    *("--training.local_batch_size", "8"),
)


def kill_for_memory(job: Job) -> str:
    """How the trainers died."""
    pids = [job.process_of(f"trainer-{g}").pid for g in (0, 1)]
    try:
        with out_of_memory(pids) as killed:
            job.end(timeout_s=90)
            return f"out of memory, {killed()} killed by the kernel"
    except CgroupsForbidden as e:
        for pid in pids:
            os.kill(pid, 9)
        job.end(timeout_s=90)
        return f"SIGKILL, no memory cgroup here: {e}"


def sealed_groups(job: Job) -> dict[str, int]:
    """Key of each prompt group -> its sealed batch."""
    path = job.folder.journal / "journal.sqlite"
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)) as db:
        rows = db.execute("SELECT key, batch_id FROM groups WHERE batch_id IS NOT NULL").fetchall()
    return dict(rows)


@pytest.mark.row("E6")
@pytest.mark.row("E3")
def test_after_an_out_of_memory_kill_another_layout_goes_on_with_the_same_batches(tmp_path):
    counted = tmp_path / "rewards"
    with Job(tmp_path / "run") as job:
        job.env["COUNTED_REWARDS"] = str(counted)
        job.import_from(FAKES)
        job.start(*KEYS)
        job.wait_step(8)
        how = kill_for_memory(job)
        print(f"trainers ended by: {how}")
        assert job.processes["supervisor"].returncode == ExitCode.FAILED, job.story()
        exits = [e for e in job.events(Kind.EXIT) if e.data.get("subject", "").startswith("train")]
        assert all(e.data.get("signal") in (9, "SIGKILL") for e in exits if e.phase == "fault")
        tip, sealed = job.step(), sealed_groups(job)
        digests = {e.data["batch"]: e.data["digest"] for e in job.events(Kind.SEAL)}
        started_mono_s = time.monotonic()
        saved = max(e.step or 0 for e in job.events(Kind.CHECKPOINT))

        job.start(*KEYS, *OTHER_LAYOUT, "--recovery.auto_continue_train")
        assert job.end(timeout_s=150) == ExitCode.DONE, job.story()

        (restored,) = {e.step for e in job.events(Kind.RESTORE)}
        assert restored == saved < tip
        again = [e for e in job.events(Kind.COMMIT) if e.mono_s > started_mono_s]
        assert [e.step for e in again] == list(range(saved + 1, STEPS + 1))
        for event in again:
            if event.step is not None and event.step <= tip:
                assert event.data["batch"] == event.step
                assert event.data["participants"] == 1
        now = {e.data["batch"]: e.data["digest"] for e in job.events(Kind.SEAL)}
        assert digests.items() <= now.items()
        assert len(job.events(Kind.SEAL)) == STEPS
        # Until the batches of before are trained again, nothing is generated and nothing judged.
        at_tip_mono_s = next(e.mono_s for e in again if e.step == len(digests))
        times = [float(line.split()[-1]) for line in counted.read_text().splitlines()]
        accepted = [e.mono_s for e in job.events(Kind.ACCEPT)]
        assert not [t for t in [*times, *accepted] if started_mono_s < t < at_tip_mono_s]
        # Every sample of a batch that was sealed then was judged once, in both jobs together.
        calls = collections.Counter(
            f"{epoch}:{index}"
            for _, epoch, index, _ in map(str.split, counted.read_text().splitlines())
        )
        assert {calls[key] for key in sealed} == {SAMPLES}
        assert job.audit().problems == []
        # The engines of the first job serve the second.
        assert all(job.attempts(f"engine-{slot}") == 1 for slot in (0, 1))
