"""The algorithm, its plug-ins, the model and the optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from torchtitan_rl_ft.config.rules.job import Job

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")


def policy_age(job: Job) -> Iterator[str]:
    rl = job.resolved.sections.rl
    yield from job.not_negative("rl", "max_policy_age")
    if rl.mode != "sync" and rl.max_policy_age == 0:
        yield job.broken(
            f"mode {rl.mode!r} rolls out the next batch while the last is trained, so its "
            "samples are at least one version old: max_policy_age must be at least 1",
            "rl.mode",
            "rl.max_policy_age",
        )
    if not 0 <= rl.start_fraction <= 1:
        yield job.broken("start_fraction must be between 0 and 1", "rl.start_fraction")


def algorithm(job: Job) -> Iterator[str]:
    rl = job.resolved.sections.rl
    yield from job.not_negative("rl", "kl_coef", "eval_prompts", "clip_ratio_high")
    yield from job.not_negative("rl", "max_silent_s", "max_flat_batches")
    yield from job.positive("rl", "ratio_cap", "max_prompt_failures")
    yield from job.positive("rl", "warn_silent_s", "max_dropped_batches")
    if not 0 <= rl.clip_ratio_low < 1:
        yield job.broken(
            "clip_ratio_low must be at least 0 and below 1: the ratio is kept above "
            "1 - clip_ratio_low",
            "rl.clip_ratio_low",
        )
    if rl.ratio_cap < 1 + rl.clip_ratio_high and rl.loss == "grpo":
        yield job.broken(
            "the ratio is clipped at 1 + clip_ratio_high, a lower ratio_cap would move it",
            "rl.ratio_cap",
            "rl.clip_ratio_high",
        )


def plug_ins(job: Job) -> Iterator[str]:
    for key in ("data_source", "reward", "filter"):
        path = f"rl.{key}"
        value = job.resolved.get(path)
        if not value and key == "filter":
            continue
        module, _, name = value.partition("?")[0].partition(":")
        if not module or not name.isidentifier():
            yield job.broken(
                f"{path} must be written module:name, or module:name?option=value", path
            )


def model_directory(job: Job) -> Iterator[str]:
    """A directory that is not there yet is a warning (`suspicious.py`) until the job starts."""
    model, exists = job.resolved.sections.model, job.machine.exists
    path, keys = model.hf_assets_path, ("model.hf_assets_path", "model.flavor")
    if not path:
        if model.flavor != "tiny":
            yield job.broken("this model is read from a directory, and none is named", *keys)
        return
    if not exists(path):
        if job.starting:
            yield job.broken("the model directory does not exist", *keys)
        return
    if not exists(f"{path}/config.json"):
        yield job.broken("the model directory holds no config.json", *keys)
    if not any(exists(f"{path}/{name}") for name in TOKENIZER_FILES):
        yield job.broken(
            f"the model directory holds no tokenizer (none of {', '.join(TOKENIZER_FILES)})", *keys
        )
    if not any(exists(f"{path}/{name}") for name in WEIGHT_FILES):
        yield job.broken(
            f"the model directory holds no weights (none of {', '.join(WEIGHT_FILES)})", *keys
        )


def training(job: Job) -> Iterator[str]:
    yield from job.positive("optimizer", "lr", "eps")
    yield from job.not_negative("optimizer", "weight_decay")
    yield from job.not_negative("lr_scheduler", "warmup_steps")
    for key in ("beta1", "beta2"):
        path = f"optimizer.{key}"
        if not 0 <= job.resolved.get(path) < 1:
            yield job.broken(f"{path} must be at least 0 and below 1", path)
    flat = [f"optimizer.{k}" for k in ("name", "lr", "beta1", "beta2", "eps", "weight_decay")]
    given = [path for path in flat if job.resolved.given(path)]
    groups = job.resolved.get("optimizer.param_groups")
    if given and len(groups) > 1:
        yield job.broken(
            "one value cannot stand for several parameter groups; write it into the groups",
            given[0],
            "optimizer.param_groups",
        )


def numeric_guards(job: Job) -> Iterator[str]:
    recovery, ft = job.resolved.sections.recovery, job.resolved.sections.fault_tolerance
    yield from job.positive("recovery", "rerun_interval")
    yield from job.not_negative("recovery", "replica_hash_interval", "anomaly_warmup_steps")
    if recovery.anomaly_factor <= 1:
        yield job.broken("anomaly_factor must be above 1", "recovery.anomaly_factor")
    alone = not ft.enable or ft.replica_groups < 2
    for key, on in (
        ("rerun_mode", recovery.rerun_mode != "disabled"),
        ("replica_hash_interval", recovery.replica_hash_interval > 0),
    ):
        if on and alone:
            yield job.broken(
                f"{key} compares replica groups: there must be two at least",
                f"recovery.{key}",
                "fault_tolerance.enable",
                "fault_tolerance.replica_groups",
            )
    if recovery.rerun_mode != "disabled" and ft.semi_sync_method is not None:
        yield job.broken(
            "rerun_mode computes another group's gradient again, which needs its parameters: in "
            "semi-sync each group has its own until the window's end",
            "recovery.rerun_mode",
            "fault_tolerance.semi_sync_method",
        )
