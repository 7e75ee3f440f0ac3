"""What a journal needs of checkpoints; debug modes and their dumps."""

from __future__ import annotations

from collections.abc import Iterator

from torchtitan_rl_ft.config.debug_mode import (
    DebugMode,
    debug_mode,
    dump_path,
    journaling,
    template_problem,
)
from torchtitan_rl_ft.config.errors import near_miss
from torchtitan_rl_ft.config.rules.job import Job

CHECKPOINT_STATES = ("model", "optimizer", "lr_scheduler", "train_state", "rng")
"""What a checkpoint holds, by the names that can be excluded. The data cursor is the journal's."""

SAVE, LOAD, TRAIN, SUBSAMPLE, MODE = (
    f"rollout.{key}"
    for key in (
        "save_debug_rollout_data",
        "load_debug_rollout_data",
        "save_debug_train_data",
        "load_debug_rollout_data_subsample",
        "debug_mode",
    )
)


def saved_optimizer(job: Job) -> Iterator[str]:
    """A checkpoint without the optimizer's state is whole where there is none."""
    if not job.resolved.sections.recovery.save_optimizer and not _stateless_optimizer(job):
        groups = "optimizer.param_groups"
        yield job.broken(
            "this optimizer keeps state between steps, which checkpoints would lack (SGD without "
            "momentum keeps none)",
            "recovery.save_optimizer",
            groups if job.resolved.get(groups) else "optimizer.name",
        )


def resumable(job: Job) -> Iterator[str]:
    """A journal is worth keeping only beside checkpoints that can be gone on with."""
    excluded = job.resolved.get("checkpoint.exclude_from_loading")
    for name in excluded:
        if name not in CHECKPOINT_STATES:
            yield job.broken(
                f"a checkpoint holds {', '.join(CHECKPOINT_STATES)}, not {name!r}"
                f"{near_miss(name, CHECKPOINT_STATES)}",
                "checkpoint.exclude_from_loading",
            )
    if not journaling(job.resolved.sections.rollout):
        return
    for key, wanted, why in (
        ("enable", True, "a journal needs checkpoints to go back to"),
        ("load_only", False, "a journal needs checkpoints to go back to"),
        ("create_seed_checkpoint", False, "a seed checkpoint is made by a job of its own"),
        ("last_save_model_only", False, "the last checkpoint would lack the optimizer's state"),
        ("last_save_in_hf", False, "the last checkpoint would be in a format without state"),
    ):
        if job.resolved.get(f"checkpoint.{key}") is not wanted:
            yield job.broken(why, f"checkpoint.{key}", "rollout.journal")
    stateless = {"optimizer"} if _stateless_optimizer(job) else set()
    for name in CHECKPOINT_STATES:
        if name in excluded and name not in stateless:
            yield job.broken(
                f"a checkpoint that is loaded without {name!r} does not continue the journal"
                f"{_WHY.get(name, '')}",
                "checkpoint.exclude_from_loading",
                "rollout.journal",
            )


_WHY = {
    "train_state": ": it holds the step, which all random numbers follow from",
    "rng": ": what is drawn between two steps would not go on",
}


def _stateless_optimizer(job: Job) -> bool:
    """Plain gradient descent keeps nothing between steps."""
    get = job.resolved.get
    groups = get("optimizer.param_groups") or [{"optimizer_name": get("optimizer.name")}]
    return all(
        g["optimizer_name"] == "SGD" and not g.get("optimizer_kwargs", {}).get("momentum")
        for g in groups
    )


def dump_files(job: Job) -> Iterator[str]:
    """Templates name one file per rollout, and no two templates the same one."""
    rollout, folder = job.resolved.sections.rollout, job.resolved.run_folder.path
    found: dict[str, str] = {}
    for path in (SAVE, LOAD, TRAIN):
        template = job.resolved.get(path)
        if not template:
            continue
        if problem := template_problem(template):
            yield job.broken(problem, path)
            continue
        file = str(dump_path(template, folder, 1))
        if path == TRAIN and file in found:
            yield job.broken("both would be written to the same files", path, found[file])
        found[file] = path
    if not 0 < rollout.load_debug_rollout_data_subsample <= 1:
        yield job.broken("a share of prompt groups is above 0 and at most 1", SUBSAMPLE)


def debug_modes(job: Job) -> Iterator[str]:
    rollout, get = job.resolved.sections.rollout, job.resolved.get
    if rollout.debug_mode == DebugMode.ROLLOUT_ONLY:
        if rollout.load_debug_rollout_data:
            yield job.broken("dumps to load are trained on: that is train_only", MODE, LOAD)
        elif not rollout.save_debug_rollout_data:
            yield job.broken("rollout_only dumps its samples, and no files are named", MODE, SAVE)
    if rollout.debug_mode == DebugMode.TRAIN_ONLY and not rollout.load_debug_rollout_data:
        yield job.broken("train_only trains on dumps, and no files are named", MODE, LOAD)
    split = [
        f"parallelism.{kind}_parallel_degree"
        for kind in ("context", "pipeline")
        if get(f"parallelism.{kind}_parallel_degree") > 1
    ]
    if rollout.save_debug_train_data and split:
        yield job.broken(
            "what is trained cannot be dumped where no rank sees whole samples", TRAIN, *split
        )


def idle_dumps(job: Job) -> Iterator[tuple[str, str]]:
    """(template that is set, key that makes it idle). Only worth a warning: a job is made a
    debug one by the one key."""
    rollout = job.resolved.sections.rollout
    mode = debug_mode(rollout)
    if mode is DebugMode.TRAIN_ONLY and rollout.save_debug_rollout_data:
        yield SAVE, MODE
    if mode is DebugMode.ROLLOUT_ONLY and rollout.save_debug_train_data:
        yield TRAIN, MODE
