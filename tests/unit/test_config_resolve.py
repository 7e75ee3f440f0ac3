"""Precedence and origins of values, and the resolved file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from config_jobs import Values, job, no_registry, write

from torchtitan_rl_ft.config.command_line import Override
from torchtitan_rl_ft.config.errors import ConfigError
from torchtitan_rl_ft.config.resolve import Resolved, resolve
from torchtitan_rl_ft.models.tiny import make_tiny_model
from torchtitan_rl_ft.run_folder import RUN_ENV, RunFolder


def registry(module: str, function: str) -> Values:
    assert (module, function) == ("mine", "jobs")
    return {"training": {"steps": 2, "seq_len": 2}, "rl": {"kl_coef": 0.5}}


def test_command_line_over_file_over_registry_over_default(tmp_path: Path) -> None:
    text = '[job]\nmodule = "mine"\nconfig = "jobs"\n[training]\nsteps = 3\nseq_len = 3\n'
    found = job(tmp_path, text, "--training.steps", "4", registry=registry)
    file = str(tmp_path / "job.toml")
    assert [found.get(f"training.{k}") for k in ("steps", "seq_len", "gc_freq")] == [4, 3, 50]
    assert found.sections.rl.kl_coef == 0.5
    assert found.origins["training.steps"] == "command line"
    assert found.origins["training.seq_len"] == f"{file}:6"
    assert found.origins["rl.kl_coef"] == "registry mine:jobs"
    assert found.origins["training.gc_freq"] == "default"
    assert found.given("training.seq_len") and not found.given("rl.kl_coef")
    assert found.where("training.seq_len") == f"training.seq_len = 3 ({file}:6)"


def test_the_command_line_may_name_the_registry_function(tmp_path: Path) -> None:
    found = job(tmp_path, "", "--module", "mine", "--config", "jobs", registry=registry)
    assert found.get("training.steps") == 2


def test_our_registry_function_lies_under_the_file(tmp_path: Path) -> None:
    found = job(tmp_path)
    assert found.origins["checkpoint.enable"] == "registry torchtitan_rl_ft:base"
    assert found.get("checkpoint.enable") is True


def test_a_shipped_file_is_a_registry_function_too(tmp_path: Path) -> None:
    found = job(tmp_path, '[job]\nconfig = "rl_ft_debug"\n')
    assert found.origins["rl.groups_per_step"] == "registry torchtitan_rl_ft:rl_ft_debug"
    assert found.sections.fault_tolerance.enable
    assert found.sections.job.dump_folder == "./outputs/rl_ft"  # [job] is the file's own


def test_an_unknown_registry_function_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'rl_ft_debug'"):
        job(tmp_path, '[job]\nconfig = "rl_ft_debugg"\n')


@pytest.mark.timeout(120)
def test_the_functions_of_another_module_are_called_in_a_child() -> None:
    with pytest.raises(ConfigError, match="job.module = 'no_such_module'.*no_such_module"):
        resolve(["--module", "no_such_module", "--config", "f"])
    with pytest.raises(ConfigError, match="Config function 'llama3_debug' not found"):
        resolve(["--module", "llama3", "--config", "llama3_debug"])


@pytest.mark.timeout(120)
def test_a_registry_of_ones_own_reaches_every_role_and_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child's values are those of the roles; the trainer calls the function itself."""
    tests = Path(__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", str(tests / "fakes"))
    monkeypatch.syspath_prepend(tests / "fakes")
    argv = ["--module", "custom_registry", "--config", "gentle", "--training.steps", "3"]
    found = resolve([*argv, "--dump_folder", str(tmp_path)])
    assert found.origins["rl.kl_coef"] == "registry custom_registry:gentle"
    assert found.sections.rl.kl_coef == 0.125
    assert found.get("training.max_norm") == 0.25
    found.write()
    make_tiny_model(found.run_folder.model, 0)
    monkeypatch.setenv(RUN_ENV, str(tmp_path))
    from torchtitan_rl_ft.config_registry import from_run

    config = from_run()
    assert (config.training.max_norm, config.training.steps) == (0.25, 3)
    assert config.rl.kl_coef == config.loss.kl_coef == 0.125


@pytest.mark.row("A2")
def test_an_empty_file_has_slimes_health_times(tmp_path: Path) -> None:
    rollout = job(tmp_path).sections.rollout
    times = (
        rollout.health_check_first_wait,
        rollout.health_check_interval,
        rollout.health_check_timeout,
        rollout.cleanup_timeout,
    )
    assert times == (600, 600, 600, 60)


@pytest.mark.row("A1")
@pytest.mark.parametrize("flag", ["true", "false"])
def test_the_legacy_flag_changes_nothing(tmp_path: Path, flag: str) -> None:
    plain = job(tmp_path)
    legacy = job(tmp_path, f"[rollout]\nuse_fault_tolerance = {flag}\n")
    legacy.values["rollout"]["use_fault_tolerance"] = plain.get("rollout.use_fault_tolerance")
    assert legacy.values == plain.values


@pytest.mark.row("A2")
def test_the_cleanup_time_is_independent(tmp_path: Path) -> None:
    rollout = job(tmp_path, "[rollout]\nhealth_check_timeout = 5\n").sections.rollout
    assert (rollout.health_check_timeout, rollout.cleanup_timeout) == (5, 60)
    rollout = job(tmp_path, "[rollout]\ncleanup_timeout = 5\n").sections.rollout
    assert (rollout.health_check_timeout, rollout.cleanup_timeout) == (600, 5)


@pytest.mark.row("A6")
def test_enable_by_file_and_by_command_line_are_the_same(tmp_path: Path) -> None:
    by_file = job(tmp_path, "[fault_tolerance]\nenable = true\n")
    by_command = job(tmp_path, "", "--fault_tolerance.enable")
    assert by_file.sections == by_command.sections


@pytest.mark.row("A6")
def test_group_size_is_resolved_and_told_never_zero(tmp_path: Path) -> None:
    found = job(tmp_path, "[fault_tolerance]\nenable = true\nreplica_groups = 3\n")
    assert found.sections.fault_tolerance.group_size == 3
    assert any(note.startswith("fault_tolerance.group_size = 3") for note in found.notes)
    more = found.with_overrides([Override("fault_tolerance.replica_groups", 4)])
    assert more.sections.fault_tolerance.group_size == 4


def test_what_follows_from_fault_tolerance(tmp_path: Path) -> None:
    on = job(tmp_path, "", "--fault_tolerance.enable", registry=no_registry)
    assert on.get("training.disable_cuda_graphs") is True
    assert on.sections.fault_tolerance.lighthouse_min_replicas == 1
    off = on.with_overrides([Override("fault_tolerance.enable", False)])
    assert off.get("training.disable_cuda_graphs") is False
    assert off.sections.fault_tolerance.replica_groups == 1
    assert off.sections.fault_tolerance.group_size == 0


@pytest.mark.parametrize("value", ['"none"', '"None"'])
def test_none_can_be_written(tmp_path: Path, value: str) -> None:
    found = job(tmp_path, f"[fault_tolerance]\nsemi_sync_method = {value}\n")
    assert found.sections.fault_tolerance.semi_sync_method is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[training]\n\nstepz = 1\n", "3: unknown key training.stepz; did you mean 'training.ste"),
        ("[trainin]\nsteps = 1\n", r"1: unknown section \[trainin\]; did you mean 'training'"),
        ("steps = 1\n", r"1: steps stands outside of a \[section\]; did you mean 'training.steps'"),
        ('[training]\nsteps = "1"\n', "2: training.steps: expected int, got str '1'"),
        ('[rl]\nmode = "asink"\n', "2: rl.mode: expected one of .*; did you mean 'async'"),
        ("[rl]\nseq_len = 1\n", "2: unknown key rl.seq_len; did you mean 'training.seq_len'"),
        ("[float8]\nx = 1\n", r"1: TorchTitan's \[float8\] is not understood here: quantized"),
        ("[experimental]\n", r"1: TorchTitan's \[experimental\] is not understood here"),
        ('[training]\ndataset = "c4"\n', "2: TorchTitan's training.dataset is not understood"),
        ("[job]\nprint_config = true\n", "2: TorchTitan's job.print_config .*now debug.print_co"),
        ('[job]\nconfig_file = "x"\n', "2: job.config_file would name this very file"),
        (
            '[[optimizer.param_groups]]\npattern = ".*"\noptimizer_nam = "AdamW"\n',
            r"1: optimizer.param_groups\[0\]: unknown key 'optimizer_nam'; did you mean",
        ),
        ("[fault_tolerance.deep]\nx = 1\n", "1: unknown key fault_tolerance.deep"),
    ],
)
def test_errors_name_key_file_line_and_near_miss(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as e:
        job(tmp_path, text)
    assert len(e.value.problems) == 1
    assert e.value.problems[0].startswith(f"{tmp_path / 'job.toml'}:")


def test_every_problem_of_a_file_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as e:
        job(tmp_path, "[rl]\nmode = 1\nmod = 1\n[trainer]\n")
    assert len(e.value.problems) == 3


def test_a_file_written_for_torchtitan_0_2_is_understood(tmp_path: Path) -> None:
    text = """
[job]
dump_folder = "./out"
description = "old spelling"
[model]
name = "qwen3"
flavor = "8B"
hf_assets_path = "./assets"
[optimizer]
name = "AdamW"
lr = 8e-4
beta1 = 0.9
beta2 = 0.99
eps = 1e-8
weight_decay = 0.1
implementation = "fused"
[lr_scheduler]
warmup_steps = 2
decay_ratio = 0.8
decay_type = "linear"
min_lr_factor = 0.0
[training]
local_batch_size = 8
max_norm = 1.0
[activation_checkpoint]
mode = "selective"
[compile]
enable = false
components = ["model", "loss"]
[profiling]
enable_profiling = false
save_traces_folder = "profile_trace"
[metrics]
log_freq = 1
"""
    found = job(tmp_path, text)
    assert found.sections.job.description == "old spelling"
    assert found.get("optimizer.beta2") == 0.99
    assert found.get("profiling.save_traces_folder") == "profile_trace"


def test_what_is_no_override_is_refused() -> None:
    with pytest.raises(ConfigError, match="'--steps' is no --section.key"):
        resolve(["--steps"])


# The resolved file --------------------------------------------------------------------------


def test_the_resolved_file_holds_values_and_origins(tmp_path: Path) -> None:
    found = job(tmp_path, "[rl]\nkl_coef = 0.5\n", "--dump_folder", str(tmp_path / "run"))
    path = found.write()
    assert path == tmp_path / "run" / "config.resolved.json"
    data = json.loads(path.read_text())
    assert data["values"]["rl"]["kl_coef"] == 0.5
    assert data["origins"]["rl.kl_coef"] == f"{tmp_path / 'job.toml'}:2"
    assert Resolved.read(path) == Resolved.read(path.parent) == found


def test_a_moved_run_folder_is_its_own_dump_folder(tmp_path: Path) -> None:
    job(tmp_path, "", "--dump_folder", str(tmp_path / "run")).write()
    (tmp_path / "run").rename(tmp_path / "moved")
    assert Resolved.read(tmp_path / "moved").run_folder.path == tmp_path / "moved"


def test_roles_may_override_what_the_folder_says(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    job(tmp_path, "", "--fault_tolerance.enable").write(folder)
    found = Resolved.read(folder.path).with_overrides([Override("fault_tolerance.replica_id", 1)])
    assert found.sections.fault_tolerance.replica_id == 1
    assert found.origins["fault_tolerance.replica_id"] == "command line"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "cannot be read"),
        ("{}", "cannot be read"),
        ('{"values": {}, "origins": {}}', "is missing: written by another version"),
        ('{"values": 5, "origins": {}}', "is missing"),
    ],
)
def test_a_damaged_resolved_file_is_one_clear_error(
    tmp_path: Path, content: str, message: str
) -> None:
    path = write(tmp_path, content, "config.resolved.json")
    with pytest.raises(ConfigError, match=message) as e:
        Resolved.read(path)
    assert path in str(e.value)


def test_a_file_of_another_version_may_be_looked_at(tmp_path: Path) -> None:
    path = job(tmp_path, "[rl]\nkl_coef = 0.5\n", "--dump_folder", str(tmp_path / "run")).write()
    data = json.loads(path.read_text())
    del data["values"]["observability"], data["origins"]["observability.status_port"]
    data["values"]["rl"] |= {"groups_per_step": "a few", "of_a_newer_one": 1}
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="rl.groups_per_step|observability.ettr_window_s"):
        Resolved.read(path)
    found = Resolved.read(path, only_to_look=True)
    assert found.sections.rl.kl_coef == 0.5
    assert found.sections.observability.status_page  # its default
    assert {"rl.groups_per_step", "observability.status_port"} <= set(found.missing)
    assert found.version_note is not None and "written by another version" in found.version_note
    path.write_text('{"values": 5, "origins": {}}')
    with pytest.raises(ConfigError, match="is missing"):
        Resolved.read(path, only_to_look=True)


def test_a_run_folder_without_a_resolved_file(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "not_there"):
        with pytest.raises(ConfigError, match="json does not exist: start the job with `torchtit"):
            Resolved.read(folder)


def test_a_second_name_of_a_key_counts_as_the_first_and_is_found_in_its_line(tmp_path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(
        '[recovery]\nautoresume = true\nautoresume_interval = 5\nexit_interval = "none"'
    )
    resolved = resolve([f"--job.config_file={file}"])
    assert resolved.sections.recovery.adlr_autoresume
    assert resolved.sections.recovery.adlr_autoresume_interval == 5
    assert resolved.sections.recovery.exit_interval is None
    assert resolved.origins["recovery.adlr_autoresume_interval"] == f"{file}:3"
    resolved = resolve([f"--job.config_file={file}", "--recovery.no-adlr_autoresume"])
    assert not resolved.sections.recovery.adlr_autoresume


def test_a_key_given_by_both_its_names_is_refused(tmp_path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("[recovery]\nautoresume = true\nadlr_autoresume = false")
    with pytest.raises(ConfigError, match="given twice, as recovery.adlr_autoresume and"):
        resolve([f"--job.config_file={file}"])
