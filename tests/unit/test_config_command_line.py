"""--section.key on the command line."""

from __future__ import annotations

import pytest

from torchtitan_rl_ft.config.command_line import Override, split_overrides
from torchtitan_rl_ft.config.errors import ConfigError
from torchtitan_rl_ft.config.schema import load_schema


def parse(*argv: str) -> dict[str, object]:
    overrides, rest = split_overrides(load_schema(), argv)
    assert rest == []
    return {o.path: o.value for o in overrides}


@pytest.mark.parametrize(
    ("argv", "path", "value"),
    [
        (["--training.steps", "5"], "training.steps", 5),
        (["--training.steps=5"], "training.steps", 5),
        (["--training.seq-len", "5"], "training.seq_len", 5),
        (["--fault-tolerance.min-replica-size=2"], "fault_tolerance.min_replica_size", 2),
        (["--fault_tolerance.enable"], "fault_tolerance.enable", True),
        (["--fault_tolerance.no-enable"], "fault_tolerance.enable", False),
        (["--fault_tolerance.no_enable"], "fault_tolerance.enable", False),
        (["--fault_tolerance.enable", "False"], "fault_tolerance.enable", False),
        (["--fault_tolerance.enable=false"], "fault_tolerance.enable", False),
        (["--rollout.top_k", "-1"], "rollout.top_k", -1),
        (["--rollout.engine_args=--tp-size,2"], "rollout.engine_args", ["--tp-size", "2"]),
        (["--profiler.profile-freq", "3"], "profiling.profile_freq", 3),
        (["--dump-folder", "x"], "job.dump_folder", "x"),
        (["--hf_assets_path=x"], "model.hf_assets_path", "x"),
        (["--module", "m", "--config", "f"], "job.config", "f"),
        (["--debug.seed", "none"], "debug.seed", None),
        (["--recovery.exit_interval", "null"], "recovery.exit_interval", None),
        (["--recovery.autoresume"], "recovery.adlr_autoresume", True),
        (["--recovery.no-autoresume"], "recovery.adlr_autoresume", False),
        (["--recovery.no-adlr_autoresume"], "recovery.adlr_autoresume", False),
        (["--recovery.autoresume-interval", "5"], "recovery.adlr_autoresume_interval", 5),
        (["--job.description", "a = b"], "job.description", "a = b"),
    ],
)
def test_spellings(argv: list[str], path: str, value: object) -> None:
    assert parse(*argv)[path] == value


def test_a_flag_does_not_swallow_what_follows() -> None:
    schema = load_schema()
    overrides, rest = split_overrides(
        schema, ["run", "--fault_tolerance.enable", "job.toml", "--role", "trainer"]
    )
    assert overrides == [Override("fault_tolerance.enable", True)]
    assert rest == ["run", "job.toml", "--role", "trainer"]


def test_the_last_of_two_wins() -> None:
    assert parse("--training.steps", "5", "--training.steps", "6") == {"training.steps": 6}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--training.stepz", "5"],
            "--training.stepz: unknown key .* did you mean 'training.steps'",
        ),
        (["--trainin.steps", "5"], r"unknown section \[trainin\]; did you mean 'training'"),
        (["--training.steps", "five"], "--training.steps: expected int, got 'five'"),
        (["--training.steps"], "--training.steps: expected int, got nothing"),
        (["--job.description", "--rl.mode"], "for a value that starts with --, write --job.desc"),
        (["--rl.mode", "synk"], "did you mean 'sync'"),
        (["--training.no-steps"], "training.steps is no flag, it takes a value: int"),
        (["--fault_tolerance.no-enable=true"], "takes no value"),
        (["--override.imports", "x"], r"\[override\] is not understood here: .* ignores"),
        (["--experimental.custom_import", "x"], r"\[experimental\] is not understood here"),
        (["--training.dataset", "c4"], "training.dataset is not understood here: .*data_source"),
    ],
)
def test_errors_name_the_argument(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as e:
        split_overrides(load_schema(), argv)
    assert all(p.startswith("command line: --") for p in e.value.problems)


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as e:
        split_overrides(load_schema(), ["--rl.mod", "sync", "--rl.kl_coef", "x"])
    assert len(e.value.problems) == 2


@pytest.mark.parametrize("second", ["--recovery.adlr_autoresume", "--recovery.no-adlr-autoresume"])
def test_two_names_of_one_key_are_refused(second: str) -> None:
    with pytest.raises(ConfigError) as e:
        parse("--recovery.autoresume", second)
    assert "recovery.adlr_autoresume" in str(e.value) and "twice" in str(e.value)
    assert parse("--recovery.autoresume", "--recovery.no-autoresume") == {
        "recovery.adlr_autoresume": False
    }
