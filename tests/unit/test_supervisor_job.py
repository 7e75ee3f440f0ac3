"""A job from its preparation to its summary, with small stand-in roles."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest

from torchtitan_rl_ft.config.errors import ConfigError
from torchtitan_rl_ft.config.resolve import Resolved, resolve
from torchtitan_rl_ft.config.start_state import Start
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.observability.events import Kind, read_events
from torchtitan_rl_ft.roles import job
from torchtitan_rl_ft.roles.lifecycle import Duty
from torchtitan_rl_ft.roles.session import Session
from torchtitan_rl_ft.run_folder import RUN_ENV, TOKEN_ENV, ProcessId, RoleAddress, RunFolder
from torchtitan_rl_ft.session_folder import Owner, ServingAt, SessionFolder, SessionRecord

HARNESS = textwrap.dedent(
    """
    import json, sys
    from torchtitan_rl_ft.config.resolve import resolve
    from torchtitan_rl_ft.roles import job, supervisor
    from torchtitan_rl_ft.roles.role_spec import RoleSpec
    from torchtitan_rl_ft.roles.lifecycle import Duty

    given = json.loads(sys.argv[1])
    specs = [RoleSpec(n, Duty(d), tuple(argv)) for n, d, argv in given["roles"]]
    job.role_specs = lambda sections, folder: specs
    sys.exit(supervisor.main(resolve(given["argv"])))
    """
)

# What the rollout role leaves in the run folder, without its work.
ROLLOUT = textwrap.dedent(
    """
    import json, os, sys, time
    from torchtitan_rl_ft.observability.events import EventLog, Kind
    from torchtitan_rl_ft.run_folder import RunFolder

    folder = RunFolder(os.environ["TORCHTITAN_RL_FT_RUN"])
    assert folder.token()
    log = EventLog(folder.events, run="r", role="rollout", name="rollout")
    log.emit(Kind.READY, url="http://127.0.0.1:1")
    log.emit(Kind.ISSUE, groups=2)
    with open(folder.metrics, "a") as metrics:
        for step in range(1, 7):
            row = {"step": step, "reward/mean": step / 6, "time/step_s": 0.02}
            log.emit(Kind.COMMIT, step=step)
            print(json.dumps(row), file=metrics, flush=True)
            time.sleep(0.02)
    log.emit(Kind.EVAL, reward=0.9, prompts=16)
    """
)


def sh(script):
    return ["/bin/sh", "-c", script]


FOREVER = sh("exec sleep 600")
ROLES = [
    ("serving", "service", FOREVER),
    ("rollout", "driver", [sys.executable, "-c", ROLLOUT]),
    ("trainer-0", "worker", sh("sleep 0.5")),
]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Where tokens are kept, and a run folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv(TOKEN_ENV, raising=False)
    monkeypatch.delenv(RUN_ENV, raising=False)
    return tmp_path


def arguments(folder, *more):
    job = ["--job.config_file", "rl_ft_debug.toml", "--job.dump_folder", str(folder)]
    return [*job, "--rollout.weight_transport", "disk", *more]


def start(folder, roles, *more):
    given = json.dumps({"argv": arguments(folder, *more), "roles": roles})
    return subprocess.Popen(
        [sys.executable, "-c", HARNESS, given],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_job_ends_with_a_summary_a_curve_and_nothing_left(home):
    folder = RunFolder(home / "run")
    out, err = (process := start(folder.path, ROLES)).communicate(timeout=30)
    assert process.returncode == ExitCode.DONE, err
    assert "step 6/6  reward 1.000" in out
    for part in ("outcome    complete (exit code 0)", "steps      6 of 6", "0.900 greedy on 16"):
        assert part in out
    assert (folder.path / "reward.png").exists()
    assert folder.roles() == []
    assert list((home / "state").rglob("*.token")) == []
    kinds = [(e.kind, e.phase) for e in read_events(folder.events) if e.kind is Kind.RUN]
    assert kinds == [(Kind.RUN, "start"), (Kind.RUN, "end")]
    assert Resolved.read(folder.path).get("training.steps") == 6
    assert (folder.model / "model.safetensors").exists()


def test_token_reaches_the_roles_but_no_file_of_the_run(home):
    seen = home / "seen"
    roles = [("rollout", "driver", sh(f'printf "%s" "${TOKEN_ENV}" > {seen}; env | wc -l'))]
    process = start(home / "run", roles)
    process.communicate(timeout=30)
    token = seen.read_text()
    assert len(token) >= 32
    for file in (home / "run").rglob("*"):
        assert not file.is_file() or token.encode() not in file.read_bytes()


def test_failure_is_one_line_with_the_log_and_its_last_lines(home):
    roles = [("serving", "service", sh("echo model has no tokenizer >&2; exit 2"))]
    process = start(home / "run", roles)
    _, err = process.communicate(timeout=30)
    assert process.returncode == ExitCode.CONFIG
    first, second = err.splitlines()
    assert first == (
        "torchtitan: error: serving: exit code 2 (the configuration is at fault, a restart would "
        f"not help); log: {home}/run/logs/serving/attempt_1.log"
    )
    assert second == "    model has no tokenizer"


def test_interrupted_job_says_so(home):
    process = start(home / "run", [("serving", "service", FOREVER)])
    folder = RunFolder(home / "run")
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not folder.events.exists():
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == ExitCode.INTERRUPTED
    assert err == "torchtitan: error: stopped by SIGINT\n"


def test_two_jobs_in_one_folder_are_refused(home):
    folder = RunFolder(home / "run")
    with job.exclusive(folder), pytest.raises(ConfigError, match="another `torchtitan run`"):  # noqa: SIM117
        with job.exclusive(folder):
            pass
    with job.exclusive(folder):  # let go at its end
        pass


def test_closed_pipe_does_not_stop_the_job(home):
    folder = RunFolder(home / "run")
    process = start(folder.path, [*ROLES[:2], ("trainer-0", "worker", sh("sleep 0.2"))])
    process.stdout.close()
    assert process.wait(timeout=30) == ExitCode.DONE
    assert "Broken pipe" not in process.stderr.read()
    ends = [e for e in read_events(folder.events) if e.kind is Kind.RUN and e.phase == "end"]
    assert [e.cause for e in ends] == ["complete"]


def test_unwritable_run_folder_is_one_line(home):
    (home / "file").write_text("")
    process = start(home / "file" / "run", ROLES)
    _, err = process.communicate(timeout=30)
    assert process.returncode == ExitCode.FAILED
    assert err.startswith("torchtitan: error: run folder ") and err.count("\n") == 1


# Preparation ----------------------------------------------------------------------------


def test_prepare_clears_dead_roles_and_keeps_the_model(home):
    resolved = resolve(arguments(home / "run"))
    folder = resolved.run_folder
    dead = subprocess.Popen(["true"])
    gone = ProcessId.of(dead.pid)
    dead.wait()
    folder.register("serving", "http://127.0.0.1:9")
    file = folder.path / "roles" / "serving.json"
    address = json.loads(file.read_text()) | {"pid": gone.pid, "start_time": gone.start_time}
    file.write_text(json.dumps(address))
    assert job.prepare(resolved, Session(resolved)) is Start.FRESH
    assert folder.roles() == []
    before = (folder.model / "model.safetensors").stat().st_mtime_ns
    assert job.prepare(resolved, Session(resolved)) is Start.FRESH
    assert (folder.model / "model.safetensors").stat().st_mtime_ns == before


def test_prepare_refuses_the_model_of_another_seed(home):
    folder = str(home / "run")
    first = resolve(["--job.dump_folder", folder])
    job.prepare(first, Session(first))
    other = resolve(["--job.dump_folder", folder, "--model.init_seed", "7"])
    with pytest.raises(ConfigError, match=r"not the tiny model of this seed .* remove it, or give"):
        job.prepare(other, Session(other))


def test_prepare_refuses_beside_a_living_serving_role(home):
    resolved = resolve(arguments(home / "run", "--recovery.auto_continue_train"))
    resolved.run_folder.register("serving", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=f"process {os.getpid()}"):
        job.prepare(resolved, Session(resolved))


def test_what_roles_of_a_lost_host_have_registered_is_asked_by_nobody(home):
    resolved = resolve(arguments(home / "run", "--recovery.auto_continue_train"))
    folder = resolved.run_folder
    for name in ("lighthouse", "serving", "rollout", "trainer-0"):
        at = RoleAddress(name, "http://127.0.0.1:9", os.getpid(), 1.0, 1, "a-host-that-is-lost")
        folder.announce(at)
    (folder.path / "roles" / "serving.json").write_text('{"torn')
    assert folder.role("serving") is None
    folder.announce(dataclasses.replace(at, name="serving"))
    assert job.prepare(resolved, Session(resolved)) is Start.FRESH
    assert folder.roles() == []


def test_a_copy_of_a_living_run_has_no_part_in_that_ones_roles(home):
    resolved = resolve(arguments(home / "copy", "--recovery.auto_continue_train"))
    me = ProcessId.current()
    at = ServingAt(me.pid, me.start_time, socket.gethostname(), "http://127.0.0.1:9", "")
    SessionFolder("original").write(
        SessionRecord("original", "a rule", at, run_folder=str(home / "original"))
    )
    for name in ("lighthouse", "serving", "rollout"):
        resolved.run_folder.register(name, "http://127.0.0.1:9")
    assert job.prepare(resolved, Session(resolved)) is Start.FRESH
    assert resolved.run_folder.roles() == []


@pytest.mark.parametrize("retain_ttl_s", [0.0, 60.0])
def test_a_session_of_a_lost_host_is_forgotten_if_it_cannot_have_outlived_its_job(
    home, retain_ttl_s
):
    resolved = resolve(arguments(home / "run", "--recovery.auto_continue_train"))
    run, session = str(resolved.run_folder.path), Session(resolved)
    lost = (1, 1.0, "a-host-that-is-lost")
    session.folder.write(
        SessionRecord(
            session.folder.id,
            "a rule",
            ServingAt(*lost, "http://127.0.0.1:9", ""),
            owner=Owner(*lost, "a", run),
            run_folder=run,
            retain_ttl_s=retain_ttl_s,
        )
    )
    if retain_ttl_s:  # engines may wait there
        with pytest.raises(ConfigError, match="a-host-that-is-lost"):
            job.prepare(resolved, session)
    else:
        job.prepare(resolved, session)
        assert session.folder.read() is None and session.serving is None


def test_model_directory_of_ones_own_is_not_made(home):
    hf = home / "hf"
    hf.mkdir()
    resolved = resolve(arguments(home / "run", "--model.hf_assets_path", str(hf)))
    job.prepare(resolved, Session(resolved))
    assert not resolved.run_folder.model.exists()


def test_role_started_by_hand_makes_what_is_missing_once(home):
    resolved = resolve(arguments(home / "run"))
    folder = resolved.run_folder
    job.join(resolved)
    token, written = folder.token(), folder.resolved_config.read_bytes()
    assert (folder.model / "model.safetensors").exists()
    job.join(resolve(arguments(home / "run", "--training.steps", "3")))
    assert (folder.token(), folder.resolved_config.read_bytes()) == (token, written)


def test_roles_of_a_job(home):
    resolved = resolve(arguments(home / "run", "--fault_tolerance.replica_groups", "3"))
    specs = job.role_specs(resolved.sections, resolved.run_folder)
    assert [(s.name, s.duty) for s in specs] == [
        ("lighthouse", Duty.SERVICE),
        ("serving", Duty.SERVICE),
        ("rollout", Duty.DRIVER),
        ("trainer-0", Duty.WORKER),
        ("trainer-1", Duty.WORKER),
        ("trainer-2", Duty.WORKER),
    ]
    assert specs[-1].argv[1:] == (
        "-m", "torchtitan_rl_ft", "run", "--role", "trainer",
        "--run-folder", str(resolved.run_folder.path), "--fault_tolerance.replica_id", "2",
    )  # fmt: skip


def test_job_without_fault_tolerance_has_no_lighthouse(home):
    argv = arguments(home / "run", "--fault_tolerance.no-enable")
    resolved = resolve([*argv, "--fault_tolerance.replica_groups", "1"])
    specs = job.role_specs(resolved.sections, resolved.run_folder)
    assert [s.name for s in specs] == ["serving", "rollout", "trainer-0"]


def test_environment_of_the_roles(home):
    folder = RunFolder(home / "run")
    env = job.role_env(folder, {"PATH": "/bin", "OMP_NUM_THREADS": "3"})
    assert env[RUN_ENV] == str(folder.path) and env[TOKEN_ENV] == folder.token()
    assert (env["PATH"], env["OMP_NUM_THREADS"]) == ("/bin", "3")
