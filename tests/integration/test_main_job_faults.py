"""Faults in a running debug job: only what failed is started again, the history stays right, and
the job goes on to its end.

The faults are done to one job, one after another, since most of a job's time is its start. A test
that finds it ended gets a new one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from ettr_by_hand import strict_by_hand
from job_run import Job

from torchtitan_rl_ft.chaos import faults
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.observability.ettr import measure
from torchtitan_rl_ft.observability.ettr_text import ettr_rows
from torchtitan_rl_ft.observability.events import Kind
from torchtitan_rl_ft.run_folder import ProcessId

pytestmark = pytest.mark.timeout(240)

ROLES = ("lighthouse", "serving", "rollout", "trainer-0", "trainer-1")
ENGINES = ("engine-0", "engine-1")
STILL = ("rollout", "serving")  # while these are gone, all others stand still
GROUPS_PER_STEP = 4  # as in rl_ft_debug.toml
CHECKPOINT_INTERVAL = 10
LONG = (
    *("--training.steps", "100000"),
    *("--checkpoint.interval", str(CHECKPOINT_INTERVAL)),
    *("--recovery.role_max_restarts", "10"),
)


class Disturbed:
    """The job that the faults are done to."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._job: Job | None = None
        self._jobs = 0

    def running(self) -> Job:
        if self._job is None or self._job.processes["supervisor"].poll() is not None:
            self._jobs += 1
            folder = self._folder / str(self._jobs)
            folder.mkdir()
            self._job = self._stack.enter_context(Job(folder / "run"))
            self._job.start(*LONG)
        settle(self._job)
        return self._job


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory) -> Iterator[Disturbed]:
    with ExitStack() as stack:
        yield Disturbed(tmp_path_factory.mktemp("faults"), stack)


@pytest.fixture
def job(disturbed) -> Job:
    return disturbed.running()


def settle(job: Job) -> None:
    """Until both groups train and both engines serve."""
    job.wait_for(lambda: groups(job) == 2 and serving(job) == set(ENGINES), "a whole job", 90)


def groups(job: Job) -> int:
    """Groups in the last committed step."""
    rows = job.metrics()
    return rows[-1]["participants"] if rows else 0


def serving(job: Job) -> set[str]:
    """Engines that are in service: between versions or at one."""
    states = {}
    for event in job.events(Kind.TRANSITION):
        states[event.data["subject"]] = event.data["new"]
    return {name for name, state in states.items() if state in ("stale", "installing", "serving")}


def go_on(job: Job, steps: int = 3, timeout_s: float = 60.0) -> None:
    """Wait for `steps` more commits."""
    job.wait_step(job.step() + steps, timeout_s)


def stall_s(job: Job, since_mono_s: float) -> float:
    """The longest time without a commit."""
    times = [e.mono_s for e in job.events(Kind.COMMIT)]
    before = max(t for t in times if t < since_mono_s)
    after = [t for t in times if t >= since_mono_s]
    return max(b - a for a, b in itertools.pairwise([before, *after]))


def back(job: Job, name: str, since_mono_s: float) -> bool:
    """The new life of `name` is at work: it serves, or trains together with the other group."""
    for event in job.events():
        if event.mono_s < since_mono_s:
            continue
        if name in ENGINES and event.data.get("subject") == name:
            if event.kind is Kind.TRANSITION and event.data["new"] == "serving":
                return True
        elif name.startswith("trainer"):
            together = event.kind is Kind.QUORUM and event.data["participants"] == 2
            if together and event.pid == job.process_of(name).pid:
                return True
        elif event.kind is Kind.READY and event.name == name and "subject" not in event.data:
            return True
    return False


def check_history(job: Job, *, may_drop: str | None = None) -> None:
    found = job.audit()
    assert found.problems == []
    assert [reason for reason in found.dropped if not may_drop or may_drop not in reason] == []
    assert [c.step for c in found.history] == list(range(1, len(found.history) + 1))


def check_record(job: Job, victim: str, killed_mono_s: float) -> None:
    """One record, of the victim, and its phases are the outage."""
    outages = [o for o in measure(job.events()).outages if o.until_s > killed_mono_s]
    (found,) = [o for o in outages if o.name == victim]
    # A role that asks another one in that moment may find it gone.
    assert {o.name for o in outages} - {victim} <= (set(ENGINES) if victim == "serving" else set())
    assert found.began_s >= killed_mono_s and "SIGKILL" in found.cause
    assert found.began_s <= found.detected_s <= found.replaced_s <= found.done_s
    assert min(found.phase_s.values()) >= 0.0
    assert sum(found.phase_s.values()) == pytest.approx(found.done_s - found.began_s)
    assert found.version_before is not None and found.version_after >= found.version_before
    assert found.samples_lost == 0
    print(found.line())


def lives(job: Job) -> dict[str, ProcessId]:
    return {name: job.process_of(name) for name in (*ROLES, *ENGINES)}


def changed(job: Job, before: dict[str, ProcessId]) -> set[str]:
    return {name for name, life in lives(job).items() if life != before[name]}


@pytest.mark.row("M1")
@pytest.mark.row("K1")
@pytest.mark.parametrize(
    ("victim", "restarted", "longest_stall_s"),
    [
        # The other group goes on alone once the lighthouse misses the beats; later the new one
        # is healed in a step.
        ("trainer-1", {"trainer-1"}, 10),
        # The other engine serves on.
        ("engine-0", {"engine-0"}, 10),
        ("rollout", {"rollout"}, 15),
        ("lighthouse", {"lighthouse"}, 15),
        # The engines live on, and the new role takes them over.
        ("serving", {"serving"}, 15),
    ],
)
def test_killed_role_is_restarted_alone(job, victim, restarted, longest_stall_s):
    before, killed_mono_s = lives(job), time.monotonic()
    faults.kill(before[victim], whole_tree=victim in ENGINES)
    job.wait_for(lambda: changed(job, before) == restarted, f"{restarted} to be started", 60)
    for name in restarted:
        job.wait_for(lambda n=name: back(job, n, killed_mono_s), f"{name} to be back", 90)
    settle(job)
    go_on(job)
    assert changed(job, before) == restarted
    check_history(job)
    check_record(job, victim, killed_mono_s)
    stall = stall_s(job, killed_mono_s)
    print(f"{victim} killed: no commit for {stall:.1f} s")
    assert stall < longest_stall_s


@pytest.mark.row("K1")
def test_ettr_of_a_job_with_faults_is_what_a_count_by_hand_says(job):
    """After the kill of a trainer and of an engine."""
    events = job.events()
    gone = [e for e in events if e.kind is Kind.EXIT and e.data.get("subject") in STILL]
    until_s = min([e.mono_s for e in gone], default=float("inf"))
    events = [e for e in events if e.mono_s < until_s]
    found = measure(events)
    killed = {o.name for o in found.outages if o.done_s is not None}
    if not {"trainer-1", "engine-0"} <= killed:
        pytest.skip("this job was started after those kills")
    end_s = events[0].mono_s + found.wall_s
    assert found.strict.ratio == pytest.approx(strict_by_hand(events, end_s), rel=0.01)
    for figure in (found.strict, found.paper):
        lost_s = sum(s for causes in figure.lost_s.values() for s in causes.values())
        assert lost_s == pytest.approx((1 - figure.ratio) * found.slot_s)
    row = job.metrics()[-1]
    assert 0 < row["ettr/strict"] <= row["ettr/paper"] <= 1
    assert 0 < row["ettr/strict_window"] <= row["ettr/paper_window"] <= 1
    print("\n".join(f"{name:<11}{text}" for name, text in ettr_rows(found)))


@pytest.mark.row("M5")
def test_a_trainer_and_an_engine_are_killed_together(job):
    """Nothing else is started again; no sample is lost or trained twice, and no engine, old or
    new, ever serves an older policy than before."""
    victims = {"trainer-0", "engine-1"}
    before, killed_mono_s = lives(job), time.monotonic()
    for name in sorted(victims):
        faults.kill(before[name], whole_tree=True)
    job.wait_for(lambda: changed(job, before) == victims, f"{victims} to be started", 60)
    for name in victims:
        job.wait_for(lambda n=name: back(job, n, killed_mono_s), f"{name} to be back", 90)
    settle(job)
    go_on(job)
    assert changed(job, before) == victims
    check_history(job)
    installed: dict[int, list[int]] = {}
    for event in job.events(Kind.INSTALL):
        installed.setdefault(event.data["slot"], []).append(event.version)
    assert all(versions == sorted(versions) for versions in installed.values())
    stall = stall_s(job, killed_mono_s)
    print(f"trainer-0 and engine-1 killed: no commit for {stall:.1f} s")
    assert stall < 15


def test_stopped_trainer_comes_back(job):
    """The others go on without it; it takes their state when it wakes, or a new process does."""
    before, stopped_mono_s = lives(job), time.monotonic()
    with faults.stopped(before["trainer-0"]):
        time.sleep(8.0)
        go_on(job)
        assert groups(job) == 1
    job.wait_for(lambda: groups(job) == 2, "both groups", 60)
    go_on(job)
    assert changed(job, before) <= {"trainer-0"}
    check_history(job)
    stall = stall_s(job, stopped_mono_s)
    print(f"trainer-0 stopped: no commit for {stall:.1f} s")
    assert stall < 12  # process_group_timeout_ms is 5000


@pytest.mark.row("F1")
@pytest.mark.row("F2")
@pytest.mark.row("D7")
@pytest.mark.scenario("W-2")
@pytest.mark.scenario("Z-1")
def test_interrupted_in_a_step_then_killed_then_finished(job):
    """Ctrl-C, resume, SIGKILL of the supervisor, resume: each time from the newest checkpoint and
    with the batches that were sealed; after the kill with the same engines, too."""
    go_on(job, steps=CHECKPOINT_INTERVAL + 2)
    job.interrupt()
    assert job.end(timeout_s=30) == ExitCode.INTERRUPTED
    assert job.error_lines() == ["torchtitan: error: stopped by SIGINT"]
    assert job.left() == []
    check_history(job)
    interrupted = batches(job)

    job.start()
    assert job.end() == ExitCode.CONFIG
    (refusal,) = job.error_lines()
    assert "auto_continue_train" in refusal and "job.dump_folder" in refusal

    job.start(*LONG, "--recovery.auto_continue_train")
    job.wait_step(len(interrupted) + CHECKPOINT_INTERVAL + 2, 120)
    check_resumed(job, interrupted)
    kept = {name: job.process_of(name) for name in ("serving", *ENGINES)}
    versions = [e.version for e in job.events(Kind.PUBLISH) if e.role == "serving"]
    job.kill()
    job.wait_for_session_alone(within_s=10)
    assert all(p.alive() for p in kept.values())
    assert job.engine_statuses() == [200, 200]
    assert job.generate_status() == 503  # nobody owns it
    check_history(job, may_drop="too old")
    killed = batches(job)

    # Another number of groups, the same engines.
    last = len(killed) + 3
    one_group = ("--fault_tolerance.replica_groups", "1")
    job.start("--recovery.auto_continue_train", "--training.steps", str(last), *one_group)
    assert job.end(timeout_s=120) == ExitCode.DONE, job.story()
    assert job.left() == []  # the engines too
    check_resumed(job, killed)
    assert {name: job.process_of(name) for name in kept} == kept
    more = [e.version for e in job.events(Kind.PUBLISH) if e.role == "serving"]
    assert more[: len(versions)] == versions and more == sorted(more)
    reattached = next(e for e in reversed(job.events(Kind.RUN)) if e.phase == "reattach")
    first = {
        kind: min(e.mono_s for e in job.events(kind) if e.mono_s > reattached.mono_s)
        for kind in (Kind.PUBLISH, Kind.ACCEPT)
    }
    assert first[Kind.PUBLISH] < first[Kind.ACCEPT]
    found = job.audit()
    assert len(found.history) == last
    assert {state for state, n in found.counts.items() if n} <= {"trained", "dropped"}
    assert found.counts["trained"] == last * GROUPS_PER_STEP
    sealed = [e.step for e in job.events(Kind.SEAL)]
    assert sealed == list(range(1, last + 1))  # none of them twice


def batches(job: Job) -> dict[int, int]:
    """The batch of each committed step."""
    return {c.step: c.batch_id for c in job.audit().history}


def check_resumed(job: Job, before: dict[int, int]) -> None:
    """The last start took the newest checkpoint, and trained the same batches after it."""
    events = job.events()
    starts = ("resume", "reattach")
    at = max(i for i, e in enumerate(events) if e.kind is Kind.RUN and e.phase in starts)
    saved = max(e.step for e in events[:at] if e.kind is Kind.CHECKPOINT)
    assert 0 < saved <= len(before)
    # The second group heals from the first, when that one is soon enough.
    assert {e.step for e in events[at:] if e.kind is Kind.RESTORE} == {saved}
    again = [e.step for e in events[at:] if e.kind is Kind.COMMIT]
    assert again == list(range(saved + 1, saved + 1 + len(again)))
    # Accepted for the step after the last, which is trained by another policy now.
    check_history(job, may_drop="too old")
    now = batches(job)
    assert {step: now[step] for step in before} == before
