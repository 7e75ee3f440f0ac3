"""A disk that is full, and sums over the groups that fail, on processes that know nothing of it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from config_jobs import GOOD, job
from small_disks import mounted
from test_chaos_injector import Run, running, until

from torchtitan_rl_ft.chaos import disk, failing_reduce
from torchtitan_rl_ft.chaos.memory import Memory
from torchtitan_rl_ft.observability.events import Kind
from torchtitan_rl_ft.run_folder import ProcessId

TRAINER = """
import sys, torchft
from torchft.process_group import Gloo
group = Gloo()
print("up", flush=True)
for line in sys.stdin:
    try:
        print(group.allreduce(int(line)), flush=True)
    except RuntimeError as e:
        print(type(e).__name__, e, flush=True)
"""
TORCHFT = """
class ProcessGroupWrapper:
    def allreduce(self, x):
        return 2 * x

class Gloo(ProcessGroupWrapper):
    pass
"""
FAILED = "AllReduceFailed the all-reduce has failed (injected)"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    found = Run(tmp_path / "run")
    yield found
    found.end()


# Sums -------------------------------------------------------------------------------------------


class Trainer:
    """A process with a stand-in for torchft, started as a job with `fail` faults starts it."""

    def __init__(self, run: Run, name: str, tmp_path: Path, *, wrapped: bool = True) -> None:
        package = tmp_path / "packages" / "torchft"
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text("")
        (package / "process_group.py").write_text(TORCHFT)
        (package.parent / "sitecustomize.py").write_text("import sys; sys.next_ran = True")
        env = {
            **os.environ,
            "TORCHTITAN_RL_FT_RUN": str(run.folder.path),
            "PYTHONPATH": os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")]),
        }
        if wrapped:
            failing_reduce.put_before(env)
        script = TRAINER + "\nassert sys.next_ran"
        self.popen = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            text=True,
        )
        run.started.append(self.popen)  # type: ignore[arg-type]
        assert self.read() == "up"
        self.id = ProcessId.of(self.popen.pid)
        run.log.emit(Kind.SPAWN, subject=name, pid=self.id.pid, start_time=self.id.start_time)

    def read(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().rstrip("\n")

    def sum(self, x: int) -> str:
        assert self.popen.stdin is not None
        print(x, file=self.popen.stdin, flush=True)
        return self.read()


def test_one_sum_of_one_trainer_fails(run: Run, tmp_path: Path) -> None:
    run.start()
    one, two = (Trainer(run, f"trainer-{g}", tmp_path) for g in (0, 1))
    with running(run.injector("fail trainer-1 all-reduce at step 1")):
        assert (one.sum(1), two.sum(1)) == ("2", "2")
        run.log.emit(Kind.COMMIT, step=1)
        until(lambda: run.seen())
        assert one.sum(2) == "4"
        until(lambda: two.sum(2) == FAILED)
        assert two.sum(3) == "6"
        until(lambda: run.seen(phase="lift"))
    [event] = run.seen()
    assert (event.data["fault"], event.data["pid"]) == ("fail", two.id.pid)
    assert Memory(run.folder).held == {}
    assert list((run.folder.path / "chaos" / "failing_reduce").iterdir()) == []
    assert two.popen.stdin is not None
    two.popen.stdin.close()
    assert two.popen.wait(10) == 0  # the sitecustomize behind ours has run as well


def test_all_sums_of_a_time_fail(run: Run, tmp_path: Path) -> None:
    run.start()
    trainer = Trainer(run, "trainer-0", tmp_path)
    with running(run.injector("fail trainer-0 all-reduce for 0.5 s after 0.01 s")):
        until(lambda: trainer.sum(1) == FAILED)
        assert trainer.sum(2) == FAILED
        until(lambda: trainer.sum(1) == "2")
    assert len(run.seen(phase="lift")) == 1


def test_an_order_for_a_launcher_is_obeyed_by_one_of_its_ranks(run: Run, tmp_path: Path) -> None:
    ranks = [Trainer(run, "trainer-0", tmp_path) for _ in range(2)]
    failing_reduce.order(run.folder, os.getpid(), failing_reduce.ONCE)  # their parent
    assert sorted(r.sum(1) for r in ranks) == ["2", FAILED]
    assert failing_reduce.obeyed_by(run.folder, os.getpid()) == ranks[0].id.pid
    failing_reduce.withdraw(run.folder, os.getpid())
    assert failing_reduce.obeyed_by(run.folder, os.getpid()) is None


def test_a_trainer_that_was_not_started_for_it(run: Run, tmp_path: Path) -> None:
    run.start()
    trainer = Trainer(run, "trainer-0", tmp_path, wrapped=False)
    with running(run.injector("fail trainer-0 all-reduce after 0.01 s")):
        until(lambda: run.seen(Kind.WARN, None))
    assert "was not started with process groups that can fail" in str(
        run.seen(Kind.WARN, None)[0].cause
    )
    assert trainer.sum(1) == "2" and run.seen() == []


def test_an_order_of_a_killed_injector_is_withdrawn(run: Run, tmp_path: Path) -> None:
    run.start()
    trainer = Trainer(run, "trainer-0", tmp_path)
    failing_reduce.order(run.folder, trainer.id.pid, failing_reduce.ALL)
    Memory(run.folder).hold("fail #1", name="trainer-0", failing=trainer.id.pid)
    assert trainer.sum(1) == FAILED
    with running(run.injector()):
        until(lambda: run.seen(phase="lift"))
    assert trainer.sum(1) == "2"


# The disk ---------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "small", "8m") as folder:
        yield folder


def full(folder: Path) -> bool:
    """As a stranger finds it."""
    try:
        (folder / "probe").write_bytes(bytes(8192))
    except OSError as e:
        assert e.errno == errno.ENOSPC
        return True
    finally:
        (folder / "probe").unlink(missing_ok=True)
    return False


def test_a_full_disk_has_room_again_after_its_time(small_disk: Path) -> None:
    run = Run(small_disk / "run")
    try:
        run.start()
        run.spawn("rollout")
        run.spawn("serving", script="print(flush=True); import time; time.sleep(600)")
        kept = small_disk / "kept"
        kept.write_bytes(bytes(1024**2))
        plan = ["fill disk of rollout for 1 s after 0.01 s", "stop serving for 0.1 s after 0.3 s"]
        with running(run.injector(*plan)):
            until(lambda: full(small_disk))
            kept.unlink()  # what is freed meanwhile is taken as well
            until(lambda: full(small_disk))
            until(lambda: len(run.seen(phase="lift")) == 2)
            assert not full(small_disk)
        # What came meanwhile waited until it could be written down.
        [filled, stopped] = run.seen()
        [lifted, _] = run.seen(phase="lift")
        assert filled.data["fault"] == "fill"
        assert filled.mono_s + 1 <= lifted.mono_s <= stopped.mono_s
        assert [p.name for p in small_disk.iterdir()] == ["run"]
    finally:
        run.end()


def test_a_fault_of_the_same_look_waits_for_a_full_disk(small_disk: Path) -> None:
    run = Run(small_disk / "run")
    try:
        run.start()
        run.spawn("rollout")
        run.spawn("serving", script="print(flush=True); import time; time.sleep(600)")
        plan = ["fill disk of rollout for 0.5 s after 0.01 s", "kill serving after 0.01 s"]
        with running(run.injector(*plan)):
            until(lambda: len(run.seen()) == 2)
        [lifted] = run.seen(phase="lift")
        filled, killed = run.seen()
        assert filled.data["fault"] == "fill"
        assert lifted.mono_s <= killed.mono_s
    finally:
        run.end()


def test_what_a_killed_injector_filled_is_removed(small_disk: Path) -> None:
    run = Run(small_disk / "run")
    run.start()
    memory = Memory(run.folder)
    memory.hold("fill #1", name="rollout", ballast=str(small_disk / disk.NAME))
    disk.Ballast(small_disk).fill()
    assert full(small_disk)
    with running(run.injector()):
        until(lambda: run.seen(phase="lift"))
    assert not full(small_disk) and Memory(run.folder).held == {}
    run.log.close()


def test_a_large_disk_is_left_alone(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "LARGEST_BYTES", 1024**2)
    run.start()
    run.spawn("rollout")
    with running(run.injector("fill disk of rollout for 1 s after 0.01 s")):
        until(lambda: run.seen(Kind.WARN, None))
    assert "GiB at most is filled: put it on a small one" in str(run.seen(Kind.WARN, None)[0].cause)
    assert run.seen() == [] and not list(tmp_path.rglob(disk.NAME))


@pytest.mark.parametrize(
    ("target", "folder"),
    [
        ("trainer-1", "saved"),
        ("any trainer", "saved"),
        ("rollout", "journal"),
        ("serving", ""),
        ("engine-0", ""),
    ],
)
def test_whose_disk_it_is(tmp_path: Path, target: str, folder: str) -> None:
    found = job(tmp_path, GOOD, "--job.dump_folder", str(tmp_path), "--checkpoint.folder", "saved")
    assert disk.of(target, found) == tmp_path / folder
    assert disk.existing(tmp_path / "not" / "there") == tmp_path
