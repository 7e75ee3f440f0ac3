"""A whole job under a scheduler that preempts it and starts it again for its exit code alone."""

import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from job_run import Job

from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.observability.events import Kind
from torchtitan_rl_ft.rollout.protocols import PluginContext
from torchtitan_rl_ft.rollout.tasks.sorting import SortDigits
from torchtitan_rl_ft.run_folder import ProcessId

STEPS = 12
COMMAND = (
    *("--training.steps", str(STEPS), "--rollout.engines", "1"),
    *("--fault_tolerance.replica_groups", "1", "--checkpoint.interval", "100"),
    *("--recovery.exit_signal_handler", "--recovery.auto_continue_train"),
    *("--recovery.autoresume", "--recovery.autoresume_interval", "2", "--rl.eval_prompts", "0"),
)
"""The very same for each start: nobody decides anything in between."""


class StubScheduler:
    """Starts the job, and again for as long as it ends with the code to be requeued."""

    def __init__(self, job: Job, *overrides: str) -> None:
        self.job, self.command = job, (*COMMAND, *overrides)
        self.codes: list[int] = []
        self.engines: list[ProcessId] = []

    def run(self, *preemptions) -> None:
        """Each preemption hits one life of the job, two steps after it has begun to train."""
        waiting = list(preemptions)
        while not self.codes or self.codes[-1] == ExitCode.REQUEUE:
            begun = self.job.step()
            self.job.start(*self.command)
            if waiting:
                self.job.wait_step(begun + 2)
                self.engines.append(self.job.session.engine_holds()[0].roots[0])
                waiting.pop(0)(self.job)
            self.codes.append(self.job.end(timeout_s=120))
            assert len(self.codes) <= len(preemptions) + 1, self.job.story()


def to_the_supervisor(job: Job) -> None:
    job.processes["supervisor"].send_signal(signal.SIGTERM)


def to_every_process(job: Job) -> None:
    """As Slurm does to a job step."""
    for each in job.alive():
        process.kill(each, signal.SIGTERM)


def by_request(job: Job) -> None:
    (job.folder.path / "autoresume.request").touch()


@pytest.fixture(scope="module")
def preempted(tmp_path_factory):
    with Job(tmp_path_factory.mktemp("preempted") / "run") as job:
        scheduler = StubScheduler(job)
        scheduler.run(to_the_supervisor, to_every_process, by_request)
        yield scheduler
    assert job.left() == []


@pytest.mark.timeout(500)
@pytest.mark.row("L1")
@pytest.mark.row("H4")
def test_a_job_that_is_preempted_three_times_completes_with_no_input(preempted):
    job = preempted.job
    assert preempted.codes == [75, 75, 75, 0], job.story()
    assert [row["step"] for row in job.metrics()] == list(range(1, STEPS + 1))
    stops = job.events(Kind.STOP)
    restored = [e.step for e in job.events(Kind.RESTORE)]
    assert restored == [e.step for e in stops], "each life goes on where the last one stopped"
    assert not job.events(Kind.SUPERSEDE), "no step was trained twice"
    assert job.audit().problems == []


@pytest.mark.row("H7")
def test_the_request_is_honoured_once_at_a_multiple_of_its_interval(preempted):
    stop = preempted.job.events(Kind.STOP)[2]
    assert stop.step % 2 == 0 and "request" in stop.cause
    names = {p.name for p in preempted.job.folder.path.glob("autoresume.*")}
    assert names == {"autoresume.request.taken"}


@pytest.mark.row("H8")
def test_engines_are_kept_and_the_prompts_go_on_in_their_order(preempted):
    first, second, *_ = preempted.engines
    assert first == second, "the engine of the first life serves in the second"
    with closing(sqlite3.connect(preempted.job.folder.journal / "journal.sqlite")) as db:
        groups = db.execute("SELECT key, state FROM groups ORDER BY id").fetchall()
    source = SortDigits(PluginContext(0, None, Path()))
    prompts = source.next(len(groups))
    assert [key for key, _ in groups] == [f"{p.epoch}:{p.index}" for p in prompts]
    assert "accepted" not in {state for _, state in groups[: 4 * STEPS]}, "each was trained"


@pytest.mark.timeout(200)
@pytest.mark.row("L1")
def test_a_numeric_stop_is_not_started_again(tmp_path):
    """The gradients of such a KL term overflow as soon as the policy moves."""
    with Job(tmp_path / "run") as job:
        scheduler = StubScheduler(job, "--rl.kl_coef", "1e30")
        scheduler.run()
        assert scheduler.codes == [ExitCode.NUMERIC], job.story()
        assert job.step() < STEPS and job.left(within_s=10) == []
