"""What is legal but suspicious, and what is set to no effect."""

from __future__ import annotations

from collections.abc import Iterator

from torchtitan_rl_ft.config.debug_mode import DebugMode, debug_mode, journaling
from torchtitan_rl_ft.config.resolve import LOWERED
from torchtitan_rl_ft.config.rules.exits import cannot_go_on
from torchtitan_rl_ft.config.rules.job import Job
from torchtitan_rl_ft.config.rules.journaling import LOAD, SUBSAMPLE, idle_dumps
from torchtitan_rl_ft.config.rules.routing import idle_keys
from torchtitan_rl_ft.config.schema import load_schema

SEMI_SYNC_KEYS = (
    "sync_steps",
    "should_quantize",
    "fragment_sync_delay",
    "fragment_update_alpha",
    "module_fqns_per_model_fragment",
    "num_fragments",
    "outer_lr",
    "outer_momentum",
)
POLICY_KEYS = {
    "force_recompute_mm_shapes_by_fqns": ("selective",),
    "memory_budget": ("memory_budget",),
    "visualize_memory_budget_pareto": ("memory_budget",),
    "preserve_rng_state": ("selective", "full"),
    "determinism_check": ("selective", "full"),
    "debug": ("selective", "full"),
}
"""Keys of [activation_checkpoint] and the modes that read them."""


def suspicious(job: Job) -> list[str]:
    rl, rollout = job.resolved.sections.rl, job.resolved.sections.rollout
    ft, recovery = job.resolved.sections.fault_tolerance, job.resolved.sections.recovery
    found: list[str] = []

    def warn(condition: bool, message: str, *paths: str) -> None:
        if condition:
            found.append(job.broken(message, *paths))

    warn(
        LOWERED in job.resolved.origins["rl.groups_per_step"],
        "the batch is smaller than was asked for",
        "rl.groups_per_step",
        "recovery.decrease_batch_size_if_needed",
    )
    warn(
        not recovery.check_for_nan_in_loss_and_grad,
        "numbers that are not finite are trained on and reach every group",
        "recovery.check_for_nan_in_loss_and_grad",
    )
    warn(
        job.resolved.sections.weights.ucx_devices == "all" and rollout.weight_transport != "disk",
        "UCX has no authentication, and listens on every network that this machine is on",
        "weights.ucx_devices",
    )
    warn(
        rl.samples_per_prompt == 1,
        "a prompt group of one sample has no advantage and teaches nothing",
        "rl.samples_per_prompt",
    )
    warn(
        rollout.temperature == 0,
        "greedy sampling gives equal samples, so no advantage",
        "rollout.temperature",
    )
    warn(
        rl.mode == "sync" and rl.max_policy_age > 0,
        "in sync mode samples come from the newest policy; older ones are only left-overs",
        "rl.mode",
        "rl.max_policy_age",
    )
    warn(
        rollout.max_concurrent_groups < rollout.engines,
        "fewer prompt groups in flight than engines leaves engines idle",
        "rollout.max_concurrent_groups",
        "rollout.engines",
    )
    warn(
        rollout.health_check_failure_threshold == 1,
        "one failed probe, and be it a lost connection, retires an engine: 2 tell a fault from "
        "a blip and find a hang no later",
        "rollout.health_check_failure_threshold",
    )
    warn(
        not rollout.journal and debug_mode(rollout) is DebugMode.NONE,
        "without a journal a fault loses samples, and a restart does not continue the history",
        "rollout.journal",
    )
    warn(
        ft.enable and ft.replica_groups == 1,
        "one replica group has no peer to heal from",
        "fault_tolerance.replica_groups",
    )
    warn(
        ft.enable and ft.quorum_retries == 0,
        "without quorum retries the restart of the lighthouse ends every group",
        "fault_tolerance.quorum_retries",
    )
    warn(
        recovery.role_max_restarts == 0,
        "no role is ever restarted",
        "recovery.role_max_restarts",
    )
    warn(
        journaling(rollout)
        and job.resolved.get("checkpoint.interval") > job.resolved.get("training.steps"),
        "the first periodic checkpoint would come after the last step",
        "checkpoint.interval",
        "training.steps",
    )
    for stops, goes_on in cannot_go_on(job):
        warn(
            True,
            "the job stops early, to be started again, and that start is refused: set "
            "--recovery.auto_continue_train for both",
            stops,
            goes_on,
        )
    chaos = job.resolved.sections.chaos
    for key in ("faults", "mtbf_s", "replay"):
        warn(
            bool(getattr(chaos, key)) and not chaos.enable,
            "the faults are not injected",
            f"chaos.{key}",
            "chaos.enable",
        )
    warn(
        bool(chaos.mtbf_faults) and not chaos.mtbf_s,
        "no fault is drawn",
        "chaos.mtbf_faults",
        "chaos.mtbf_s",
    )
    warn(
        bool(job.resolved.get("metrics.save_for_all_ranks")),
        "TensorBoard and W&B are written once for the run, not by ranks",
        "metrics.save_for_all_ranks",
    )
    path = job.resolved.sections.model.hf_assets_path
    warn(
        bool(path) and not job.starting and not job.machine.exists(path),
        "the model directory is not there yet",
        "model.hf_assets_path",
    )
    found.extend(idle_keys(job))
    for path, mode in idle_dumps(job):
        warn(True, f"{path} has no effect in this mode", path, mode)
    return found


def without_effect(job: Job) -> tuple[list[str], list[str]]:
    """Keys that a person set and that do nothing in the chosen mode: refused when they were
    changed, a warning when they repeat the default."""
    problems: list[str] = []
    warnings: list[str] = []
    for path, mode in _idle(job):
        if job.resolved.given(path):
            changed = job.resolved.get(path) != load_schema().find(path).default
            text = job.broken(f"{path} has no effect here", path, mode)
            (problems if changed else warnings).append(text)
    if not job.resolved.sections.fault_tolerance.enable:
        keys = [k for k in load_schema().sections["fault_tolerance"].keys if k != "enable"]
        given = [k for k in keys if job.resolved.given(f"fault_tolerance.{k}")]
        if given:
            # Only a warning: a job is made a plain one by switching the one flag.
            rule = f"without fault tolerance these have no effect: {', '.join(given)}"
            warnings.append(job.broken(rule, "fault_tolerance.enable"))
    if job.resolved.sections.rollout.weight_transport == "disk":
        given = [
            k for k in load_schema().sections["weights"].keys if job.resolved.given(f"weights.{k}")
        ]
        if given:
            rule = f"policies go by way of a disk, so these have no effect: {', '.join(given)}"
            warnings.append(job.broken(rule, "rollout.weight_transport"))
    return problems, warnings


def _idle(job: Job) -> Iterator[tuple[str, str]]:
    """(key without effect, key that makes it so)."""
    sections = job.resolved.sections
    if sections.fault_tolerance.enable and sections.fault_tolerance.semi_sync_method is None:
        for key in SEMI_SYNC_KEYS:
            yield f"fault_tolerance.{key}", "fault_tolerance.semi_sync_method"
    if sections.fault_tolerance.semi_sync_method == "local_sgd":
        yield "fault_tolerance.outer_lr", "fault_tolerance.semi_sync_method"
        yield "fault_tolerance.outer_momentum", "fault_tolerance.semi_sync_method"
    if sections.recovery.standby != "spare":
        yield "recovery.standby_groups", "recovery.standby"
    if sections.rl.mode != "semi_async":
        yield "rl.start_fraction", "rl.mode"
    if sections.rl.kl_coef == 0:
        yield "rl.kl_reference", "rl.kl_coef"
    if not sections.rollout.load_debug_rollout_data:
        yield SUBSAMPLE, LOAD
    policy = job.resolved.get("activation_checkpoint.mode")
    for key, policies in POLICY_KEYS.items():
        if policy not in policies:
            yield f"activation_checkpoint.{key}", "activation_checkpoint.mode"
