"""Which session a job belongs to, and what may change when it is taken over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from config_jobs import GOOD, job

from torchtitan_rl_ft.config.checks import check
from torchtitan_rl_ft.config.rules.job import Machine
from torchtitan_rl_ft.config.schema import load_schema
from torchtitan_rl_ft.config.session_identity import differences, frozen, identify

NO_CHECKPOINT = ("--checkpoint.no-enable", "--rollout.no-journal")


def made(folder: Path, *argv: str):
    return job(folder, GOOD, "--job.dump_folder", str(folder / "run"), *argv)


# Identity -------------------------------------------------------------------------------------


@pytest.mark.row("A3")
def test_the_rules_in_their_order(tmp_path):
    """Each job has what the rules after its own would take, too."""
    checkpoint = ()
    dump = ("--rollout.save_debug_rollout_data", f"{tmp_path}/dumps/{{rollout_id}}.safetensors")
    data = (*dump, "--rollout.data_dir", f"{tmp_path}/data", "--rollout.queue_run_id", "r1")
    named = (*data, "--rollout.session_id", "mine")
    found = [
        identify(made(tmp_path, *argv)) for argv in (named, data, dump, checkpoint, NO_CHECKPOINT)
    ]
    assert [f.rule.partition(":")[0] for f in found] == [
        "rollout.session_id",
        "rollout.data_dir, rollout.queue_run_id",
        "rollout.save_debug_rollout_data",
        "checkpoint folder",
        "hash of model and rollout configuration",
    ]
    assert found[0].id == "mine"
    assert len({f.id for f in found}) == 5
    assert found[1].rule.endswith(f"{tmp_path}/data, r1")
    assert found[3].rule.endswith(f"{tmp_path}/run/checkpoint")


@pytest.mark.row("A3")
@pytest.mark.parametrize("base", [(), NO_CHECKPOINT, ("--rollout.session_id", "mine")])
@pytest.mark.parametrize(
    "change",
    [
        ("--parallelism.tensor_parallel_degree", "2"),
        ("--parallelism.data_parallel_shard_degree", "2"),
        ("--fault_tolerance.replica_groups", "4"),
        ("--fault_tolerance.ranks_per_group", "2"),
        ("--checkpoint.load_step", "7"),
        ("--training.steps", "9"),
    ],
)
def test_the_id_does_not_depend_on_the_trainer(tmp_path, base, change):
    assert identify(made(tmp_path, *base, *change)) == identify(made(tmp_path, *base))


@pytest.mark.row("A3")
def test_the_id_changes_with_what_the_session_is_for(tmp_path):
    data = ("--rollout.data_dir", f"{tmp_path}/data", "--rollout.queue_run_id")
    assert identify(made(tmp_path, *data, "a")).id != identify(made(tmp_path, *data, "b")).id
    # Two folders to save in.
    other = job(tmp_path, GOOD, "--job.dump_folder", str(tmp_path / "other"))
    assert identify(other).id != identify(made(tmp_path)).id
    # Another model, when the hash decides.
    seed = identify(made(tmp_path, *NO_CHECKPOINT, "--model.init_seed", "5"))
    assert seed.id != identify(made(tmp_path, *NO_CHECKPOINT)).id


@pytest.mark.row("A3")
def test_relative_and_absolute_spellings_agree(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for spellings in (
        ("--job.dump_folder", ("run", f"{tmp_path}/run", "./x/../run")),
        ("--rollout.data_dir", ("data", f"{tmp_path}/data", f"{tmp_path}/./data/")),
    ):
        key, values = spellings
        found = {identify(job(tmp_path, GOOD, key, value)) for value in values}
        assert len(found) == 1
    # A relative template is in the run folder.
    template = "dumps/{rollout_id}.safetensors"
    relative = made(tmp_path, "--rollout.save_debug_rollout_data", template)
    absolute = made(tmp_path, "--rollout.save_debug_rollout_data", f"{tmp_path}/run/{template}")
    assert identify(relative) == identify(absolute)


def test_a_data_folder_counts_only_when_a_person_has_set_it(tmp_path):
    """Not the default of somebody's registry function."""

    def registry(module, function):
        return {"rollout": {"data_dir": "/data"}, "checkpoint": {"enable": True}}

    argv = ["--job.dump_folder", str(tmp_path / "run")]
    from_registry = job(tmp_path, GOOD, *argv, registry=registry)
    assert identify(from_registry).rule.startswith("checkpoint folder")


def test_debug_modes_have_a_session_of_their_own(tmp_path):
    plain = identify(made(tmp_path))
    debugging = identify(made(tmp_path, "--rollout.debug_mode", "rollout_only"))
    assert debugging.id != plain.id and debugging.id.endswith(".rollout_only")


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("--rollout.session_id", "../other"), "rollout.session_id"),
        (("--rollout.session_id", "a b"), "rollout.session_id"),
        (("--rollout.retain_ttl", "-1"), "rollout.retain_ttl"),
        (("--rollout.retain_ttl", "0", "--rollout.keep_serving"), "rollout.keep_serving"),
    ],
)
def test_bad_session_keys_are_refused(tmp_path, argv, named):
    problems = check(made(tmp_path, *argv), Machine()).problems
    assert any(named in problem for problem in problems)


# What may change ------------------------------------------------------------------------------

ACCEPTED = [
    ("--parallelism.tensor_parallel_degree", "2"),
    ("--parallelism.context_parallel_degree", "2"),
    ("--parallelism.expert_parallel_degree", "2"),
    ("--parallelism.pipeline_parallel_degree", "2"),
    ("--parallelism.data_parallel_shard_degree", "2"),
    ("--fault_tolerance.replica_groups", "4"),
    ("--fault_tolerance.ranks_per_group", "2"),
    ("--fault_tolerance.heartbeat_timeout_ms", "9000"),
    ("--training.local_batch_size", "32"),
    ("--training.seq_len", "64"),
    ("--training.steps", "7"),
    ("--activation_checkpoint.mode", "full"),
    ("--compile.enable",),
    ("--rollout.health_check_first_wait", "1"),
    ("--rollout.health_check_interval", "1"),
    ("--rollout.health_check_timeout", "3"),
    ("--rollout.health_check_failure_threshold", "3"),
    ("--rollout.cleanup_timeout", "7"),
    ("--rollout.retain_ttl", "7"),
    ("--rollout.keep_serving",),
    ("--metrics.enable_tensorboard",),
    ("--metrics.log_freq", "9"),
    ("--otel.endpoint", "http://127.0.0.1:4318"),
    ("--profiling.enable_profiling",),
    ("--comm.train_timeout_seconds", "9"),
    ("--checkpoint.interval", "9"),
    ("--recovery.auto_continue_train",),
    ("--recovery.role_max_restarts", "9"),
    ("--chaos.enable",),
    ("--job.description", "again"),
]

REFUSED = [
    ("--rollout.temperature", "0.5"),
    ("--rollout.top_p", "0.5"),
    ("--rollout.top_k", "5"),
    ("--rollout.max_response_tokens", "4"),
    ("--rollout.max_prompt_tokens", "4"),
    ("--rollout.stop_token_ids", "[5]"),
    ("--rollout.engines", "3"),
    ("--rollout.engine_args", '["--tp=2"]'),
    ("--rollout.no-journal",),
    ("--rollout.pause_mode", "abort"),
    ("--rollout.queue_run_id", "other"),
    ("--rl.reward", "torchtitan_rl_ft.rollout.tasks.math:reward"),
    ("--rl.filter", "somewhere:keep"),
    ("--rl.groups_per_step", "32"),
    ("--rl.samples_per_prompt", "4"),
    ("--rl.max_policy_age", "1"),
    ("--rl.seed", "1"),
    ("--model.init_seed", "5"),
    ("--optimizer.lr", "0.5"),
    ("--training.global_batch_size", "5"),
    ("--checkpoint.initial_load_path", "/elsewhere"),
    ("--fault_tolerance.sync_steps", "7"),
]


@pytest.mark.row("A4")
@pytest.mark.parametrize("change", ACCEPTED, ids=lambda c: c[0])
def test_trainer_fields_may_change(tmp_path, change):
    before, after = frozen(made(tmp_path)), frozen(made(tmp_path, *change))
    assert differences(before, after) == []


@pytest.mark.row("A4")
@pytest.mark.parametrize("change", REFUSED, ids=lambda c: c[0])
def test_everything_else_is_frozen_and_named(tmp_path, change):
    before, after = frozen(made(tmp_path)), frozen(made(tmp_path, *change))
    path = change[0].removeprefix("--").replace(".no-", ".")
    (text,) = differences(before, after)
    assert text.startswith(f"{path} was ")
    assert text == (f"{path} was {json.dumps(before[path])}, is {json.dumps(after[path])}")


@pytest.mark.row("A4")
def test_new_and_removed_keys_are_frozen_too():
    known = {"rl.seed": 0}
    assert differences(known, {**known, "custom.chat_template": {"thinking": True}}) == [
        'custom.chat_template = {"thinking": true} is new'
    ]
    assert differences({**known, "custom.style": "x"}, known) == [
        'custom.style was "x" and is gone'
    ]


@pytest.mark.row("A4")
def test_every_key_that_may_change_is_a_key(tmp_path):
    """A key that is renamed must not fall out of the list unseen."""
    from torchtitan_rl_ft.config.session_identity import MUTABLE_KEYS, MUTABLE_SECTIONS, PATH_KEYS

    schema = load_schema()
    paths = {key.path for key in schema.all_keys()}
    assert paths >= MUTABLE_KEYS and paths >= PATH_KEYS
    assert set(schema.sections) >= MUTABLE_SECTIONS


def test_spelling_of_a_model_directory_does_not_matter(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    relative = frozen(made(tmp_path, "--model.hf_assets_path", "hf"))
    assert (
        differences(relative, frozen(made(tmp_path, "--model.hf_assets_path", f"{tmp_path}/hf")))
        == []
    )
