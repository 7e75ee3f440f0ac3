"""Jobs whose only engine is a fake one, all other parts real: how they go on and how they end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import fake_engine_program
from job_run import Job

from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.observability.events import Event, Kind

pytestmark = pytest.mark.timeout(180)

PLUGINS = '''
from torchtitan_rl_ft.rollout.tasks import sorting


class Broken(sorting.SortDigits):
    def next(self, n):
        raise LookupError("row 17 of the data set has no prompt")


class Held:
    """A reward with something to let go, which fails."""

    def __init__(self, context):
        pass

    def __call__(self, prompt, response):
        return sorting.reward(prompt, response)

    def close(self):
        raise RuntimeError("the judge does not let go")
'''


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    (tmp_path / "plugins_of_a_user.py").write_text(PLUGINS)
    with Job(tmp_path / "run") as made:
        made.import_from(tmp_path)
        yield made


def start(job: Job, tmp_path: Path, *overrides: str) -> None:
    job.start(
        *("--rollout.engines", "1", "--rollout.engine_python", fake_engine_program(tmp_path)),
        *("--fault_tolerance.replica_groups", "1", *overrides),
    )


def since(job: Job, at: Event, kind: Kind) -> list[Event]:
    return [e for e in job.events(kind) if e.mono_s > at.mono_s]


@pytest.mark.scenario("W-2")
@pytest.mark.scenario("W-4")
def test_stopped_and_gone_on_with_blank_engines(job: Job, tmp_path: Path) -> None:
    """The restored policy is published before anything is asked of it; and when the last step is
    trained all ends, whatever was rolled out meanwhile."""
    start(job, tmp_path, "--training.steps", "2")
    assert job.end() == ExitCode.DONE, job.story()
    assert job.left() == [] and job.session is None
    first = job.process_of("engine-0")

    ahead = ("--rl.mode", "async", "--rl.max_policy_age", "2")
    start(job, tmp_path, "--training.steps", "6", "--recovery.auto_continue_train", *ahead)
    assert job.end() == ExitCode.DONE, job.story()
    assert job.left() == [] and job.session is None
    resumed = next(e for e in reversed(job.events(Kind.RUN)) if e.phase == "resume")
    assert job.process_of("engine-0") != first
    phases, issued, commits = (
        since(job, resumed, kind) for kind in (Kind.PHASE, Kind.ISSUE, Kind.COMMIT)
    )
    published = next(e for e in phases if e.phase == "publish")
    assert published.name == "trainer-0"
    assert published.mono_s < issued[0].mono_s < commits[0].mono_s
    assert [e.step for e in commits] == [3, 4, 5, 6]
    ready = max(e.mono_s for e in since(job, resumed, Kind.READY) if e.mono_s < commits[0].mono_s)
    assert commits[0].mono_s - ready < 20
    (end,) = [e for e in since(job, resumed, Kind.RUN) if e.phase == "end"]
    took_s = end.mono_s - commits[-1].mono_s
    print(f"the job ended {took_s:.1f} s after its last commit")
    assert took_s < 20  # 10 on a machine of one's own: torch takes seconds to leave a process


@pytest.mark.scenario("W-4")
def test_an_error_of_the_users_code_reaches_the_user(job: Job, tmp_path: Path) -> None:
    """With the place where it was raised, and its traceback among the last lines."""
    start(
        job,
        tmp_path,
        *("--rollout.debug_mode", "rollout_only", "--recovery.role_max_restarts", "0"),
        *("--rl.data_source", "plugins_of_a_user:Broken"),
    )
    assert job.end() == ExitCode.FAILED
    said = "the data source failed: LookupError: row 17 of the data set has no prompt"
    assert f"{said} (plugins_of_a_user.py:7)" in job.err()
    assert "in next\n" in job.err() and "raise LookupError(" in job.err()
    job.command("stop", str(job.folder.path))
    assert job.left(within_s=5) == []


@pytest.mark.row("F9")
def test_an_error_in_the_close_of_the_users_code_skips_nothing(job: Job, tmp_path: Path) -> None:
    start(
        job,
        tmp_path,
        *("--rollout.debug_mode", "rollout_only", "--training.steps", "1"),
        *("--rl.reward", "plugins_of_a_user:Held"),
    )
    assert job.end() == ExitCode.DONE, job.story()
    assert job.attempts("rollout") == 1
    assert job.left() == [] and job.session is None
    (warning,) = [e for e in job.events(Kind.WARN) if "close()" in (e.cause or "")]
    said = "close() of rl.reward failed: RuntimeError: the judge does not let go"
    assert warning.cause == said and said in job.out() + job.err()


@pytest.mark.scenario("W-4")
def test_no_engine_comes_up_any_more(job: Job, tmp_path: Path) -> None:
    """The cause, a code other than 0, soon; journal and checkpoint as they were."""
    steps = ("--training.steps", "100000", "--rollout.engine_max_restarts", "2")
    start(job, tmp_path, *steps, "--recovery.role_max_restarts", "1")
    job.wait_event(Kind.CHECKPOINT)
    (tmp_path / "fake-python").write_text("#!/bin/sh\necho no device is left\nexit 5\n")
    process.kill(job.process_of("engine-0"))
    began = time.monotonic()
    code = job.end()
    print(f"exit code {code} {time.monotonic() - began:.1f} s after the death of the last engine")
    assert code in (ExitCode.FAILED, ExitCode.CONFIG)
    assert time.monotonic() - began < 30
    (error,) = job.error_lines()
    assert error.startswith("torchtitan: error: serving: exit code")
    assert "0 of 1 engines are left" in job.err() and "no device is left" in job.err()
    found = job.audit()
    assert found.problems == [] and len(found.history) >= 2
    saved = max(e.step for e in job.events(Kind.CHECKPOINT))
    assert list((job.folder.path / "checkpoint").glob(f"step-{saved}-*/commit.json"))
    job.command("stop", str(job.folder.path))
    assert job.left(within_s=5) == []
