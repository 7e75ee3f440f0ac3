"""The wheel, installed into an environment of its own, does the job from an empty folder."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_rl_ft.run_folder import TOKEN_ENV

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Path of `torchtitan` in an environment that holds the wheel (--no-deps) and sees this
    environment's packages, but not its editable install of this project."""
    base = tmp_path_factory.mktemp("wheel")
    copy = base / "source"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "torchtitan_rl_ft", copy / "torchtitan_rl_ft", ignore=ignore)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copy)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(base)]
    subprocess.run(build, cwd=copy, check=True, capture_output=True)
    (wheel,) = base.glob("*.whl")
    venv = base / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (site,) = (venv / "lib").glob("python*/site-packages")
    (here,) = {p for p in sys.path if p.endswith("site-packages")}
    (site / "rest.pth").write_text(f"{here}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python"), "install"]
    subprocess.run([*pip, "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    return venv / "bin" / "torchtitan"


@pytest.fixture
def empty(tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


def run(command, folder, *arguments):
    env = {k: v for k, v in os.environ.items() if not k.startswith("TORCHTITAN_RL_FT_")}
    env["XDG_STATE_HOME"] = str(folder.parent / "state")
    assert TOKEN_ENV not in env
    return subprocess.run(
        [str(command), *arguments], cwd=folder, env=env, capture_output=True, text=True
    )


def test_full_check(command, empty):
    done = run(command, empty, "check", "rl_ft.toml")
    assert done.returncode == 0, done.stderr


def test_debug_job(command, empty):
    done = run(command, empty, "run", "--job.config_file", "rl_ft_debug.toml")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    folder = empty / "outputs" / "rl_ft_debug"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert "outcome    complete (exit code 0)" in done.stdout
    assert (folder / "reward.png").exists()
    site = Path(command).parents[1] / "lib"
    log = (folder / "logs" / "trainer-0" / "attempt_1.log").read_text()
    assert str(ROOT / "torchtitan_rl_ft") not in log and site.exists()
