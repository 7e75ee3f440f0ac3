"""The Slurm example on a real Slurm: preempted twice, requeued, completed. `make slurm`."""

import os
import sys
from pathlib import Path

import pytest
from slurm_cluster import PACKAGES, SlurmCluster, missing

from torchtitan_rl_ft.journal.audit import audit
from torchtitan_rl_ft.observability.events import Kind, read_events
from torchtitan_rl_ft.observability.jsonl import read_jsonl
from torchtitan_rl_ft.run_folder import RunFolder

SCRIPT = Path(__file__).parents[2] / "examples" / "slurm" / "train.sbatch"
STEPS = 8

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(bool(missing()), reason=f"{missing()} missing: apt-get install {PACKAGES}"),
]


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    # What a job inherits from the shell that submits it.
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    with SlurmCluster(tmp_path / "slurm") as made:
        yield made


@pytest.mark.timeout(900)
@pytest.mark.row("L1")
def test_a_job_is_requeued_at_its_exit_code_and_completes(cluster, tmp_path):
    folder = RunFolder(tmp_path / "run")
    keys = ["--job.dump_folder", folder.path, "--training.steps", STEPS, "--rollout.engines", 1]
    keys += ["--fault_tolerance.replica_groups", 1, "--checkpoint.interval", 100]
    log = tmp_path / "job.log"
    job = cluster.submit(SCRIPT, "rl_ft_debug.toml", *map(str, keys), flags=(f"--output={log}",))

    def step():
        return len(read_jsonl(folder.metrics)) if folder.metrics.exists() else 0

    def wait_step(wanted):
        cluster.wait_for(lambda: step() >= wanted, f"step {wanted}\n{told()}", 150)

    def told():
        return log.read_text()[-3000:] if log.exists() else ""

    def wait_requeued(restarts):
        def requeued():
            now = cluster.show(job)
            return now["JobState"] == "RUNNING" and now["Restarts"] == str(restarts)

        # Two minutes: the node takes no job of an id that it has just ended.
        cluster.wait_for(requeued, f"the requeue {restarts}\n{told()}", 240)

    wait_step(2)
    cluster.command("scancel", "--signal=TERM", "--batch", job)  # as before a time limit
    wait_requeued(1)
    wait_step(step() + 2)
    cluster.command("scontrol", "requeue", job)  # to every process of the job
    wait_requeued(2)
    done = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    cluster.wait_for(lambda: cluster.show(job)["JobState"] in done, f"its end\n{told()}", 200)
    ended = cluster.show(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "2")
    assert [row["step"] for row in read_jsonl(folder.metrics)] == list(range(1, STEPS + 1))
    events = list(read_events(folder.events))
    stops = [e.step for e in events if e.kind is Kind.STOP]
    assert [e.step for e in events if e.kind is Kind.RESTORE] == stops and len(stops) == 2
    assert audit(folder.journal).problems == []
