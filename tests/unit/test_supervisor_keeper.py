"""The keeper with small stand-in roles: real processes, real signals, nothing heavy."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.observability.events import Kind, read_events
from torchtitan_rl_ft.run_folder import ProcessId, RunFolder

HARNESS = textwrap.dedent(
    """
    import asyncio, json, os, sys
    from torchtitan_rl_ft.observability.events import EventLog
    from torchtitan_rl_ft.host import process
    from torchtitan_rl_ft.roles.keeper import RoleKeeper
    from torchtitan_rl_ft.roles.role_spec import RoleSpec
    from torchtitan_rl_ft.roles.lifecycle import Duty, RestartLimits
    from torchtitan_rl_ft.roles.exits import GracefulExit
    from torchtitan_rl_ft.roles.standby import Standbys
    from torchtitan_rl_ft.run_folder import RunFolder

    job = json.loads(sys.argv[1])
    folder = RunFolder(job["folder"])
    events = EventLog(folder.events, run="t", role="supervisor", name="supervisor")
    process.adopt_orphans()
    specs = [RoleSpec(n, Duty(d), tuple(argv)) for n, d, argv in job["roles"]]

    def ask(reason, timeout_s):
        (folder.path / "asked").write_text(reason)

    async def main():
        limits_s = job.get("graceful")  # [limit_s, hurry_limit_s]
        graceful = limits_s and GracefulExit(ask, limit_s=limits_s[0], hurry_limit_s=limits_s[1])
        keeper = RoleKeeper(
            folder, specs, events, env=dict(os.environ),
            limits=RestartLimits(job.get("max_restarts", 2), 60.0, job.get("backoff_s", 0.05)),
            cleanup_timeout_s=job.get("cleanup_timeout_s", 6.0),
            worker_end_timeout_s=job.get("worker_end_timeout_s", 60.0),
            look_over_interval_s=0.2,
            graceful=graceful,
            standbys=Standbys(
                folder, events, settle_timeout_s=job.get("settle_timeout_s", 60.0)
            ),
        )
        return await keeper.run()

    outcome = asyncio.run(main())
    print(json.dumps([outcome.exit_code, outcome.cause, outcome.detail]))
    """
)


def sh(script: str) -> list[str]:
    return ["/bin/sh", "-c", script]


FOREVER = sh("exec sleep 600")


class Job:
    """A keeper in a process of its own."""

    def __init__(self, path: Path, roles, **options):
        self.folder = RunFolder(path)
        job = {"folder": str(path), "roles": roles, **options}
        self.process = subprocess.Popen(
            [sys.executable, "-c", HARNESS, json.dumps(job)], stdout=subprocess.PIPE, text=True
        )

    def outcome(self, timeout_s: float = 20.0):
        out, _ = self.process.communicate(timeout=timeout_s)
        assert self.process.returncode == 0, out
        exit_code, cause, detail = json.loads(out)
        return exit_code, cause, detail

    def events(self, kind: Kind, subject: str | None = None):
        if not self.folder.events.is_file():
            return []
        found = [e for e in read_events(self.folder.events) if e.kind is kind]
        return [e for e in found if subject in (None, e.data.get("subject"))]

    def wait_for(self, kind: Kind, subject: str, n: int = 1, timeout_s: float = 10.0):
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if len(found := self.events(kind, subject)) >= n:
                return found[n - 1]
            time.sleep(0.02)
        raise AssertionError(f"no {kind} {n} of {subject}")

    def all_processes(self) -> list[ProcessId]:
        spawned = self.events(Kind.SPAWN)
        return [ProcessId(e.data["pid"], e.data["start_time"]) for e in spawned]


@pytest.fixture
def start(tmp_path):
    jobs = []

    def make(roles, **options):
        jobs.append(Job(tmp_path, roles, **options))
        return jobs[-1]

    yield make
    end_all(jobs)


def end_all(jobs):
    """At the end of a test: no job, and nothing that it has started."""
    for job in jobs:
        if job.process.poll() is None:
            job.process.kill()
        job.process.wait()
        assert gone_within(job.all_processes(), 5.0)


def gone_within(processes, timeout_s):
    deadline = time.monotonic() + timeout_s
    while any(p.alive() for p in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_run_ends_with_the_driver_and_stops_the_services(start):
    job = start(
        [
            ("serving", "service", FOREVER),
            ("rollout", "driver", sh("sleep 0.3")),
            ("trainer-0", "worker", sh("sleep 0.5")),
        ]
    )
    assert job.outcome() == (ExitCode.DONE, "complete", [])
    ends = {e.data["subject"]: (e.phase, e.data["returncode"]) for e in job.events(Kind.EXIT)}
    assert ends["rollout"] == ("finished", 0)
    assert ends["trainer-0"] == ("finished", 0)
    assert ends["serving"] == ("stopped", -signal.SIGTERM)


def test_killed_role_is_restarted_alone_and_at_once(start):
    job = start([("serving", "service", FOREVER), ("rollout", "driver", FOREVER)])
    other = job.wait_for(Kind.SPAWN, "rollout")
    first = job.wait_for(Kind.SPAWN, "serving")
    os.kill(first.data["pid"], signal.SIGKILL)
    killed_s = time.monotonic()
    end = job.wait_for(Kind.EXIT, "serving")
    second = job.wait_for(Kind.SPAWN, "serving", n=2)
    assert end.mono_s - killed_s < 1.0
    assert (end.phase, end.cause) == ("fault", "killed by SIGKILL")
    assert end.data["signal"] == 9
    assert second.data["attempt"] == 2 and second.data["pid"] != first.data["pid"]
    assert second.data["log"].endswith("logs/serving/attempt_2.log")
    assert ProcessId(other.data["pid"], other.data["start_time"]).alive()
    assert len(job.events(Kind.SPAWN, "rollout")) == 1
    job.process.send_signal(signal.SIGTERM)
    assert job.outcome()[0] == ExitCode.INTERRUPTED


def test_used_up_restarts_end_the_run_with_the_last_lines_of_the_log(start):
    job = start(
        [
            ("serving", "service", sh("echo loading; echo no such model >&2; exit 1")),
            ("rollout", "driver", FOREVER),
        ]
    )
    exit_code, cause, detail = job.outcome()
    assert exit_code == ExitCode.FAILED
    assert cause.startswith("serving: exit code 1 (2 restarts within 60 s are used up); log: ")
    assert cause.endswith("logs/serving/attempt_3.log")
    assert detail == ["loading", "no such model"]
    delays = [e.data["delay_s"] for e in job.events(Kind.RESTART, "serving")]
    assert delays == [0.0, 0.05]


@pytest.mark.row("L2")
def test_a_group_that_crashes_at_its_start_is_started_after_longer_pauses_alone(start):
    job = start(
        [
            ("trainer-0", "worker", sh("exit 1")),
            ("trainer-1", "worker", FOREVER),
            ("rollout", "driver", FOREVER),
        ],
        max_restarts=4,
        backoff_s=0.2,
    )
    assert job.outcome()[0] == ExitCode.FAILED
    starts = [e.mono_s for e in job.events(Kind.SPAWN, "trainer-0")]
    ends = [e.mono_s for e in job.events(Kind.EXIT, "trainer-0")]
    pauses = [begin - end for end, begin in zip(ends, starts[1:], strict=False)]
    assert [p >= least for p, least in zip(pauses, (0.0, 0.2, 0.4, 0.8), strict=True)] == [True] * 4
    assert len(job.events(Kind.SPAWN, "trainer-1")) == 1


@pytest.mark.parametrize("code", [int(ExitCode.CONFIG), int(ExitCode.NUMERIC)])
def test_exit_that_no_restart_mends_ends_the_run_with_that_code(start, code):
    job = start([("trainer-0", "worker", sh(f"exit {code}")), ("rollout", "driver", FOREVER)])
    assert job.outcome()[0] == code
    assert job.events(Kind.RESTART) == []


@pytest.mark.row("I5")
def test_a_group_with_wrong_results_is_not_started_again_and_the_last_one_ends_the_run(start):
    wrong = int(ExitCode.WRONG_RESULT)
    job = start(
        [
            ("trainer-0", "worker", sh(f"exit {wrong}")),
            ("trainer-1", "worker", sh(f"sleep 1; exit {wrong}")),
            ("rollout", "driver", FOREVER),
        ]
    )
    exit_code, cause, _ = job.outcome()
    assert exit_code == wrong and cause.startswith("trainer-1: exit code 4")
    assert job.events(Kind.RESTART) == []


def test_role_that_waits_for_its_restart_is_not_started_once_the_run_ends(start):
    job = start(
        [
            ("serving", "service", sh("exit 1")),
            ("trainer-0", "worker", sh("trap '' TERM; sleep 2")),
        ],
        max_restarts=3,
        backoff_s=1.0,
        cleanup_timeout_s=6.0,
    )
    job.wait_for(Kind.RESTART, "serving", n=2)
    job.process.send_signal(signal.SIGTERM)
    assert job.outcome()[0] == ExitCode.INTERRUPTED
    assert len(job.events(Kind.SPAWN, "serving")) == 2


def test_command_that_cannot_run_is_named(start):
    job = start([("serving", "service", ["/no/such/program"])], max_restarts=0)
    exit_code, cause, detail = job.outcome()
    assert exit_code == ExitCode.FAILED and cause.startswith("serving: ")
    assert detail == ["cannot run /no/such/program: No such file or directory"]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_stops_everything(start, signum):
    tree = sh("sleep 600 & sh -c 'sleep 601' & wait")
    job = start([("serving", "service", tree), ("rollout", "driver", FOREVER)])
    job.wait_for(Kind.SPAWN, "rollout")
    job.process.send_signal(signum)
    assert job.outcome() == (ExitCode.INTERRUPTED, f"stopped by {signum.name}", [])


@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.2, 0.3, 0.4])
def test_signal_at_any_moment_of_the_start(start, delay_s):
    job = start([(f"trainer-{i}", "worker", FOREVER) for i in range(3)])
    time.sleep(0.25 + delay_s)
    job.process.send_signal(signal.SIGTERM)
    out, _ = job.process.communicate(timeout=20)
    if out:
        assert json.loads(out)[0] == ExitCode.INTERRUPTED
    assert gone_within(job.all_processes(), 5.0)


def test_role_that_ignores_sigterm_and_its_detached_children_are_killed(start, tmp_path):
    pids = tmp_path / "pids"
    stubborn = sh(
        f"trap '' TERM; setsid sh -c 'trap \"\" TERM; echo $$ >> {pids}; exec sleep 600' & "
        f"echo $$ >> {pids}; while :; do sleep 1; done"
    )
    job = start([("serving", "service", stubborn)], cleanup_timeout_s=2.0)
    while not pids.exists() or len(pids.read_text().split()) < 2:
        time.sleep(0.02)
    tree = [ProcessId.of(int(p)) for p in pids.read_text().split()]
    stopped_s = time.monotonic()
    job.process.send_signal(signal.SIGTERM)
    exit_code, _, detail = job.outcome()
    assert (exit_code, detail) == (ExitCode.INTERRUPTED, [])
    assert time.monotonic() - stopped_s < 3.0
    assert not any(p.alive() for p in tree)


def test_second_signal_ends_the_grace(start):
    stubborn = sh("trap '' TERM; echo up; while :; do sleep 1; done")
    job = start([("serving", "service", stubborn)], cleanup_timeout_s=60.0)
    log = Path(job.wait_for(Kind.SPAWN, "serving").data["log"])
    while "up" not in log.read_text():
        time.sleep(0.02)
    job.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    stopped_s = time.monotonic()
    job.process.send_signal(signal.SIGINT)
    assert job.outcome()[0] == ExitCode.INTERRUPTED
    assert time.monotonic() - stopped_s < 5.0


@pytest.mark.scenario("Z-1")
def test_nothing_outlives_a_killed_supervisor(start):
    job = start([("serving", "service", FOREVER), ("rollout", "driver", FOREVER)])
    job.wait_for(Kind.SPAWN, "serving")
    job.wait_for(Kind.SPAWN, "rollout")
    processes = job.all_processes()
    assert len(processes) == 2 and all(p.alive() for p in processes)
    job.process.kill()
    job.process.wait()
    assert gone_within(processes, 5.0)


def test_what_a_dead_role_left_running_does_not_meet_its_successor(start, tmp_path):
    pid_file = tmp_path / "orphan"
    script = sh(f"sleep 600 & echo $! > {pid_file}.$$; mv {pid_file}.$$ {pid_file}; exec sleep 600")
    job = start([("serving", "service", script)])
    first = job.wait_for(Kind.SPAWN, "serving")
    while not pid_file.exists():
        time.sleep(0.02)
    orphan = ProcessId.of(int(pid_file.read_text()))
    os.kill(first.data["pid"], signal.SIGKILL)
    job.wait_for(Kind.SPAWN, "serving", n=2)
    assert not orphan.alive()
    job.process.send_signal(signal.SIGTERM)
    assert job.outcome()[0] == ExitCode.INTERRUPTED


def test_worker_that_fails_after_the_end_of_the_run_fails_the_run(start):
    job = start(
        [("rollout", "driver", sh("sleep 0.1")), ("trainer-0", "worker", sh("sleep 0.5; exit 1"))]
    )
    exit_code, cause, _ = job.outcome()
    assert exit_code == ExitCode.FAILED
    assert cause.startswith("the run is done, but no trainer ended with exit code 0")


def test_one_finished_worker_is_enough_at_the_end(start):
    job = start(
        [
            ("rollout", "driver", sh("sleep 0.1")),
            ("trainer-0", "worker", sh("sleep 0.2")),
            ("trainer-1", "worker", FOREVER),
        ],
        cleanup_timeout_s=2.0,
    )
    assert job.outcome()[:2] == (ExitCode.DONE, "complete")
    (warning,) = job.events(Kind.WARN)
    assert warning.cause == "had not finished at the run's end: ['trainer-1']"


def test_run_that_does_not_end_after_its_workers_fails(start):
    job = start(
        [("rollout", "driver", FOREVER), ("trainer-0", "worker", sh("exit 0"))],
        worker_end_timeout_s=0.1,
    )
    exit_code, cause, _ = job.outcome()
    assert exit_code == ExitCode.FAILED
    assert "all trainers have finished but the run did not end within 0.1 s" in cause


def test_full_disk_stops_the_run_cleanly(start, tmp_path):
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    job = start([("serving", "service", FOREVER)])
    exit_code, cause, _ = job.outcome()
    assert exit_code == ExitCode.FAILED
    assert "No space left on device" in cause


def test_attempts_are_counted_over_all_lives_of_the_run_folder(start, tmp_path):
    old = tmp_path / "logs" / "rollout" / "attempt_4.log"
    old.parent.mkdir(parents=True)
    old.write_text("earlier\n")
    job = start([("rollout", "driver", sh("echo attempt $TORCHTITAN_RL_FT_ATTEMPT"))])
    assert job.outcome()[0] == ExitCode.DONE
    assert old.read_text() == "earlier\n"
    assert (old.parent / "attempt_5.log").read_text() == "attempt 5\n"
