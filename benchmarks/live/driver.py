"""One arm, run: a real debug job, its faults from outside, and whoever restarts it.

The faults are injected by this process, in all arms alike, so that a restart of the whole job need
not start an injector again.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.live.arms import ENGINES, GROUPS, Arm
from benchmarks.live.trace import TraceFault
from torchtitan_rl_ft.chaos import plan
from torchtitan_rl_ft.chaos.injector import Injector
from torchtitan_rl_ft.chaos.memory import Memory
from torchtitan_rl_ft.chaos.schedule import Schedule, keyed
from torchtitan_rl_ft.chaos.targets import Targets
from torchtitan_rl_ft.host import parent_bound, process
from torchtitan_rl_ft.journal.checkpoints import finder
from torchtitan_rl_ft.journal.store import Journal
from torchtitan_rl_ft.observability.events import EventLog, Kind
from torchtitan_rl_ft.observability.jsonl import JsonlTail
from torchtitan_rl_ft.run_folder import ProcessId, RunFolder

sys.path[:0] = [str(Path(__file__).parents[2] / "tests" / "integration")]
from job_run import SUPERVISOR  # noqa: E402
from job_run import Job as TestJob  # noqa: E402

POLL_S = 0.01
"""The most by which an exit is noticed late; our supervisor needs no longer than that either."""

DEATH_LIMIT_S, DEATH_POLL_S = 30.0, 0.005

STEP_LIMIT_S = 60.0
"""No arm may take longer than this for each of its steps, restarts included."""

DISCARDED = "full restart"


class Job(TestJob):
    """Ends with this process, however that ends: the next arm, or the next run, has the machine
    for itself. To be started from the main thread."""

    def spawn(self, name: str, *command: str, **env: str) -> subprocess.Popen[bytes]:
        bound = (sys.executable, "-I", "-S", parent_bound.__file__, str(os.getpid()))
        return super().spawn(name, *bound, *command, **env)


class ArmFailed(Exception):
    """The job did not come to its last step; the message has its story."""


class Disturbed(ArmFailed):
    """A process ended that nobody had struck (a port that another program took): a restart of the
    whole job for that would be charged to the baseline."""


@dataclass(frozen=True)
class Restart:
    """The whole job was ended and started again: monotonic seconds, and whose exit was why."""

    subject: str
    seen_mono_s: float
    started_mono_s: float


@dataclass(frozen=True)
class Ran:
    """A finished arm: its run folder and what the driver did."""

    folder: Path
    restarts: list[Restart]


class _OneRun(Memory):
    """A job that starts from step 0 again, for want of a checkpoint, meets no fault twice."""

    def run_started(self, wall_s: float) -> None:
        pass


@contextlib.contextmanager
def injecting(job: Job, trace: Sequence[TraceFault]) -> Iterator[None]:
    """The faults of `trace` strike the job meanwhile. Raises what the injector raised."""
    folder = job.folder
    folder.path.mkdir(parents=True, exist_ok=True)
    events = EventLog(folder.events, run=folder.path.name, role="chaos", name="chaos")
    names = [f"engine-{i}" for i in range(ENGINES)] + [f"trainer-{g}" for g in range(GROUPS)]
    targets = Targets(folder, names, lambda: None, seed=0)
    schedule = Schedule(keyed([plan.parse(f.line) for f in trace]), time.monotonic())
    injector = Injector(folder, schedule, targets, _OneRun(folder), events)
    stop, errors = threading.Event(), []

    def run() -> None:
        try:
            injector.run(stop)
        except Exception as e:
            errors.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        events.close()
    if errors:
        raise errors[0]


class Exits:
    """Sees the exit of any trainer, engine or rollout role of one life of a job."""

    def __init__(self, job: Job) -> None:
        self._tail = JsonlTail(job.folder.events, from_end=True)
        self._poll, self._names = select.poll(), dict[int, str]()
        self.step = 0  # the last one committed in this life
        self.struck = False  # by a fault of the trace, in this life

    def __enter__(self) -> Exits:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._names:
            os.close(fd)

    def look(self) -> str | None:
        """Whose process has ended; waits for `POLL_S` at most. What was committed before that is
        in `step` then."""
        gone = self._read()
        ready = self._poll.poll(1000 * POLL_S)
        if ready:
            self._read()
            return self._names[ready[0][0]]
        return gone

    def _read(self) -> str | None:
        """Follow the events; whose process had ended before it could be watched."""
        gone = None
        for line in self._tail.read():
            data = line.get("data", {})
            if line.get("kind") == Kind.COMMIT:
                self.step = int(line["step"])
            elif line.get("kind") == Kind.CHAOS and line.get("phase") == "inject":
                self.struck = True  # told before it is done
            elif line.get("kind") == Kind.SPAWN and _matters(str(data.get("subject", ""))):
                target = ProcessId(int(data["pid"]), float(data["start_time"]))
                if not self._watch(target, str(data["subject"])):
                    gone = str(data["subject"])
        return gone

    def _watch(self, target: ProcessId, name: str) -> bool:
        try:
            fd = os.pidfd_open(target.pid)
        except ProcessLookupError:
            return False
        self._names[fd] = name
        self._poll.register(fd, select.POLLIN)
        return bool(target.alive())


def _matters(name: str) -> bool:
    return name == "rollout" or name.startswith(("trainer-", "engine-"))


def run(arm: Arm, trace: Sequence[TraceFault], folder: Path) -> Ran:
    """Raises ArmFailed."""
    end = time.monotonic() + STEP_LIMIT_S * arm.steps
    restarts: list[Restart] = []
    with Job(folder / "run") as job, injecting(job, trace):
        try:
            if arm.strategy == "full_restart":
                _restarting(job, arm, restarts, end)
            else:
                job.start(*arm.keys)
                _end(job, end)
        except AssertionError as e:  # the harness of the tests
            raise ArmFailed(str(e)) from None
        if job.step() != arm.steps:
            raise ArmFailed(f"ended at step {job.step()} of {arm.steps}\n{job.story()}")
        return Ran(job.folder.path, restarts)


def _end(job: Job, end_mono_s: float) -> None:
    code = job.end(timeout_s=max(1.0, end_mono_s - time.monotonic()))
    if code != 0:
        raise ArmFailed(f"exit code {code}\n{job.story()}")


def _restarting(job: Job, arm: Arm, restarts: list[Restart], end_mono_s: float) -> None:
    """Start the job again whenever one of its processes has ended, until it is over."""
    keys, exits = arm.keys, Exits(job)
    job.start(*keys)
    while True:
        with exits:
            subject = _first_exit(job, exits, arm.steps, end_mono_s)
        if subject is None:
            return _end(job, end_mono_s)
        seen = time.monotonic()
        _end_at_once(job)
        discard_rollouts(job.folder)
        exits = Exits(job)
        job.start(*keys, "--recovery.auto_continue_train")
        restarts.append(Restart(subject, seen, time.monotonic()))


def _first_exit(job: Job, exits: Exits, steps: int, end_mono_s: float) -> str | None:
    """None: the job has made its last step, or has ended by itself. Raises ArmFailed."""
    while job.processes[SUPERVISOR].poll() is None:
        subject = exits.look()
        if exits.step >= steps:
            return None
        if subject is not None:
            if not exits.struck:
                raise Disturbed(f"{subject} ended, and nobody had struck it\n{job.story()}")
            return subject
        if time.monotonic() > end_mono_s:
            raise ArmFailed(f"not over in time\n{job.story()}")
    return None


def discard_rollouts(folder: RunFolder) -> None:
    """A restart of the whole job without a journal of rollouts begins at its newest checkpoint with
    nothing: what is after it in this one's journal is taken out. Takes some hundredths of a
    second."""
    events = EventLog(folder.events, run=folder.path.name, role="benchmark", name="benchmark")
    with contextlib.closing(events), Journal.open(folder.journal, events=events) as journal:
        tokens = dict(enumerate(journal.tokens))
        saved = [
            c.step for c in finder(folder.path / "checkpoint")() if c.token == tokens.get(c.step)
        ]
        step = max(saved, default=0)
        if step < journal.tip.step:
            journal.rewind(step, reason=DISCARDED, member="benchmark")
        for batch in [b for s, b in sorted(journal.plan.items()) if s > step]:
            journal.drop_batch(batch.batch_id, DISCARDED)
        for group in journal.accepted():
            journal.drop(group.group_id, DISCARDED)


def _end_at_once(job: Job) -> None:
    """The supervisor first: it would start again what else dies. With it the kernel ends the roles
    that it started."""
    supervisor = job.processes[SUPERVISOR]
    supervisor.kill()
    supervisor.wait()
    members = {*job.alive(), *job.session_processes()}
    for member in members:
        process.kill(member)
    end = time.monotonic() + DEATH_LIMIT_S
    while any(m.alive() for m in members):
        if time.monotonic() > end:
            raise ArmFailed(f"not dead {DEATH_LIMIT_S:g} s after SIGKILL\n{job.story()}")
        time.sleep(DEATH_POLL_S)
