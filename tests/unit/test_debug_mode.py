"""Debug modes: what a job is made of, whether it keeps a journal, where its dumps are."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from config_jobs import GOOD, job

from torchtitan_rl_ft.config.checks import check
from torchtitan_rl_ft.config.debug_mode import (
    DEFAULT_DUMPS,
    DebugMode,
    debug_mode,
    dump_path,
    journaling,
    template_problem,
)
from torchtitan_rl_ft.config.rules.job import Machine
from torchtitan_rl_ft.config.sections import RolloutSection
from torchtitan_rl_ft.config.start_state import Found, Start, Wish, decide
from torchtitan_rl_ft.roles.job import role_specs
from torchtitan_rl_ft.run_folder import RunFolder

MACHINE = Machine(has_module=lambda name: True, exists=lambda path: True)
DUMPS = "/dumps/{rollout_id}.safetensors"
STORAGE = {
    "queue": {"data_dir": "/data", "queue_run_id": "a"},
    "dump": {"save_debug_rollout_data": DUMPS},
    "none": {},
}
MODES = {
    "normal": ({}, DebugMode.NONE),
    "rollout-only": ({"debug_mode": "rollout_only"}, DebugMode.ROLLOUT_ONLY),
    "train-only": ({"debug_mode": "train_only"}, DebugMode.TRAIN_ONLY),
    "load-dump": ({"load_debug_rollout_data": DUMPS}, DebugMode.TRAIN_ONLY),
}


@pytest.mark.row("E1")
@pytest.mark.parametrize(
    ("storage", "mode", "legacy", "switch"),
    list(product(STORAGE, MODES, (True, False), (True, False))),
)
def test_a_journal_is_kept_unless_switched_off_or_in_a_debug_mode(storage, mode, legacy, switch):
    keys, expected = MODES[mode]
    rollout = RolloutSection(use_fault_tolerance=legacy, journal=switch, **STORAGE[storage], **keys)
    assert debug_mode(rollout) is expected
    assert journaling(rollout) is (switch and mode == "normal")


@pytest.mark.parametrize("mode", ["rollout_only", "train_only"])
def test_a_debug_mode_starts_only_where_no_earlier_run_is(mode):
    for auto in (False, True):
        wish = Wish(auto, False, journaling=False, debugging=True)
        assert decide(Found("/r", False, False, False), wish).start is Start.FRESH
        for holds in ((True, False, False), (False, True, False), (False, False, True)):
            refused = decide(Found("/r", *holds), wish)
            assert refused.start is Start.REFUSE and "another folder" in refused.reason


def names(tmp_path: Path, *argv: str) -> list[str]:
    resolved = job(tmp_path, GOOD, *argv)
    return [s.name for s in role_specs(resolved.sections, RunFolder(tmp_path / "run"))]


@pytest.mark.row("J1")
@pytest.mark.row("J2")
def test_roles_of_each_mode(tmp_path):
    trainers = ["trainer-0", "trainer-1"]
    assert names(tmp_path) == ["lighthouse", "serving", "rollout", *trainers]
    assert names(tmp_path, "--rollout.debug_mode", "rollout_only") == ["serving", "rollout"]
    for argv in (
        ("--rollout.debug_mode", "train_only"),
        ("--rollout.load_debug_rollout_data", DUMPS),
    ):
        assert names(tmp_path, *argv) == ["lighthouse", "rollout", *trainers]
    alone = ("--fault_tolerance.no-enable", "--fault_tolerance.replica_groups", "1")
    assert names(tmp_path, "--rollout.debug_mode", "train_only", *alone) == ["rollout", "trainer-0"]


def test_one_key_is_enough_for_a_mode(tmp_path):
    only = job(tmp_path, GOOD, "--rollout.debug_mode", "rollout_only")
    assert only.get("rollout.save_debug_rollout_data") == DEFAULT_DUMPS
    assert only.origins["rollout.save_debug_rollout_data"].startswith("automatic")
    train = job(tmp_path, GOOD, "--rollout.debug_mode", "train_only")
    assert train.get("rollout.load_debug_rollout_data") == DEFAULT_DUMPS
    load = job(tmp_path, GOOD, "--rollout.load_debug_rollout_data", DUMPS)
    assert load.get("rollout.debug_mode") == "train_only"
    for each in (only, train, load):
        report = check(each, MACHINE)
        assert report.problems == [] and report.warnings == []


def test_a_relative_template_is_in_the_run_folder():
    assert dump_path("d/{rollout_id:04d}.st", Path("/run"), 7) == Path("/run/d/0007.st")
    assert dump_path(DUMPS, Path("/run"), 7) == Path("/dumps/7.safetensors")


@pytest.mark.row("A5")
@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("dump.pt", "must contain {rollout_id}"),
        ("{step}.st", "must contain {rollout_id}"),
        ("{rollout_id}/{step}.st", "not {step}"),
        ("{rollout_id.st", "cannot be read"),
        ("{rollout_id:q}", "cannot be read"),
    ],
)
def test_a_template_that_names_no_file_per_rollout(tmp_path, template, said):
    assert said in (template_problem(template) or "")
    for key in ("save_debug_rollout_data", "load_debug_rollout_data", "save_debug_train_data"):
        (problem,) = check(job(tmp_path, GOOD, f"--rollout.{key}", template), MACHINE).problems
        assert said in problem and f"rollout.{key} = " in problem


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (
            ["--rollout.debug_mode", "rollout_only", "--rollout.load_debug_rollout_data", DUMPS],
            [
                "rollout.debug_mode = 'rollout_only'",
                "rollout.load_debug_rollout_data",
                "train_only",
            ],
        ),
        (
            ["--rollout.debug_mode", "rollout_only", "--rollout.save_debug_rollout_data", ""],
            ["rollout.debug_mode", "rollout.save_debug_rollout_data = ''"],
        ),
        (
            ["--rollout.debug_mode", "train_only", "--rollout.load_debug_rollout_data", ""],
            ["rollout.debug_mode", "rollout.load_debug_rollout_data = ''"],
        ),
        (
            [
                "--rollout.load_debug_rollout_data",
                DUMPS,
                "--rollout.load_debug_rollout_data_subsample",
                "0",
            ],
            ["rollout.load_debug_rollout_data_subsample = 0", "at most 1"],
        ),
        (
            ["--rollout.load_debug_rollout_data_subsample", "0.5"],
            ["no effect", "rollout.load_debug_rollout_data = ''"],
        ),
        (
            ["--rollout.save_debug_rollout_data", DUMPS, "--rollout.save_debug_train_data", DUMPS],
            ["same files", "rollout.save_debug_train_data", "rollout.save_debug_rollout_data"],
        ),
        (
            [
                "--rollout.save_debug_train_data",
                DUMPS,
                "--fault_tolerance.ranks_per_group",
                "2",
                "--parallelism.context_parallel_degree",
                "2",
            ],
            ["rollout.save_debug_train_data", "parallelism.context_parallel_degree = 2"],
        ),
    ],
)
def test_keys_that_contradict_each_other(tmp_path, argv, parts):
    (problem,) = check(job(tmp_path, GOOD, *argv), MACHINE).problems
    assert all(part in problem for part in parts), problem


def test_dumps_without_effect_are_a_warning(tmp_path):
    argv = [
        "--rollout.load_debug_rollout_data",
        DUMPS,
        "--rollout.save_debug_rollout_data",
        "{rollout_id}",
    ]
    report = check(job(tmp_path, GOOD, *argv), MACHINE)
    assert report.problems == [] and "no effect in this mode" in report.warnings[0]
    argv = ["--rollout.debug_mode", "rollout_only", "--rollout.save_debug_train_data", DUMPS]
    report = check(job(tmp_path, GOOD, *argv), MACHINE)
    assert report.problems == [] and "no effect in this mode" in report.warnings[0]


def test_debug_modes_need_no_checkpoints(tmp_path):
    for mode in ("rollout_only", "train_only"):
        argv = ["--checkpoint.no-enable", "--rollout.debug_mode", mode]
        assert check(job(tmp_path, GOOD, *argv), MACHINE).problems == []
