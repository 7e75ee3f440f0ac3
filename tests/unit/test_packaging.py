"""What is shipped, and that the pins of the several files agree."""

import os
import re
import subprocess
import zipfile
from pathlib import Path

import pytest
import tomli
from installed_wheel import ROOT, build_wheel, install_wheel

import torchtitan_rl_ft

PROJECT = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def requirements(path):
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def test_torchft_pins_are_equal_in_both_files():
    assert requirements(ROOT / "requirements-torchft.txt") == EXTRAS["torchft"]


@pytest.mark.parametrize("name", ["torch", "torchtitan"])
def test_what_must_match_is_pinned(name):
    assert any(re.fullmatch(rf"{name}==[\d.]+", d) for d in PROJECT["dependencies"])


@pytest.mark.parametrize(
    ("extra", "name"),
    [("torchft", "torchft"), ("sglang", "sglang"), ("ucx", "nixl-cu13"), ("smg", "smg")],
)
def test_extras_are_pinned_and_not_needed_by_the_base(extra, name):
    assert any(d.startswith(f"{name}==") for d in EXTRAS[extra])
    assert not any(d.startswith(name) and "torchtitan" not in d for d in PROJECT["dependencies"])


def test_tests_are_run_with_every_extra():
    assert "torchtitan_rl_ft[torchft,sglang,otel,ucx,smg]" in EXTRAS["dev"]


def test_one_version():
    assert PROJECT["version"] == torchtitan_rl_ft.__version__


def test_readme_has_the_two_commands_and_no_step_before_them():
    blocks = re.findall(r"```(?:sh|bash)\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert blocks[0].split("\n")[:2] == ["make run", "make test"] or [
        line.split("#")[0].strip() for line in blocks[0].splitlines()
    ] == ["make run", "make test"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_wheel_holds_the_package_with_configs_and_schema_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"torchtitan_rl_ft"}
    shipped = {p.name for p in (ROOT / "torchtitan_rl_ft" / "configs").glob("*.toml")}
    assert shipped >= {"rl_ft.toml", "rl_ft_debug.toml"}
    for name in shipped:
        assert f"torchtitan_rl_ft/configs/{name}" in names
    for path in (ROOT / "torchtitan_rl_ft").rglob("*.json"):
        assert f"{path.relative_to(ROOT)}" in names
    assert "torchtitan_rl_ft/py.typed" in names
    assert "torchtitan_rl_ft/observability/status_page.html" in names
    assert not any("fake" in name for name in names)


def test_wheel_asks_for_torchft_and_sglang_as_extras_only(wheel):
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (n for n in archive.namelist() if n.endswith("METADATA"))
    needs = [
        line.removeprefix("Requires-Dist: ")
        for line in archive.read(metadata).decode().splitlines()
        if line.startswith("Requires-Dist: ")
    ]
    base = [n for n in needs if "extra ==" not in n]
    assert sorted(base) == sorted(PROJECT["dependencies"])


def test_command_of_the_wheel_works_in_an_empty_folder(wheel, tmp_path):
    programs = install_wheel(wheel, tmp_path / "venv")
    empty = tmp_path / "empty"
    empty.mkdir()
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def run(program, *arguments):
        command = [str(programs / program), *arguments]
        return subprocess.run(command, cwd=empty, env=env, capture_output=True, text=True)

    done = run("torchtitan", "check", "rl_ft.toml", "--quick")
    assert done.returncode == 0, done.stderr
    assert "rl.groups_per_step" in done.stdout
    where = run("python", "-c", "import torchtitan_rl_ft as t; print(t.__file__)")
    assert Path(where.stdout.strip()).is_relative_to(tmp_path)
