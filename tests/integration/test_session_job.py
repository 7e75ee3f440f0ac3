"""Sessions from job to job: a real supervisor, a real serving role, fake engines."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import FAKES, fake_engine_program
from job_run import SUPERVISOR, Job
from policies import tiny_model, token_of, write_policy

from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.observability.events import Kind
from torchtitan_rl_ft.rpc.client import RoleClient, RoleRefused
from torchtitan_rl_ft.run_folder import ProcessId, RunFolder

pytestmark = pytest.mark.timeout(120)

GO_ON = "--recovery.auto_continue_train"


class SmallJob(Job):
    """Jobs of one session, one after the other, each in a run folder of its own if need be."""

    def __init__(self, path: Path) -> None:
        super().__init__(path / "run")
        self.model = tiny_model(path / "model")
        self.keys = [
            *("--model.flavor", "hf", "--model.hf_assets_path", str(self.model)),
            *("--rollout.engine_python", fake_engine_program(path)),
            *("--rollout.session_id", "s", "--rollout.cleanup_timeout", "6"),
            *("--recovery.role_max_restarts", "2"),
        ]

    def start(self, *overrides: str, folder: Path | None = None) -> SmallJob:
        if folder is not None:
            self.folder = RunFolder(folder)
        keys = [*self.keys, "--job.dump_folder", str(self.folder.path), *overrides]
        self.spawn(SUPERVISOR, sys.executable, str(FAKES / "small_job.py"), *keys)
        return self

    def finish(self, code: int) -> int:
        """Have the driver end with `code`; the job's exit code."""
        (self.folder.path / "end").write_text(str(code))
        return self.end(timeout_s=40)

    # The session ------------------------------------------------------------------------

    def call(self, method: str, route: str, **body: Any) -> Any:
        record, session = self.session_record(), self.session
        assert session is not None
        client = RoleClient("serving", lambda: record.serving.url, session.token() or "")
        try:
            if method == "GET":
                return client.get(route, deadline_s=10)
            return client.post(route, body, deadline_s=20)
        finally:
            client.close()

    def publish(self, step: int, **body: Any) -> int:
        path, digest = write_policy(self.folder.weights, self.model, step)
        answer = self.call(
            "POST",
            "/v1/publish",
            **{
                "step": step,
                "token": token_of(step),
                "path": str(path),
                "manifest_digest": digest,
                "wait": "all",
                "deadline_s": 15,
                **body,
            },
        )
        return answer["version"]

    def up(self) -> SmallJob:
        """Until this job's serving role answers, owned by the job, with both engines up."""

        def ready() -> bool:
            if self.session is None or not (record := self.session.read()):
                return False
            mine = record.owner is not None and record.owner.pid == self.processes[SUPERVISOR].pid
            if not (mine and record.serving.url and record.serving.alive()):
                return False
            if not self.events(Kind.SPAWN, subject="serving"):
                return False
            states = [e["state"] for e in self.call("GET", "/v1/status")["engines"]]
            return len(states) == 2 and not {"starting", "retired"} & set(states)

        self.wait_for(ready, "serving with two engines", 30)
        return self

    def engines(self) -> list[ProcessId]:
        assert self.session is not None
        return [hold.roots[0] for hold in self.session.engine_holds()]

    def serving_id(self) -> ProcessId:
        return self.session_record().serving.id

    def status(self) -> dict[str, Any]:
        done = self.command("status", "s", "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def job(tmp_path) -> Iterator[SmallJob]:
    with SmallJob(tmp_path) as made:
        yield made


def check_kept(job: SmallJob) -> None:
    """Exactly serving, engines and warden are there, closed, and belong to nobody."""
    job.wait_for_session_alone(within_s=8)
    job.wait_for_session_state("kept")
    assert all(e.alive() for e in job.engines()) and job.serving_id().alive()
    assert job.engine_statuses() == [200, 200]
    assert job.generate_status() == 503


def check_nothing(job: SmallJob, within_s: float = 5.0) -> None:
    assert job.left(within_s=within_s) == []
    assert job.session is None


@pytest.mark.row("F1")
@pytest.mark.row("F2")
@pytest.mark.row("D5")
@pytest.mark.row("D7")
@pytest.mark.scenario("W-2")
@pytest.mark.scenario("Z-1")
def test_killed_and_gone_on_with_from_another_folder(job, tmp_path):
    """Other number of groups, other run folder: same serving, same engines, growing versions.
    The decoy at another port is not asked."""
    job.start().up()
    attempt = job.session_record().owner.attempt
    assert job.generate_status() == 503  # nothing is published yet
    assert job.publish(0, attempt=attempt) == 1 and job.publish(1) == 2
    assert job.generate_status(20) == 200
    serving, engines = job.serving_id(), job.engines()
    trainers = [job.process_of("trainer-0"), job.process_of("trainer-1")]
    job.kill()
    check_kept(job)
    assert not any(t.alive() for t in trainers)
    told = job.status()
    assert told["owner"] is None and told["rule"] == "rollout.session_id"
    assert 3500 < told["ttl_left_s"] <= 3600 and len(told["engines"]) == 2

    first = job.folder
    allowed = ("--fault_tolerance.replica_groups", "1", "--rollout.health_check_interval", "1.5")
    job.start(GO_ON, *allowed, folder=tmp_path / "other").up()
    assert (job.serving_id(), job.engines()) == (serving, engines)
    assert job.process_of("serving") == serving  # adopted
    with pytest.raises(RoleRefused, match="not to the sender's job"):
        job.publish(2, attempt=attempt)  # a straggler of the dead job
    with pytest.raises(RoleRefused, match="other"):
        job.call("POST", "/v1/detach", attempt=attempt, outcome="dispose")
    assert job.generate_status() == 503 and job.status()["admission"] != "open"
    assert job.publish(0) == 3  # above all that the first folder knew
    assert job.generate_status(20) == 200
    assert [e["version"] for e in job.status()["engines"]] == [3, 3]
    assert job.status()["run_folder"] == str(job.folder.path)
    assert {e.version for e in job.events(Kind.INSTALL)} == {3}  # in the new run's events
    assert job.finish(0) == ExitCode.DONE, job.story()
    assert job.folder.roles() == []
    check_nothing(job)
    assert first.path != job.folder.path


@pytest.mark.row("A4")
@pytest.mark.row("F3")
@pytest.mark.row("F9")
@pytest.mark.scenario("Z-1")
def test_a_job_that_failed_leaves_its_session(job, tmp_path):
    """Until it is stopped; what does not fit, or belongs to a living job, is refused."""
    job.start("--recovery.role_max_restarts", "0").up()
    living = [*job.engines(), job.serving_id()]
    second = tmp_path / "second"
    refused = other_job(job, second, GO_ON)
    assert refused.returncode == ExitCode.CONFIG
    assert "which is alive" in refused.stderr and str(job.folder.path) in refused.stderr
    assert not (second / "config.resolved.json").exists()

    assert job.finish(1) == ExitCode.FAILED
    (line,) = [x for x in job.err().splitlines() if "is kept for" in x]
    for part in ("session s", "3600 s", "torchtitan stop s", GO_ON):
        assert part in line
    check_kept(job)
    assert [*job.engines(), job.serving_id()] == living

    refused = other_job(job, second, GO_ON, "--rollout.temperature", "0.5")
    assert refused.returncode == ExitCode.CONFIG
    assert "rollout.temperature was 1.0, is 0.5" in refused.stderr
    assert refused.stderr.count(" was ") - refused.stderr.count("session s was") == 1
    refused = other_job(job, second)  # not told to go on
    assert refused.returncode == ExitCode.CONFIG and "torchtitan stop" in refused.stderr
    check_kept(job)
    assert [*job.engines(), job.serving_id()] == living

    decoy = subprocess.Popen(["sleep", "600"])
    try:
        stopped = job.command("stop", str(job.folder.path))
        assert (stopped.returncode, stopped.stdout) == (
            0,
            "session s: ended its serving role and 2 engines\n",
        )
        check_nothing(job)
        again = job.command("stop", str(job.folder.path))
        assert (again.returncode, again.stdout) == (0, "session s: nothing is running\n")
        assert decoy.poll() is None
    finally:
        decoy.kill()
        decoy.wait()
    assert "sessions: none" in job.command("stop", "s").stderr


def other_job(job: SmallJob, folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    keys = [*job.keys, "--job.dump_folder", str(folder), *overrides]
    return subprocess.run(
        [sys.executable, str(FAKES / "small_job.py"), *keys],
        env=job.env,
        capture_output=True,
        text=True,
        timeout=40,
    )


@pytest.mark.row("F1")
@pytest.mark.row("D2")
@pytest.mark.row("M1")
def test_serving_is_killed_then_the_supervisor(job):
    """Each time the engines live on; the keeper, then the next job, starts a serving role."""
    job.start().up()
    assert job.publish(0) == 1
    engines, first = job.engines(), job.serving_id()
    process.kill(first)
    job.wait_for(lambda: job.serving_id() != first, "another serving role")
    job.up()
    assert job.engines() == engines
    assert job.generate_status(20) == 200  # the owner has published: no need to do it again
    process.kill(job.serving_id())
    job.kill()
    job.wait_for_session_alone(within_s=8)
    assert all(e.alive() for e in job.engines()) and job.engines() == engines
    assert "serving has died" in job.command("status").stdout + job.command("status", "s").stdout

    job.start(GO_ON).up()
    assert job.engines() == engines
    assert job.generate_status() == 503
    assert job.publish(1) == 2
    stopped = job.command("stop", "s")
    assert stopped.returncode == 0 and stopped.stdout.startswith("ended the job (process ")
    assert job.end() == ExitCode.INTERRUPTED
    check_nothing(job)


@pytest.mark.row("F7")
def test_a_serving_role_that_hangs_is_replaced(job):
    job.start().up()
    engines, hung = job.engines(), job.serving_id()
    job.kill()
    check_kept(job)
    os.kill(hung.pid, signal.SIGSTOP)
    job.start(GO_ON).up()
    assert not hung.alive() and job.engines() == engines
    # At a failed job's end too: killed within the budget, its engines stay for the next one.
    hung = job.serving_id()
    os.kill(hung.pid, signal.SIGSTOP)
    started_s = time.monotonic()
    assert job.finish(1) == ExitCode.FAILED
    assert time.monotonic() - started_s < 20
    job.wait_for_session_alone(within_s=5)
    assert not hung.alive() and all(e.alive() for e in engines)
    assert job.command("stop", "s").stdout == "session s: ended 2 engines\n"
    check_nothing(job)


@pytest.mark.row("F1")
@pytest.mark.row("B8")
def test_the_session_folder_is_removed_and_an_engine_hangs_when_it_is_adopted(job):
    """Serving writes the folder again; its successor finds the engines in it, and does not take
    the silent one for one on its start."""
    job.start("--rollout.install_timeout_s", "4").up()
    assert job.publish(0) == 1
    (hung, healthy), folder = job.engines(), job.session.path
    shutil.rmtree(folder)
    names = {"session.json", "engines.json", "token", "serving.lock", "warden.lock"}
    whole = lambda: folder.is_dir() and names <= {p.name for p in folder.iterdir()}  # noqa: E731
    job.wait_for(whole, "the folder", 10)
    job.wait_for(lambda: job.session_record().warden.alive(), "a warden", 5)
    assert job.engines() == [hung, healthy]
    os.kill(hung.pid, signal.SIGSTOP)
    process.kill(job.serving_id())
    job.wait_for(lambda: not hung.alive(), "the end of the frozen engine", 20)
    job.up()
    assert job.engines()[1] == healthy
    assert any("was up, and did not answer" in e.cause for e in job.events(Kind.FAULT))
    assert job.finish(0) == ExitCode.DONE, job.story()
    check_nothing(job)


@pytest.mark.row("F3")
@pytest.mark.parametrize("serving_dies", [False, True], ids=["serving-lives", "serving-dead"])
def test_two_jobs_want_a_session_and_one_gets_it(job, tmp_path, serving_dies):
    """The other one ends as refused, and harms nothing."""
    job.start().up()
    engines = job.engines()
    job.kill()
    if serving_dies:
        process.kill(job.serving_id())
    job.wait_for_session_alone(within_s=8)
    names = ("first", "second")
    for name in names:
        keys = [*job.keys, "--job.dump_folder", str(tmp_path / name), GO_ON]
        job.spawn(name, sys.executable, str(FAKES / "small_job.py"), *keys)
    end = time.monotonic() + 40
    while not (ended := [n for n in names if job.processes[n].poll() is not None]):
        assert time.monotonic() < end, job.story()
        time.sleep(0.1)
    (loser,) = ended
    (winner,) = set(names) - {loser}
    assert job.end(loser) == ExitCode.CONFIG, job.story()
    assert "session s" in job.err(loser)
    job.processes[SUPERVISOR] = job.processes.pop(winner)
    job.folder = RunFolder(tmp_path / winner)
    del job.processes[loser]
    job.up()
    assert job.engines() == engines and job.publish(0) > 0 and job.generate_status(20) == 200
    assert job.finish(0) == ExitCode.DONE
    check_nothing(job)


@pytest.mark.row("F6")
@pytest.mark.row("D6")
def test_what_the_dead_trainer_left_unfinished_holds_nobody_up(job):
    """It died in a publish that an engine, which hangs, would never have finished. The successor
    attaches at once, its first publish goes through, the other engine stays."""
    install_s = 3.0
    job.start("--rollout.install_timeout_s", str(install_s)).up()
    assert job.publish(0) == 1
    hung, healthy = job.engines()
    frozen = process.freeze([hung])
    try:
        with ThreadPoolExecutor(1) as threads:
            publishing = threads.submit(job.publish, 1, deadline_s=60)
            job.wait_event(Kind.PUBLISH, n=2)
            job.kill()
            started_s = time.monotonic()
            job.start(GO_ON, "--rollout.install_timeout_s", str(install_s))
            job.wait_for(lambda: phases(job).count("attach") == 2, "the second owner", 20)
            attached_s = time.monotonic() - started_s
            assert job.publish(2, wait="first", deadline_s=10) == 3
            publishing.result(40)
        job.up()
        job.wait_for(lambda: job.status()["engines"][0]["version"] == 3, "the replacement", 40)
        assert job.engines()[1] == healthy and job.engines()[0] != hung
        assert not any(p.alive() for p in frozen)
        print(f"attached {attached_s:.1f} s after the start of the command")
        assert attached_s < 10
    finally:
        for member in frozen:
            process.kill(member)
    assert job.finish(0) == ExitCode.DONE, job.story()
    check_nothing(job)


@pytest.mark.scenario("Z-1")
@pytest.mark.parametrize("keep", [(), ("--keep-serving",)], ids=["plain", "keep-serving"])
def test_interrupted(job, keep):
    job.start(*keep).up()
    job.interrupt()
    assert job.end() == ExitCode.INTERRUPTED
    if keep:
        check_kept(job)
        assert "is kept for" in job.err()
        assert job.command("stop", "s").returncode == 0
    check_nothing(job)


@pytest.mark.scenario("Z-1")
@pytest.mark.parametrize("serving_dies_too", [False, True])
def test_a_retained_session_ends_by_itself(job, serving_dies_too):
    job.start("--rollout.retain_ttl", "3").up()
    if serving_dies_too:  # and before it the warden, which is started again
        first = job.session_record().warden
        process.kill(first)
        job.wait_for(lambda: job.session_record().warden != first, "another warden", 10)
        assert len(job.events(Kind.WARN)) == 1
    job.kill()
    killed_s = time.monotonic()
    if serving_dies_too:
        process.kill(job.serving_id())
    job.wait_for_session_alone(within_s=2)
    assert job.engines() and all(e.alive() for e in job.engines())
    check_nothing(job, within_s=12)
    assert time.monotonic() - killed_s > 2.5


@pytest.mark.scenario("Z-1")
@pytest.mark.parametrize("end", ["killed", "failed"])
def test_nothing_is_kept_for_no_time(job, end):
    job.start("--rollout.retain_ttl", "0", "--recovery.role_max_restarts", "0").up()
    if end == "killed":
        job.kill()
    else:
        assert job.finish(1) == ExitCode.FAILED
        assert "is kept" not in job.err()
        assert job.left() == []
    check_nothing(job, within_s=5)


def phases(job: SmallJob) -> list[str | None]:
    return [e.phase for e in job.events(Kind.SESSION)]


@pytest.mark.row("F1")
@pytest.mark.row("F2")
def test_the_gateway_goes_on_with_its_session(job, tmp_path):
    """The next job finds it through serving, and asks no other that is there."""
    job.start("--rollout.router", "smg").up()
    assert job.publish(0) == 1

    def gateway() -> dict[str, Any]:
        return job.call("GET", "/v1/status")["gateway"]

    job.wait_for(lambda: len(gateway()["listed"]) == 2, "both engines at the gateway")
    first, serving = gateway(), job.serving_id()
    assert job.generate_status(20) == 200
    with decoy_beside(int(first["url"].rpartition(":")[2])) as decoy:
        job.kill()
        check_kept(job)
        job.start(GO_ON, "--rollout.router", "smg").up()
        assert job.publish(1) == 2
        assert job.generate_status(20) == 200
        job.wait_for(lambda: len(gateway()["listed"]) == 2, "both engines at the gateway")
        assert (job.serving_id(), gateway()) == (serving, first)
        with pytest.raises(BlockingIOError):
            decoy.accept()
    assert "engines listed 2" in job.command("status", "s").stdout
    assert job.finish(0) == ExitCode.DONE, job.story()
    check_nothing(job)


def decoy_beside(port: int) -> socket.socket:
    """A listener at the nearest free port."""
    for near in range(port + 1, port + 20):
        with contextlib.suppress(OSError):
            decoy = socket.create_server(("127.0.0.1", near))
            decoy.setblocking(False)
            return decoy
    raise AssertionError(f"no free port near {port}")
