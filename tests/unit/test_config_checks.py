"""Rules between keys: each case breaks one rule of a job that is otherwise good."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest
from config_jobs import GOOD, job

from torchtitan_rl_ft.config.checks import Report, check
from torchtitan_rl_ft.config.resolve import resolve
from torchtitan_rl_ft.config.rules.job import Machine


def machine(*absent: str) -> Machine:
    """A machine that has everything but `absent`."""
    return Machine(
        has_module=lambda name: name not in absent,
        exists=lambda path: path not in absent,
        find_program=lambda name: None if name in absent else name,
    )


MACHINE = machine()
FT = "fault_tolerance"
Reporter = Callable[..., Report]


@pytest.fixture
def report(tmp_path: Path) -> Callable[..., Report]:
    """Check the good job with arguments on top."""

    def report(*argv: str, on: Machine = MACHINE, starting: bool = False) -> Report:
        return check(job(tmp_path, GOOD, *argv), on, starting=starting)

    return report


def words(text: str) -> list[str]:
    return text.split()


BROKEN = [
    # what a run shows of itself
    ("--otel.endpoint localhost:4318", ["otel.endpoint", "http://127.0.0.1:4318"]),
    ("--otel.endpoint http://collector:port", ["otel.endpoint", "OTLP/HTTP"]),
    ("--observability.profile_steps 99-101", ["profile_steps", "training.steps"]),
    ("--observability.profile_steps 3-2", ["profile_steps", "ends before it begins"]),
    ("--observability.profile_steps 0-2", ["profile_steps", "count from 1"]),
    ("--observability.profile_steps 1,2", ["profile_steps", "no range of steps"]),
    (
        "--observability.profile_steps 1 --profiling.enable_profiling",
        ["profile_steps", "profiling.enable_profiling"],
    ),
    ("--observability.profile_engines", ["profile_engines", "profile_steps is empty"]),
    ("--observability.ettr_window_s 0", ["observability.ettr_window_s must be positive"]),
    ("--observability.ettr_sample_s -1", ["observability.ettr_sample_s must be positive"]),
    ("--observability.status_port 65536", ["observability.status_port", "ports lie between"]),
    ("--otel.export_interval_s 0", ["otel.export_interval_s must be positive"]),
    # replica groups
    ("--fault_tolerance.min_replica_size 0", [f"{FT}.min_replica_size", f"{FT}.replica_groups"]),
    ("--fault_tolerance.min_replica_size -1", [f"{FT}.min_replica_size", f"{FT}.replica_groups"]),
    ("--fault_tolerance.min_replica_size 3", [f"{FT}.min_replica_size", f"{FT}.replica_groups"]),
    (
        "--fault_tolerance.lighthouse_min_replicas 2",
        [f"{FT}.lighthouse_min_replicas = 2", f"{FT}.min_replica_size = 1"],
    ),
    (
        "--fault_tolerance.min_replica_size 2 --fault_tolerance.lighthouse_min_replicas 1",
        [f"{FT}.lighthouse_min_replicas = 1", f"{FT}.min_replica_size = 2"],
    ),
    ("--fault_tolerance.group_size 3", [f"{FT}.group_size = 3", f"{FT}.replica_groups = 2"]),
    ("--fault_tolerance.replica_id 2", [f"{FT}.replica_id = 2", f"{FT}.replica_groups = 2"]),
    ("--fault_tolerance.replica_id -1", [f"{FT}.replica_id = -1"]),
    ("--fault_tolerance.replica_groups 0", [f"{FT}.replica_groups = 0"]),
    ("--fault_tolerance.process_group glo", ["'gloo'", f"{FT}.process_group"]),
    ("--fault_tolerance.no-enable", [f"{FT}.replica_groups = 2", f"{FT}.enable = False"]),
    # timeouts
    (
        "--fault_tolerance.process_group_timeout_ms 100000",
        [f"{FT}.process_group_timeout_ms", "comm.train_timeout_seconds = 100"],
    ),
    (
        "--comm.train_timeout_seconds 300",
        ["comm.train_timeout_seconds = 300", "comm.init_timeout_seconds = 300"],
    ),
    ("--fault_tolerance.process_group_timeout_ms 0", [f"{FT}.process_group_timeout_ms = 0"]),
    (
        "--fault_tolerance.heartbeat_timeout_ms 300000",
        [f"{FT}.heartbeat_timeout_ms = 300000", f"{FT}.quorum_timeout_s = 300"],
    ),
    (
        "--fault_tolerance.manager_timeout_s 10",
        [f"{FT}.process_group_timeout_ms", f"{FT}.manager_timeout_s = 10"],
    ),
    ("--fault_tolerance.heal_warn_share 0", [f"{FT}.heal_warn_share = 0"]),
    ("--fault_tolerance.heal_port 70000", [f"{FT}.heal_port = 70000"]),
    ("--fault_tolerance.heal_address host:port", [f"{FT}.heal_address"]),
    (
        "--fault_tolerance.heartbeat_timeout_ms 100",
        [f"{FT}.heartbeat_interval_ms", f"{FT}.heartbeat_timeout_ms"],
    ),
    (
        "--fault_tolerance.quorum_timeout_s 1",
        [f"{FT}.join_timeout_ms", f"{FT}.quorum_timeout_s"],
    ),
    ("--fault_tolerance.max_commit_retries 0", [f"{FT}.max_commit_retries = 0"]),
    # sizes
    (
        "--rl.groups_per_step 5 --rl.samples_per_prompt 3",
        ["rl.groups_per_step = 5", "rl.samples_per_prompt = 3", f"{FT}.replica_groups", "14 or 16"],
    ),
    ("--rl.groups_per_step 0", ["rl.groups_per_step = 0"]),
    ("--training.global_batch_size 64", ["training.global_batch_size = 64", "= 128 samples"]),
    ("--training.local_batch_size 0", ["training.local_batch_size = 0"]),
    # numeric guards
    ("--recovery.phase_timeout_s 0", ["recovery.phase_timeout_s = 0"]),
    ("--recovery.workload_inspector_port 70000", ["recovery.workload_inspector_port = 70000"]),
    ("--recovery.rank_silence_timeout_s -1", ["recovery.rank_silence_timeout_s = -1"]),
    (
        '--recovery.enable_ft_package --recovery.phase_timeouts ["reduce=soon"]',
        ["recovery.phase_timeouts", "PHASE=SECONDS"],
    ),
    (
        '--recovery.enable_ft_package --recovery.phase_timeouts ["redoce=20"]',
        ["recovery.phase_timeouts", "did you mean 'reduce'?", "waiting_for_batch"],
    ),
    (
        '--recovery.phase_timeouts ["reduce=9"]',
        ["recovery.phase_timeouts", "recovery.enable_ft_package = False"],
    ),
    (
        "--recovery.calc_ft_timeouts",
        ["recovery.calc_ft_timeouts = True", "recovery.enable_ft_package = False"],
    ),
    ("--recovery.anomaly_factor 1", ["recovery.anomaly_factor = 1"]),
    ("--recovery.rerun_interval 0", ["recovery.rerun_interval = 0"]),
    ("--recovery.replica_hash_interval -1", ["recovery.replica_hash_interval = -1"]),
    (
        "--recovery.rerun_mode report_stats --fault_tolerance.replica_groups 1",
        ["recovery.rerun_mode", f"{FT}.replica_groups = 1"],
    ),
    (
        "--recovery.rerun_mode report_stats --fault_tolerance.semi_sync_method diloco",
        ["recovery.rerun_mode", f"{FT}.semi_sync_method"],
    ),
    (
        "--recovery.decrease_batch_size_if_needed --rl.groups_per_step 1 --rl.samples_per_prompt 1",
        ["rl.groups_per_step = 1", f"{FT}.replica_groups = 2"],
    ),
    ("--training.steps 0", ["training.steps = 0"]),
    (
        "--rollout.max_response_tokens 17",
        ["rollout.max_prompt_tokens", "rollout.max_response_tokens = 17", "training.seq_len = 32"],
    ),
    (
        "--parallelism.tensor_parallel_degree 2",
        [f"{FT}.ranks_per_group = 1", "parallelism.tensor_parallel_degree = 2"],
    ),
    (
        "--fault_tolerance.ranks_per_group 3 --parallelism.tensor_parallel_degree 2",
        [f"{FT}.ranks_per_group = 3", "parallelism.tensor_parallel_degree = 2"],
    ),
    (
        "--fault_tolerance.ranks_per_group 4 --parallelism.data_parallel_shard_degree 2",
        [f"{FT}.ranks_per_group = 4", "parallelism.data_parallel_shard_degree = 2"],
    ),
    ("--parallelism.context_parallel_degree 0", ["parallelism.context_parallel_degree = 0"]),
    ("--parallelism.data_parallel_shard_degree 0", ["parallelism.data_parallel_shard_degree = 0"]),
    (
        "--fault_tolerance.ranks_per_group 2 --parallelism.data_parallel_replicate_degree 2",
        ["parallelism.data_parallel_replicate_degree = 2", f"{FT}.enable"],
    ),
    (
        "--fault_tolerance.ranks_per_group 2 --parallelism.tensor_parallel_degree 2 "
        "--training.seq_len 33",
        ["training.seq_len = 33", "parallelism.tensor_parallel_degree = 2"],
    ),
    # the algorithm
    ("--rl.mode async", ["rl.mode = 'async'", "rl.max_policy_age = 0"]),
    ("--rl.mode semi_async", ["rl.mode = 'semi_async'", "rl.max_policy_age = 0"]),
    ("--rl.max_policy_age -1", ["rl.max_policy_age = -1"]),
    ("--rl.clip_ratio_low 1", ["rl.clip_ratio_low = 1"]),
    ("--rl.ratio_cap 1.1", ["rl.ratio_cap = 1.1", "rl.clip_ratio_high = 0.2"]),
    ("--rl.kl_coef -1", ["rl.kl_coef"]),
    ("--rl.reward no_colon", ["rl.reward", "module:name"]),
    ("--optimizer.lr 0", ["optimizer.lr"]),
    ("--optimizer.beta1 1", ["optimizer.beta1"]),
    ("--model.flavor hf", ["model.flavor = 'hf'", "model.hf_assets_path"]),
    # no effect in the chosen mode
    ("--rl.start_fraction 0.3", ["rl.start_fraction = 0.3", "rl.mode = 'sync'"]),
    ("--rl.kl_reference ./x", ["rl.kl_reference", "rl.kl_coef"]),
    (
        "--fault_tolerance.sync_steps 10",
        [f"{FT}.sync_steps = 10", f"{FT}.semi_sync_method = None"],
    ),
    (
        "--activation_checkpoint.memory_budget 0.1",
        ["activation_checkpoint.memory_budget", "activation_checkpoint.mode = 'none'"],
    ),
    # engines
    ("--rollout.engines 0", ["rollout.engines = 0"]),
    ("--rollout.min_engines 3", ["rollout.min_engines = 3", "rollout.engines = 2"]),
    (
        "--rollout.weight_transport nixl --rollout.external_urls http://h:1",
        ["rollout.weight_transport = 'nixl'", "rollout.external_urls", "use auto or disk"],
    ),
    ("--weights.holders 0", ["weights.holders = 0"]),
    ("--weights.piece_mb 0", ["weights.piece_mb = 0"]),
    ("--weights.stall_timeout_s 0", ["weights.stall_timeout_s = 0"]),
    ("--weights.fetch_timeout_s -1", ["weights.fetch_timeout_s = -1"]),
    (
        "--weights.stall_timeout_s 60",
        ["weights.stall_timeout_s = 60", "weights.fetch_timeout_s = 60", "no other holder"],
    ),
    ("--weights.ucx_port_range 46000", ["weights.ucx_port_range = '46000'", "FIRST-LAST"]),
    ("--weights.ucx_port_range 5-70000", ["weights.ucx_port_range = '5-70000'"]),
    ("--weights.ucx_port_range 9-5", ["weights.ucx_port_range = '9-5'"]),
    ("--weights.ucx_devices lo;eth0", ["weights.ucx_devices = 'lo;eth0'"]),
    ("--weights.ucx_devices=^eth0", ["weights.ucx_devices = '^eth0'"]),
    ("--weights.ucx_tls=tcp;x", ["weights.ucx_tls = 'tcp;x'"]),
    ("--weights.memory_folder shm", ["weights.memory_folder = 'shm'", "absolute"]),
    ("--weights.host=", ["weights.host = ''"]),
    ("--weights.host=0.0.0.0", ["weights.host = '0.0.0.0'", "reach it"]),
    ("--weights.host=::1", ["weights.host = '::1'", "IPv4"]),
    ("--rollout.top_p 0", ["rollout.top_p"]),
    ("--rollout.top_k 0", ["rollout.top_k"]),
    # recovery
    (
        "--recovery.exit_on_missing_checkpoint",
        ["recovery.exit_on_missing_checkpoint", "recovery.auto_continue_train = False"],
    ),
    ("--recovery.exit_interval 0", ["recovery.exit_interval = 0", "none"]),
    ("--recovery.exit_duration_in_mins -1", ["recovery.exit_duration_in_mins = -1.0"]),
    ("--recovery.autoresume_interval 0", ["recovery.adlr_autoresume_interval = 0"]),
    (
        "--recovery.autoresume_file x",
        ["recovery.autoresume_file = 'x'", "recovery.adlr_autoresume = False"],
    ),
    (
        "--recovery.exit_signal_handler --checkpoint.load_only --rollout.no-journal",
        ["recovery.exit_signal_handler = True", "checkpoint.load_only = True"],
    ),
    (
        "--recovery.exit_interval 7 --rollout.debug_mode rollout_only",
        ["recovery.exit_interval = 7", "rollout.debug_mode = 'rollout_only'"],
    ),
    ("--recovery.max_numeric_refusals 0", ["recovery.max_numeric_refusals"]),
]


NOT_RESUMABLE = [
    ("--checkpoint.no-enable", ["checkpoint.enable = False", "rollout.journal = True"]),
    ("--checkpoint.load_only", ["checkpoint.load_only = True", "rollout.journal = True"]),
    (
        "--checkpoint.last_save_model_only",
        ["checkpoint.last_save_model_only = True", "lack the optimizer"],
    ),
    ("--checkpoint.last_save_in_hf", ["checkpoint.last_save_in_hf = True", "without state"]),
    *(
        (
            f"--checkpoint.exclude_from_loading {names}",
            [f"'{name}'", "checkpoint.exclude_from_loading", "rollout.journal", why],
        )
        for names, name, why in (
            ("optimizer", "optimizer", "does not continue"),
            ("model", "model", "does not continue"),
            ("lr_scheduler,optimizer", "lr_scheduler", "does not continue"),
            ("train_state", "train_state", "all random numbers follow from"),
            ("rng", "rng", "would not go on"),
        )
    ),
]


def test_the_good_job_breaks_no_rule(report: Reporter) -> None:
    assert report() == Report([], [])


@pytest.mark.scenario("F-1")
@pytest.mark.parametrize(("argv", "parts"), BROKEN, ids=[case[0] for case in BROKEN])
def test_a_broken_rule_names_its_keys(report: Reporter, argv: str, parts: list[str]) -> None:
    problems = report(*words(argv)).problems
    assert any(all(part in problem for part in parts) for problem in problems), problems
    assert all("\n" not in problem for problem in problems)
    assert len(problems) == 1, problems


@pytest.mark.row("A5")
@pytest.mark.parametrize(("argv", "parts"), NOT_RESUMABLE, ids=[c[0] for c in NOT_RESUMABLE])
def test_a_journal_needs_checkpoints_to_go_on_with(
    report: Reporter, argv: str, parts: list[str]
) -> None:
    problems = report(*words(argv)).problems
    assert any(all(part in problem for part in parts) for problem in problems), problems
    assert report(*words(argv), "--rollout.no-journal").problems == []


@pytest.mark.row("A5")
def test_a_state_that_no_checkpoint_holds_is_refused_with_what_was_meant(report: Reporter) -> None:
    (problem,) = report("--checkpoint.exclude_from_loading", "rngs").problems
    assert "not 'rngs'" in problem and "did you mean 'rng'" in problem


@pytest.mark.row("A5")
def test_the_optimizer_is_left_out_of_checkpoints_only_where_it_has_no_state(
    report: Reporter,
) -> None:
    flag = "--recovery.no-save_optimizer"
    (problem,) = report(flag).problems
    assert "recovery.save_optimizer = False" in problem and "keeps state" in problem
    assert "optimizer.name = 'AdamW'" in problem or "optimizer.name = AdamW" in problem
    assert report(flag, "--optimizer.name", "SGD").problems == []
    group = '[{"pattern": ".*", "optimizer_name": "SGD", "optimizer_kwargs": {"lr": 0.1%s}}]'
    assert report(flag, "--optimizer.param_groups", group % "").problems == []
    moving = report(flag, "--optimizer.param_groups", group % ', "momentum": 0.9')
    assert "keeps state" in moving.problems[0] and "optimizer.param_groups" in moving.problems[0]


@pytest.mark.row("A5")
def test_a_stateless_optimizer_needs_no_state(report: Reporter) -> None:
    excluded = ("--checkpoint.exclude_from_loading", "optimizer")
    assert report("--optimizer.name", "SGD", *excluded).problems == []
    group = '[{"pattern": ".*", "optimizer_name": "SGD", "optimizer_kwargs": {"lr": 0.1%s}}]'
    assert report("--optimizer.param_groups", group % "", *excluded).problems == []
    moving = report("--optimizer.param_groups", group % ', "momentum": 0.9', *excluded)
    assert "'optimizer' does not continue the journal" in moving.problems[0]


SEMI_SYNC = [
    ("--fault_tolerance.semi_sync_method foo", ["local_sgd, diloco", f"{FT}.semi_sync_method"]),
    ("--fault_tolerance.semi_sync_method diloko", ["did you mean 'diloco'"]),
    (
        "--fault_tolerance.semi_sync_method diloco --fault_tolerance.num_fragments 2",
        [f"{FT}.sync_steps = 5", f"{FT}.num_fragments = 2", "multiple"],
    ),
    (
        "--fault_tolerance.semi_sync_method diloco --fault_tolerance.num_fragments 7",
        [f"{FT}.sync_steps = 5", f"{FT}.num_fragments = 7"],
    ),
    (
        "--fault_tolerance.semi_sync_method diloco --fault_tolerance.fragment_sync_delay 5",
        [f"{FT}.fragment_sync_delay = 5", f"{FT}.sync_steps = 5"],
    ),
    (
        "--fault_tolerance.semi_sync_method diloco --fault_tolerance.sync_steps 4 "
        "--fault_tolerance.num_fragments 2 --fault_tolerance.fragment_sync_delay 2",
        [f"{FT}.fragment_sync_delay = 2", f"{FT}.sync_steps = 4", f"{FT}.num_fragments = 2"],
    ),
    (
        "--fault_tolerance.semi_sync_method diloco --fault_tolerance.fragment_update_alpha 1.5",
        [f"{FT}.fragment_update_alpha = 1.5", "between 0 and 1"],
    ),
    (
        "--fault_tolerance.semi_sync_method local_sgd --fault_tolerance.sync_steps 0",
        [f"{FT}.sync_steps = 0"],
    ),
    (
        "--fault_tolerance.semi_sync_method diloco --fault_tolerance.num_fragments 3 "
        "--fault_tolerance.sync_steps 6 "
        '--fault_tolerance.module_fqns_per_model_fragment=[["a"],["b"]]',
        [f"{FT}.num_fragments = 3", f"{FT}.module_fqns_per_model_fragment"],
    ),
    (
        "--fault_tolerance.semi_sync_method diloco --fault_tolerance.sync_steps 4 "
        "--fault_tolerance.fragment_sync_delay 2",
        ["a sample is committed once", f"{FT}.fragment_sync_delay = 2"],
    ),
    (
        "--fault_tolerance.semi_sync_method diloco --fault_tolerance.fragment_update_alpha 0.5",
        ["a sample is committed once", f"{FT}.fragment_update_alpha = 0.5"],
    ),
    (
        "--fault_tolerance.semi_sync_method diloco --fault_tolerance.should_quantize",
        ["FP8 kernels for CUDA", f"{FT}.should_quantize = True"],
    ),
    (
        "--fault_tolerance.semi_sync_method diloco --fault_tolerance.outer_momentum 1.0",
        ["below 1", f"{FT}.outer_momentum = 1.0"],
    ),
    (
        "--fault_tolerance.semi_sync_method local_sgd --fault_tolerance.outer_lr 0.5",
        [f"{FT}.outer_lr = 0.5", f"{FT}.semi_sync_method = 'local_sgd'"],
    ),
]


@pytest.mark.scenario("F-1")
@pytest.mark.row("G10")
@pytest.mark.parametrize(("argv", "parts"), SEMI_SYNC, ids=[case[0] for case in SEMI_SYNC])
def test_semi_sync_settings_are_checked(report: Reporter, argv: str, parts: list[str]) -> None:
    problems = report(*words(argv)).problems
    assert any(all(part in problem for part in parts) for problem in problems), problems


@pytest.mark.row("G9")
@pytest.mark.parametrize(
    "argv",
    [
        "--fault_tolerance.semi_sync_method diloco --fault_tolerance.sync_steps 4 "
        "--fault_tolerance.num_fragments 2 --fault_tolerance.outer_momentum 0",
        "--fault_tolerance.semi_sync_method local_sgd",
    ],
)
def test_semi_sync_is_accepted(report: Reporter, argv: str) -> None:
    assert report(*words(f"--fault_tolerance.enable {argv}")).problems == []


@pytest.mark.scenario("Q-2")
def test_mismatched_minimums_are_refused_with_one_group(report: Reporter) -> None:
    found = report(
        *words("--fault_tolerance.replica_groups 1 --fault_tolerance.min_replica_size 2")
    )
    assert any(f"{FT}.min_replica_size = 2" in p for p in found.problems)


@pytest.mark.row("A6")
@pytest.mark.parametrize("by_file", [True, False])
def test_torchft_that_is_missing_is_named(tmp_path: Path, by_file: bool) -> None:
    without = machine("torchft")
    text, argv = "[fault_tolerance]\nenable = true\n", ["--fault_tolerance.enable"]
    resolved = job(tmp_path, text) if by_file else job(tmp_path, "", *argv)
    assert any(
        "torchft is not installed: pip install -r requirements-torchft.txt" in problem
        and f"{FT}.enable" in problem
        for problem in check(resolved, without).problems
    )
    assert not any("torchft" in p for p in check(job(tmp_path), without).problems)


@pytest.mark.row("A2")
@pytest.mark.parametrize(
    "key", ["health_check_interval", "health_check_timeout", "cleanup_timeout"]
)
@pytest.mark.parametrize("value", ["0", "-1"])
def test_health_times_must_be_positive(report: Reporter, key: str, value: str) -> None:
    found = report(f"--rollout.{key}", value)
    assert found.problems == [
        f"rollout.{key} must be positive: rollout.{key} = {float(value)} (command line)"
    ]


@pytest.mark.row("A2")
@pytest.mark.parametrize("value", ["0", "-1"])
def test_the_failure_threshold_must_be_positive(report: Reporter, value: str) -> None:
    key = "rollout.health_check_failure_threshold"
    assert report(f"--{key}", value).problems == [
        f"{key} must be positive: {key} = {value} (command line)"
    ]


@pytest.mark.row("A2")
def test_the_first_wait_may_be_zero_but_not_negative(report: Reporter) -> None:
    assert report("--rollout.health_check_first_wait", "0").problems == []
    assert len(report("--rollout.health_check_first_wait", "-1").problems) == 1


SUSPICIOUS = [
    ("--rl.samples_per_prompt 1 --rl.groups_per_step 128", "rl.samples_per_prompt"),
    ("--rollout.temperature 0", "rollout.temperature"),
    (
        "--rollout.health_check_failure_threshold 1",
        "rollout.health_check_failure_threshold",
    ),
    ("--rl.max_policy_age 2", "rl.max_policy_age"),
    ("--rollout.max_concurrent_groups 1", "rollout.max_concurrent_groups"),
    ("--rollout.no-journal", "rollout.journal"),
    ("--fault_tolerance.replica_groups 1", f"{FT}.replica_groups"),
    ("--fault_tolerance.quorum_retries 0", f"{FT}.quorum_retries"),
    ("--recovery.role_max_restarts 0", "recovery.role_max_restarts"),
    ("--weights.ucx_devices all", "weights.ucx_devices"),
    ("--weights.holders 2 --rollout.weight_transport disk", "no effect: holders"),
    ("--checkpoint.interval 1000", "checkpoint.interval"),
    ("--rl.start_fraction 0.5", "rl.start_fraction"),
    ("--fault_tolerance.no-enable --fault_tolerance.replica_groups 1", f"{FT}.enable"),
]


@pytest.mark.scenario("D-1")
@pytest.mark.parametrize(("argv", "key"), SUSPICIOUS, ids=[case[0] for case in SUSPICIOUS])
def test_suspicious_values_warn(report: Reporter, argv: str, key: str) -> None:
    found = report(*words(argv))
    assert found.problems == []
    assert any(key in warning for warning in found.warnings), found.warnings


@pytest.mark.row("I4")
def test_a_batch_is_lowered_to_the_nearest_that_the_layout_can_split(
    report: Reporter, tmp_path: Path
) -> None:
    odd = words("--rl.groups_per_step 15 --rl.samples_per_prompt 3")
    assert any("cannot be split" in p for p in report(*odd).problems)
    lower = [*odd, "--recovery.decrease_batch_size_if_needed"]
    found = report(*lower)
    assert not found.problems
    assert any("smaller than was asked for" in w and "from 15" in w for w in found.warnings)
    made = job(tmp_path, GOOD, *lower)
    assert made.get("rl.groups_per_step") == 14
    again = made.with_overrides([])
    assert again.get("rl.groups_per_step") == 14, "a role takes what the job has settled on"
    assert job(tmp_path, GOOD, *lower, "--rl.groups_per_step", "16").get("rl.groups_per_step") == 16


def test_a_missing_model_directory_warns_until_the_job_starts(report: Reporter) -> None:
    nowhere = machine("./assets/hf/Qwen3-8B")
    resolved = resolve(["--job.config_file", "qwen3_8b_math.toml"])
    found = check(resolved, nowhere)
    assert found.problems == []
    assert any("model.hf_assets_path" in warning for warning in found.warnings)
    (problem,) = check(resolved, nowhere, starting=True).problems
    assert "the model directory does not exist: model.hf_assets_path" in problem


@pytest.mark.parametrize("starting", [False, True])
@pytest.mark.parametrize(
    ("absent", "message"),
    [
        (["config.json"], "holds no config.json"),
        (["tokenizer.json", "tokenizer.model", "vocab.json"], "holds no tokenizer"),
    ],
)
def test_an_incomplete_model_directory_is_refused(
    report: Reporter, absent: list[str], message: str, starting: bool
) -> None:
    on = machine(*(f"/models/a/{name}" for name in absent))
    argv = ["--model.flavor", "hf", "--model.hf_assets_path", "/models/a"]
    (problem,) = report(*argv, on=on, starting=starting).problems
    assert message in problem and "model.hf_assets_path = '/models/a'" in problem


def test_a_missing_interpreter_is_refused(report: Reporter) -> None:
    argv = ["--rollout.engine_python", "python9"]
    (problem,) = report(*argv, on=machine("python9")).problems
    assert "there is no such interpreter: rollout.engine_python = 'python9'" in problem


@pytest.mark.parametrize(
    "argv",
    [
        ["--rollout.engine_args=--api-key=hunter2"],
        ['--rollout.engine_args=["--admin-api-key", "hunter2"]'],
        ["--otel.endpoint", "https://user:hunter2@collector:4318"],
    ],
)
def test_secrets_are_refused_and_not_repeated(report: Reporter, argv: list[str]) -> None:
    (problem,) = report(*argv).problems
    assert "no secret belongs into a configuration" in problem
    assert "hunter2" not in problem


def test_a_job_without_fault_tolerance_has_one_group_and_no_timeout_rule(tmp_path: Path) -> None:
    text = "[rollout]\nmax_response_tokens = 8\n[comm]\ntrain_timeout_seconds = 5\n"
    assert check(job(tmp_path, text), MACHINE) == Report([], [])


@pytest.mark.parametrize(
    "name", [f.name for f in files("torchtitan_rl_ft").joinpath("configs").iterdir()]
)
def test_every_shipped_file_passes(report: Reporter, name: str) -> None:
    assert name.endswith(".toml")
    assert check(resolve(["--job.config_file", name]), MACHINE).problems == []


def test_a_missing_package_is_one_error_with_its_cure(report: Reporter) -> None:
    on = machine("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
    assert not report(on=on).problems
    [problem] = report("--otel.endpoint", "http://127.0.0.1:4318", on=on).problems
    assert "pip install 'torchtitan_rl_ft[otel]'" in problem
    [problem] = report("--metrics.enable_wandb", on=machine("wandb")).problems
    assert "pip install wandb" in problem
