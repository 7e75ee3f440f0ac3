"""The project's wheel, built and installed as a user would have it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def build_wheel(folder: Path) -> Path:
    """Build the wheel into `folder`, from a copy of the sources: the checkout stays as it is."""
    copy = folder / "source"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "torchtitan_rl_ft", copy / "torchtitan_rl_ft", ignore=ignore)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("torchtitan_rl_ft-*.whl")
    return wheel


def install_wheel(wheel: Path, venv: Path) -> Path:
    """Make the environment `venv` with the wheel in it (--no-deps). For the rest it sees this
    environment's packages, but not its editable install of this project. Returns its bin/."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (site,) = (venv / "lib").glob("python*/site-packages")
    (here,) = {p for p in sys.path if p.endswith("site-packages")}
    (site / "rest.pth").write_text(f"{here}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python"), "install"]
    quiet = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run([*pip, *quiet, str(wheel)], check=True)
    return venv / "bin"
