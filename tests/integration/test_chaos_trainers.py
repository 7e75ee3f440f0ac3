"""Faults injected by the command into real trainers, which know nothing of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from trainer_run import TrainerRun, assert_groups_equal, steps_of

from torchtitan_rl_ft.chaos import failing_reduce
from torchtitan_rl_ft.chaos.trace import load
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.journal.store import Journal
from torchtitan_rl_ft.observability.events import EventList, EventLog, Kind
from torchtitan_rl_ft.run_folder import ProcessId

pytestmark = pytest.mark.timeout(300)

FAIL = "fail trainer-1 all-reduce"
FILL = "fill disk of trainer-0 for 60 s"


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("no file system can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def chaos(run: TrainerRun, *lines: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torchtitan_rl_ft", "chaos", *lines]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=run.env)


def know_trainers(run: TrainerRun) -> None:
    """As the supervisor would have told of them."""
    events = EventLog(run.run.events, run="run", role="supervisor", name="supervisor")
    for name in ("trainer-0", "trainer-1"):
        found = ProcessId.of(run.processes[name][0].pid)
        events.emit(Kind.SPAWN, subject=name, pid=found.pid, start_time=found.start_time)
    events.close()


@pytest.mark.row("G4")
@pytest.mark.row("E7")
def test_a_failing_sum_and_a_full_disk_cost_an_attempt_and_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    keys = {
        "checkpoint__interval": 3,
        "checkpoint__keep_latest_k": 2,
        "fault_tolerance__process_group_timeout_ms": 6000,  # no other refusal on a busy machine
        "fault_tolerance__min_replica_size": 2,
    }
    with small_disk(folder / "checkpoint"), TrainerRun(folder, steps=4000, groups=2, **keys) as run:
        failing_reduce.put_before(run.env)
        run.start_all()
        know_trainers(run)
        run.wait_for(lambda: run.events("checkpoint"), "a checkpoint")

        # One sum fails: both groups refuse that attempt, and train the same batch again.
        out, err = (command := chaos(run, str(folder), FAIL)).communicate(timeout=60)
        assert (command.returncode, err) == (ExitCode.DONE, "")
        assert f"injected: {FAIL}: trainer-1 (pid {run.processes['trainer-1'][0].pid})" in out
        assert f"lifted: {FAIL}: trainer-1" in out
        run.wait_for(lambda: len(run.events("refuse")) == 2, "both to refuse the step")
        refused = run.events("refuse")
        assert {e["name"] for e in refused} == {"trainer-0", "trainer-1"}
        step = refused[0]["step"]
        assert refused[1]["step"] == step
        run.wait_step(step + 3)

        # The disk of the checkpoints is full: one is not written, training goes on.
        command = chaos(run, str(folder), FILL)
        run.wait_for(
            lambda: [e for e in run.events("fault") if "No space left" in e["cause"]],
            "a save that fails",
        )
        at = len(run.metrics())
        run.wait_step(at + 3)
        command.send_signal(signal.SIGINT)
        out, _ = command.communicate(timeout=60)
        assert command.returncode == ExitCode.INTERRUPTED
        assert f"lifted: {FILL}: trainer-0" in out
        saved = len(run.events("checkpoint"))
        run.wait_for(lambda: len(run.events("checkpoint")) > saved, "a checkpoint")

        end = len(run.metrics()) + 10
        (folder / "last_step").write_text(str(end))
        for group in (0, 1):
            assert run.wait_exit(f"trainer-{group}") == [0], run.logs()
        assert len(run.events("refuse")) == 2
        steps = steps_of(run)
        assert steps == list(range(1, len(steps) + 1))
        assert_groups_equal(run, (0, 1), at_least=len(steps))
        assert not run.events("restore")

        trace = folder / "trace.json"
        out, err = (command := chaos(run, "--record", str(folder), str(trace))).communicate()
        assert command.returncode == ExitCode.DONE, err
        first, second = load(trace)
        assert (first.deed, second.deed) == (FAIL, FILL)
        assert first.step < step < second.step
        run.kill("host")
        with Journal.open(run.run.journal, events=EventList()) as journal:
            assert journal.audit().problems == []
