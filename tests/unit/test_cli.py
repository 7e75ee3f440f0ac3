"""The `torchtitan` command as a user meets it: exit codes, messages, and how fast they come."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchtitan_rl_ft import cli
from torchtitan_rl_ft.config.resolve import Resolved
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.run_folder import RUN_ENV, RunFolder

QUICK_S = 3.0
FULL_S = 30.0

# Runs the command in a fresh interpreter and fails when torch was imported on the way.
WITHOUT_TORCH = """
import sys
from torchtitan_rl_ft.cli import main
code = main(sys.argv[1:])
heavy = {"torch", "torchtitan", "torchft", "sglang"} & set(sys.modules)
if heavy:
    print("imported:", sorted(heavy), file=sys.stderr)
    code = 99
sys.exit(code)
"""


def command(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command without torch; fails the test when it takes longer than QUICK_S."""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *argv],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if k != RUN_ENV},
    )
    assert time.monotonic() - start < QUICK_S
    return done


BAD = {
    "syntax": ("[training]\nsteps = \n", "job.toml:2: invalid value"),
    "unknown section": ("[trainin]\n", "job.toml:1: unknown section [trainin]; did you mean"),
    "unknown key": ("[training]\nstepz = 1\n", "job.toml:2: unknown key training.stepz; did you"),
    "wrong type": ("[training]\nsteps = 1.5\n", "job.toml:2: training.steps: expected int, got"),
    "bad choice": ('[rl]\nmode = "x"\n', "job.toml:2: rl.mode: expected one of 'sync', 'semi_a"),
    "broken rule": (
        "[rl]\nmax_policy_age = -1\n",
        "rl.max_policy_age must not be negative: rl.max_policy_age = -1 (job.toml:2)",
    ),
}


@pytest.mark.parametrize("verb", ["run", "check"])
@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_a_bad_file_is_one_line_in_seconds_without_torch(
    tmp_path: Path, verb: str, text: str, message: str
) -> None:
    (tmp_path / "job.toml").write_text(text)
    done = command(verb, "--job.config_file", "job.toml", cwd=tmp_path)
    assert done.returncode == ExitCode.CONFIG, done.stderr
    (error,) = [line for line in done.stderr.splitlines() if ": error: " in line]
    assert error.startswith(f"torchtitan: error: {message}")
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == ["job.toml"]  # nothing was started


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["run", "missing.toml"], "config file missing.toml does not exist"),
        (["run", "rl_fft.toml"], "did you mean 'rl_ft.toml'"),
        (["run"], "a job to run is named by a file"),
        (["check"], "a job to check is named by a file"),
        (["run", "rl_ft.toml", "--rl.mod", "sync"], "command line: --rl.mod: unknown key rl.mod"),
        (["run", "rl_ft.toml", "--job.config_file", "rl_ft_debug.toml"], "two config files"),
        (["run", "rl_ft.toml", "--run-folder", "x"], "--run-folder brings its own configuration"),
        (["run", "--run-folder", "x"], "x/config.resolved.json does not exist"),
        (["run", "rl_ft.toml", "--rl.mode", "async"], "max_policy_age must be at least 1"),
        (["help", "rol"], "unknown section [rol]; did you mean 'rl'?"),
    ],
)
def test_bad_arguments_are_one_line(tmp_path: Path, argv: list[str], message: str) -> None:
    done = command(*argv, cwd=tmp_path)
    assert done.returncode == ExitCode.CONFIG
    (error,) = [line for line in done.stderr.splitlines() if ": error: " in line]
    assert message in error
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("argv", [["runn"], ["run", "--rolee", "x"], ["run", "--role", "x"], []])
def test_unknown_words_are_usage_errors(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as e:
        cli.main(argv)
    assert e.value.code == ExitCode.CONFIG
    assert "usage: torchtitan" in capsys.readouterr().err


def test_help_is_instant_and_lists_what_works(tmp_path: Path) -> None:
    done = command("-h", cwd=tmp_path)
    assert done.returncode == 0
    for word in ("run", "check", "help", "exit codes"):
        assert word in done.stdout
    done = command("run", "-h", cwd=tmp_path)
    assert done.returncode == 0
    for word in ("--role", "--run-folder", "rl_ft.toml", "fault_tolerance"):
        assert word in done.stdout


def test_help_of_a_section(tmp_path: Path) -> None:
    done = command("help", "rl", cwd=tmp_path)
    assert done.returncode == 0
    assert "rl.max_policy_age = 0  (int)" in done.stdout
    done = command("help", cwd=tmp_path)
    assert "[rl] mode, start_fraction, max_policy_age" in done.stdout


def test_the_quick_check_shows_values_with_their_origins(tmp_path: Path) -> None:
    done = command(
        "check", "--quick", "rl_ft.toml", "--training.steps", "7", "--training.no-gc-debug",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == ExitCode.DONE, done.stderr
    rows = dict(line.split("\t", 1) for line in done.stdout.splitlines())
    assert rows["training.steps"] == "7\tcommand line"
    assert rows["training.gc_debug"] == "false\tcommand line"
    assert rows["metrics.log_freq"] == "1\tregistry torchtitan_rl_ft:base"
    assert rows["fault_tolerance.enable"].startswith("true\trl_ft.toml:")
    assert rows["fault_tolerance.group_size"].startswith("2\tautomatic: ")
    assert rows["debug.deterministic"] == "false\tdefault"
    assert "the configuration is good" in done.stderr


def test_python_m_is_the_same_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torchtitan_rl_ft", "run", "missing.toml"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == ExitCode.CONFIG
    assert done.stderr.startswith("torchtitan: error: config file missing.toml does not exist")


# Dispatch -----------------------------------------------------------------------------------


@pytest.fixture
def roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Resolved]]:
    """Record which role is run instead of running it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    started: list[tuple[str, Resolved]] = []
    monkeypatch.setattr(cli, "_role_main", lambda role, job: started.append((role, job)) or 0)
    monkeypatch.delenv(RUN_ENV, raising=False)
    return started


def test_run_without_a_role_is_the_supervisor(roles: list[tuple[str, Resolved]]) -> None:
    assert cli.main(["run", "--job.config_file", "rl_ft_debug.toml", "--training.steps", "3"]) == 0
    ((role, resolved),) = roles
    assert role == "supervisor"
    assert resolved.get("training.steps") == 3


@pytest.mark.parametrize("role", cli.ROLES)
def test_a_role_by_hand_resolves_the_file(role: str, roles: list[tuple[str, Resolved]]) -> None:
    argv = ["run", "rl_ft_debug.toml", "--role", role, "--fault_tolerance.replica_id", "1"]
    assert cli.main(argv) == 0
    ((started, resolved),) = roles
    assert started == role
    assert resolved.sections.fault_tolerance.replica_id == 1


def test_a_role_of_a_run_reads_the_folder(
    tmp_path: Path, roles: list[tuple[str, Resolved]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.main(["run", "rl_ft_debug.toml", "--training.steps", "9"])
    run = tmp_path / "run"
    roles.pop()[1].write(RunFolder(run))
    argv = ["run", "--role", "trainer", "--fault_tolerance.replica_id", "1"]
    assert cli.main([*argv, "--run-folder", str(run)]) == 0
    monkeypatch.setenv(RUN_ENV, str(run))
    assert cli.main(argv) == 0
    for _, resolved in roles:
        assert resolved.get("training.steps") == 9
        assert resolved.run_folder.path == run
        assert resolved.sections.fault_tolerance.replica_id == 1


@pytest.mark.parametrize("role", [*cli.ROLES, "supervisor"])
def test_every_role_has_a_module(role: str) -> None:
    assert importlib.util.find_spec(cli.role_module(role)) is not None


def test_a_run_folder_that_cannot_be_made_is_one_line(
    tmp_path: Path, roles: list[tuple[str, Resolved]], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    argv = ["run", "rl_ft_debug.toml", "--role", "trainer", "--job.dump_folder", "file/run"]
    assert cli.main(argv) == ExitCode.FAILED
    assert "error: run folder" in capsys.readouterr().err
    assert roles == []


# The full check -----------------------------------------------------------------------------


@pytest.mark.timeout(120)
def test_the_full_check_is_done_in_time(tmp_path: Path) -> None:
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "torchtitan_rl_ft", "check", "qwen3_8b_math.toml"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert time.monotonic() - start < FULL_S
    assert done.returncode == ExitCode.DONE, done.stderr
    assert "model qwen3 8B: 8,190,735,360 parameters in 36 layers" in done.stderr
    assert "warning: the model directory is not there yet" in done.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["rl_ft.toml", "rl_ft_debug.toml", "rl_ft_semi_sync.toml"])
def test_the_tiny_jobs_pass_the_full_check(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check", name]) == ExitCode.DONE
    assert "parameters in 2 layers" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--checkpoint.keep_latest_k", "1"],
            "[checkpoint] is refused: We need to maintain at least 2",
        ),
        (["--rl.reward", "no.such:reward"], "importing no.such: ModuleNotFoundError"),
        (
            ["--rl.reward", "torchtitan_rl_ft.rollout.tasks.sorting:rewards"],
            "has no 'rewards' to call; did you mean 'reward'?",
        ),
        (
            ["--model.flavor", "8C", "--model.hf_assets_path", "nowhere"],
            "[model]: model.flavor '8C': TorchTitan's qwen3 has no such flavor",
        ),
        (["--optimizer.name", "Adan"], "[optimizer] is refused: Optimizer Adan not added"),
        (["--module", "llama3", "--config", "llama3_debugmodel"], "no config of the RL trainer"),
    ],
)
def test_the_full_check_finds_what_needs_torchtitan(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", "rl_ft.toml", *argv]) == ExitCode.CONFIG
    (error,) = [line for line in capsys.readouterr().err.splitlines() if ": error: " in line]
    assert message in error
