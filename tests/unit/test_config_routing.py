"""`rollout.router` and `rollout.external_urls`."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_jobs import GOOD, job

from torchtitan_rl_ft.config.checks import check
from torchtitan_rl_ft.config.rules.job import Machine

MACHINE = Machine(exists=lambda path: True, find_program=lambda name: name)
EXTERNAL_ONLY = GOOD.replace("engines = 2\n", "engines = 0\n")


def rollout(text: str, more: str) -> str:
    return text.replace("[rollout]\n", f"[rollout]\n{more}\n")


@pytest.mark.row("C12")
def test_a_gateway_that_is_not_installed_is_refused_with_the_extra(tmp_path: Path) -> None:
    made = job(tmp_path, rollout(GOOD, 'router = "smg"'))
    assert check(made, MACHINE).problems == []
    without = Machine(lambda name: name != "smg", lambda path: True, lambda name: name)
    [problem] = check(made, without).problems
    assert "pip install smg==1.13.0 (or the extra torchtitan_rl_ft[smg])" in problem
    assert "rollout.router = 'smg'" in problem


def test_a_gateway_takes_no_prefill_and_decode_groups(tmp_path: Path) -> None:
    groups = "".join(
        f'\n[[rollout.groups]]\nname = "{r}"\nrole = "{r}"\n' for r in ("prefill", "decode")
    )
    text = rollout(GOOD.replace("engines = 2\n", ""), 'router = "smg"') + groups
    assert any("does not join prefill" in p for p in check(job(tmp_path, text), MACHINE).problems)


URL_PROBLEMS = [
    ("127.0.0.1:30000", "is no address of an engine: http://host:port"),
    ("http://127.0.0.1", "is no address"),
    ("ftp://host:1", "is no address"),
    ("http://host:99999", "is no URL"),
    ("http://user:pw@host:1", "no secret belongs into a configuration"),
    ("http://host:1/generate", "has a path"),
]


@pytest.mark.parametrize(("url", "problem"), URL_PROBLEMS)
def test_a_bad_address_is_refused(tmp_path: Path, url: str, problem: str) -> None:
    made = job(tmp_path, rollout(GOOD, f'external_urls = ["{url}"]'))
    [found] = check(made, MACHINE).problems
    assert problem in found
    assert "rollout.external_urls" in found


def test_an_address_is_named_once(tmp_path: Path) -> None:
    made = job(tmp_path, rollout(GOOD, 'external_urls = ["http://a:1", "http://a:1/"]'))
    [found] = check(made, MACHINE).problems
    assert "is named twice" in found


@pytest.mark.row("A1")
def test_external_engines_alone_are_enough_and_what_starts_engines_is_ignored(
    tmp_path: Path,
) -> None:
    urls = 'external_urls = ["http://a:1", "http://b:1"]\nmin_engines = 2'
    made = job(tmp_path, rollout(EXTERNAL_ONLY, urls + "\nengine_max_restarts = 9"))
    report = check(made, MACHINE)
    assert report.problems == []
    assert any(
        "never started: ignored" in w and "engine_max_restarts" in w for w in report.warnings
    )
    none = job(tmp_path, EXTERNAL_ONLY)
    assert any("needs external ones" in p for p in check(none, MACHINE).problems)
    too_many = job(tmp_path, rollout(EXTERNAL_ONLY, urls.replace("= 2", "= 3")))
    assert any("min_engines" in p for p in check(too_many, MACHINE).problems)
