"""Rules between the keys of a job. Each problem names its keys, their values and the rule.

All of them need only the resolved values; what needs TorchTitan is in `deep_checks.py`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from torchtitan_rl_ft.config.errors import near_miss
from torchtitan_rl_ft.config.resolve import Resolved
from torchtitan_rl_ft.config.schema import load_schema

SEMI_SYNC_METHODS = ("local_sgd", "diloco")
PROCESS_GROUPS = ("gloo", "nccl")
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


@dataclass(frozen=True)
class Machine:
    """What the rules ask of the machine; tests give their own."""

    has_module: Callable[[str], bool] = lambda name: importlib.util.find_spec(name) is not None
    exists: Callable[[str], bool] = os.path.exists


@dataclass
class Report:
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def check(resolved: Resolved, machine: Machine | None = None) -> Report:
    """Every broken rule, and what is legal but suspicious. Pure but for `machine`."""
    rules = Rules(resolved, machine or Machine())
    report = Report()
    for rule in (
        rules.torchft_installed,
        rules.replica_groups,
        rules.timeouts,
        rules.quorum,
        rules.semi_sync,
        rules.parallelism,
        rules.batch,
        rules.lengths,
        rules.policy_age,
        rules.algorithm,
        rules.serving,
        rules.health_times,
        rules.resumable,
        rules.recovery,
        rules.plug_ins,
        rules.model,
        rules.training,
    ):
        for problem in rule():
            report.problems.append(problem)
    report.warnings += rules.suspicious()
    problems, warnings = rules.without_effect()
    report.problems += problems
    report.warnings += warnings
    return report


@dataclass(frozen=True)
class Rules:
    """One method per subject; each yields what is wrong."""

    resolved: Resolved
    machine: Machine

    # Helpers ----------------------------------------------------------------------------

    def _broken(self, rule: str, *paths: str) -> str:
        """`rule: key = value (origin), key = value (origin)`."""
        return f"{rule}: {', '.join(self.resolved.where(p) for p in paths)}"

    def _positive(self, section: str, *keys: str) -> Iterator[str]:
        for key in keys:
            path = f"{section}.{key}"
            if not self.resolved.get(path) > 0:
                yield self._broken(f"{path} must be positive", path)

    def _not_negative(self, section: str, *keys: str) -> Iterator[str]:
        for key in keys:
            path = f"{section}.{key}"
            if self.resolved.get(path) < 0:
                yield self._broken(f"{path} must not be negative", path)

    # torchft ----------------------------------------------------------------------------

    def torchft_installed(self) -> Iterator[str]:
        if self.resolved.sections.fault_tolerance.enable and not self.machine.has_module("torchft"):
            yield self._broken(
                "torchft is not installed: pip install -r requirements-torchft.txt "
                "(or the extra torchtitan_rl_ft[torchft])",
                "fault_tolerance.enable",
            )

    def replica_groups(self) -> Iterator[str]:
        ft = self.resolved.sections.fault_tolerance
        section = "fault_tolerance"
        yield from self._positive(section, "replica_groups", "ranks_per_group")
        if ft.process_group not in PROCESS_GROUPS:
            hint = near_miss(ft.process_group, PROCESS_GROUPS)
            yield self._broken(
                f"{section}.process_group must be one of {', '.join(PROCESS_GROUPS)}{hint}",
                f"{section}.process_group",
            )
        if not ft.enable:
            if ft.replica_groups > 1:
                yield self._broken(
                    "more than one replica group needs fault tolerance, without it the groups "
                    "would train apart",
                    f"{section}.replica_groups",
                    f"{section}.enable",
                )
            return
        if not 1 <= ft.min_replica_size <= ft.replica_groups:
            yield self._broken(
                "the minimum must be between 1 and the number of replica groups",
                f"{section}.min_replica_size",
                f"{section}.replica_groups",
            )
        if ft.group_size != ft.replica_groups:
            yield self._broken(
                "group_size must equal replica_groups, or be 0 for automatic",
                f"{section}.group_size",
                f"{section}.replica_groups",
            )
        if not 0 <= ft.replica_id < ft.replica_groups:
            yield self._broken(
                "replica ids count from 0 to the number of replica groups minus 1",
                f"{section}.replica_id",
                f"{section}.replica_groups",
            )
        if ft.lighthouse_min_replicas != ft.min_replica_size:
            yield self._broken(
                "the lighthouse's minimum must equal ours: a smaller one lets it form quorums "
                "whose every commit is refused, a larger one stalls groups that may commit",
                f"{section}.lighthouse_min_replicas",
                f"{section}.min_replica_size",
            )

    def timeouts(self) -> Iterator[str]:
        comm = ("init_timeout_seconds", "train_timeout_seconds")
        yield from self._positive("comm", *comm)
        ft = self.resolved.sections.fault_tolerance
        yield from self._positive("fault_tolerance", "process_group_timeout_ms")
        if not ft.enable:
            return
        group_s = ft.process_group_timeout_ms / 1000
        train_s = self.resolved.get("comm.train_timeout_seconds")
        if not group_s < train_s:
            yield self._broken(
                "a lost peer group must be noticed before a collective inside the group gives up: "
                "process_group_timeout_ms must be shorter than train_timeout_seconds",
                "fault_tolerance.process_group_timeout_ms",
                "comm.train_timeout_seconds",
            )
        if not train_s < self.resolved.get("comm.init_timeout_seconds"):
            yield self._broken(
                "start-up takes longer than a step: train_timeout_seconds must be shorter than "
                "init_timeout_seconds",
                "comm.train_timeout_seconds",
                "comm.init_timeout_seconds",
            )

    def quorum(self) -> Iterator[str]:
        ft, section = self.resolved.sections.fault_tolerance, "fault_tolerance"
        yield from self._positive(
            section,
            "heartbeat_interval_ms",
            "heartbeat_timeout_ms",
            "join_timeout_ms",
            "quorum_tick_ms",
            "quorum_timeout_s",
            "connect_timeout_s",
            "manager_timeout_s",
            "max_commit_retries",
        )
        yield from self._not_negative(section, "quorum_retries")
        if not ft.heartbeat_interval_ms < ft.heartbeat_timeout_ms:
            yield self._broken(
                "a group must beat more often than the lighthouse's patience lasts",
                f"{section}.heartbeat_interval_ms",
                f"{section}.heartbeat_timeout_ms",
            )
        if not ft.join_timeout_ms < ft.quorum_timeout_s * 1000:
            yield self._broken(
                "the lighthouse waits join_timeout_ms for stragglers, a group must wait longer",
                f"{section}.join_timeout_ms",
                f"{section}.quorum_timeout_s",
            )

    def semi_sync(self) -> Iterator[str]:
        ft, section = self.resolved.sections.fault_tolerance, "fault_tolerance"
        method = ft.semi_sync_method
        if method is None:
            return
        if method not in SEMI_SYNC_METHODS:
            yield self._broken(
                f"semi_sync_method must be one of {', '.join(SEMI_SYNC_METHODS)} or none"
                f"{near_miss(method, SEMI_SYNC_METHODS)}",
                f"{section}.semi_sync_method",
            )
            return
        if not ft.enable:
            yield self._broken(
                "semi-synchronous training is between replica groups of torchft",
                f"{section}.semi_sync_method",
                f"{section}.enable",
            )
        yield from self._fragments()
        yield self._broken(
            "semi-synchronous training arrives with a later version of this package; leave "
            "semi_sync_method out",
            f"{section}.semi_sync_method",
        )

    def _fragments(self) -> Iterator[str]:
        ft, section = self.resolved.sections.fault_tolerance, "fault_tolerance"
        yield from self._positive(section, "sync_steps", "num_fragments")
        yield from self._not_negative(section, "fragment_sync_delay", "outer_momentum")
        yield from self._positive(section, "outer_lr")
        if not 0 <= ft.fragment_update_alpha <= 1:
            yield self._broken(
                "fragment_update_alpha must be between 0 and 1", f"{section}.fragment_update_alpha"
            )
        named = len(ft.module_fqns_per_model_fragment)
        if named and ft.num_fragments not in (1, named):
            yield self._broken(
                "num_fragments must be the number of fragments that are named",
                f"{section}.num_fragments",
                f"{section}.module_fqns_per_model_fragment",
            )
        fragments_key = "module_fqns_per_model_fragment" if named else "num_fragments"
        fragments = named or ft.num_fragments
        if ft.sync_steps < 1 or fragments < 1:
            return
        if ft.sync_steps % fragments:
            yield self._broken(
                "sync_steps must be a multiple of the number of fragments, one is synced after "
                "the other",
                f"{section}.sync_steps",
                f"{section}.{fragments_key}",
            )
        elif ft.fragment_sync_delay >= ft.sync_steps // fragments:
            yield self._broken(
                "fragment_sync_delay must be shorter than the period of one fragment "
                f"(sync_steps / fragments = {ft.sync_steps // fragments})",
                f"{section}.fragment_sync_delay",
                f"{section}.sync_steps",
                f"{section}.{fragments_key}",
            )

    # Sizes ------------------------------------------------------------------------------

    def parallelism(self) -> Iterator[str]:
        get, ft = self.resolved.get, self.resolved.sections.fault_tolerance
        degrees = [
            f"parallelism.{name}"
            for name in (
                "data_parallel_replicate_degree",
                "context_parallel_degree",
                "tensor_parallel_degree",
                "pipeline_parallel_degree",
            )
        ]
        shard = "parallelism.data_parallel_shard_degree"
        wrong = [path for path in degrees if get(path) < 1]
        if wrong or (get(shard) < 1 and get(shard) != -1):
            for path in wrong or [shard]:
                yield self._broken(f"{path} must be positive", path)
            return
        if ft.enable and get("parallelism.data_parallel_replicate_degree") > 1:
            yield self._broken(
                "replicas are torchft's replica groups; inside a group parameters are sharded",
                "parallelism.data_parallel_replicate_degree",
                "fault_tolerance.enable",
            )
        others = 1
        for path in degrees:
            others *= get(path)
        fits = ft.ranks_per_group % others == 0 if get(shard) == -1 else others * get(shard)
        if fits is False or (fits is not True and fits != ft.ranks_per_group):
            used = [path for path in degrees if get(path) > 1]
            yield self._broken(
                "the parallel degrees must multiply to the ranks of a group",
                "fault_tolerance.ranks_per_group",
                *used,
                shard,
            )
        divisor = self._sequence_divisor()
        if get("training.seq_len") % divisor:
            yield self._broken(
                f"sequence and context parallelism split a row into {divisor} equal parts",
                "training.seq_len",
                "parallelism.tensor_parallel_degree",
                "parallelism.context_parallel_degree",
            )

    def _sequence_divisor(self) -> int:
        get = self.resolved.get
        tensor = get("parallelism.tensor_parallel_degree")
        context = get("parallelism.context_parallel_degree")
        sequence = tensor if get("parallelism.enable_sequence_parallel") else 1
        return sequence * (2 * context if context > 1 else 1)

    def shards(self) -> int:
        """Parts into which a batch is split: replica groups times data-parallel ranks."""
        get, ft = self.resolved.get, self.resolved.sections.fault_tolerance
        model_parallel = (
            get("parallelism.context_parallel_degree")
            * get("parallelism.tensor_parallel_degree")
            * get("parallelism.pipeline_parallel_degree")
        )
        return ft.replica_groups * max(1, ft.ranks_per_group // max(1, model_parallel))

    def batch(self) -> Iterator[str]:
        rl = self.resolved.sections.rl
        yield from self._positive("rl", "groups_per_step", "samples_per_prompt")
        yield from self._positive("training", "local_batch_size", "steps", "seq_len")
        samples = rl.groups_per_step * rl.samples_per_prompt
        shards = self.shards()
        if samples < 1 or shards < 1:
            return
        if samples % shards:
            down = samples // shards * shards
            nearest = " or ".join(str(n) for n in (down, down + shards) if n)
            yield self._broken(
                f"a batch of {samples} samples cannot be split evenly over {shards} data-parallel "
                f"parts (replica groups x ranks that share a batch); {nearest} samples can",
                "rl.groups_per_step",
                "rl.samples_per_prompt",
                "fault_tolerance.replica_groups",
                "fault_tolerance.ranks_per_group",
            )
        if self.resolved.get("training.global_batch_size") not in (-1, samples):
            yield self._broken(
                f"a batch holds groups_per_step x samples_per_prompt = {samples} samples: leave "
                "global_batch_size out",
                "training.global_batch_size",
                "rl.groups_per_step",
                "rl.samples_per_prompt",
            )

    def lengths(self) -> Iterator[str]:
        rollout = self.resolved.sections.rollout
        yield from self._positive("rollout", "max_prompt_tokens", "max_response_tokens")
        if rollout.max_prompt_tokens + rollout.max_response_tokens > self.resolved.get(
            "training.seq_len"
        ):
            yield self._broken(
                "the longest prompt and answer together must fit into a row of seq_len tokens",
                "rollout.max_prompt_tokens",
                "rollout.max_response_tokens",
                "training.seq_len",
            )

    # The algorithm ----------------------------------------------------------------------

    def policy_age(self) -> Iterator[str]:
        rl = self.resolved.sections.rl
        yield from self._not_negative("rl", "max_policy_age")
        if rl.mode != "sync" and rl.max_policy_age == 0:
            yield self._broken(
                f"mode {rl.mode!r} rolls out the next batch while the last is trained, so its "
                "samples are at least one version old: max_policy_age must be at least 1",
                "rl.mode",
                "rl.max_policy_age",
            )
        if not 0 <= rl.start_fraction <= 1:
            yield self._broken("start_fraction must be between 0 and 1", "rl.start_fraction")

    def algorithm(self) -> Iterator[str]:
        rl = self.resolved.sections.rl
        yield from self._not_negative("rl", "kl_coef", "eval_prompts", "clip_ratio_high")
        yield from self._positive("rl", "ratio_cap", "max_prompt_failures")
        if not 0 <= rl.clip_ratio_low < 1:
            yield self._broken(
                "clip_ratio_low must be at least 0 and below 1: the ratio is kept above "
                "1 - clip_ratio_low",
                "rl.clip_ratio_low",
            )
        if rl.ratio_cap < 1 + rl.clip_ratio_high and rl.loss == "grpo":
            yield self._broken(
                "the ratio is clipped at 1 + clip_ratio_high, a lower ratio_cap would move it",
                "rl.ratio_cap",
                "rl.clip_ratio_high",
            )

    # Serving ----------------------------------------------------------------------------

    def serving(self) -> Iterator[str]:
        rollout = self.resolved.sections.rollout
        yield from self._positive(
            "rollout",
            "engines",
            "engine_start_timeout_s",
            "engine_restart_window_s",
            "request_timeout_s",
            "install_timeout_s",
            "publish_buffer_mb",
            "max_concurrent_groups",
        )
        yield from self._not_negative("rollout", "engine_max_restarts", "temperature")
        if not 1 <= rollout.min_engines <= rollout.engines:
            yield self._broken(
                "the minimum must be between 1 and the number of engines",
                "rollout.min_engines",
                "rollout.engines",
            )
        if not 0 < rollout.top_p <= 1:
            yield self._broken("top_p must be above 0 and at most 1", "rollout.top_p")
        if not (rollout.top_k == -1 or rollout.top_k >= 1):
            yield self._broken("top_k must be -1 (all) or at least 1", "rollout.top_k")
        if rollout.engine_python and not self.machine.exists(rollout.engine_python):
            yield self._broken("there is no such interpreter", "rollout.engine_python")
        for argument in rollout.engine_args:
            if argument.partition("=")[0] in ("--api-key", "--admin-api-key"):
                yield (
                    f"rollout.engine_args holds {argument.partition('=')[0]}: no secret belongs "
                    "into a configuration file; engines take the run's token by themselves"
                )

    def health_times(self) -> Iterator[str]:
        yield from self._not_negative("rollout", "health_check_first_wait")
        yield from self._positive(
            "rollout", "health_check_interval", "health_check_timeout", "cleanup_timeout"
        )

    # Recovery ---------------------------------------------------------------------------

    def resumable(self) -> Iterator[str]:
        """A journal is worth keeping only beside checkpoints that can be gone on with."""
        if not self.resolved.sections.rollout.journal:
            return
        for path, wanted, why in (
            ("checkpoint.enable", True, "a journal needs checkpoints to go back to"),
            ("checkpoint.load_only", False, "a journal needs checkpoints to go back to"),
            (
                "checkpoint.create_seed_checkpoint",
                False,
                "a seed checkpoint is made by a job of its own",
            ),
        ):
            if self.resolved.get(path) is not wanted:
                yield self._broken(why, path, "rollout.journal")
        excluded = self.resolved.get("checkpoint.exclude_from_loading")
        for name in ("optimizer", "lr_scheduler", "train_state", "dataloader"):
            if name in excluded:
                yield self._broken(
                    f"a checkpoint that is loaded without {name!r} does not continue the journal",
                    "checkpoint.exclude_from_loading",
                    "rollout.journal",
                )
        for key in ("save_debug_rollout_data", "load_debug_rollout_data"):
            path = f"rollout.{key}"
            if self.resolved.get(path) and "{rollout_id}" not in self.resolved.get(path):
                yield self._broken("the template of dump files must contain {rollout_id}", path)

    def recovery(self) -> Iterator[str]:
        recovery = self.resolved.sections.recovery
        yield from self._not_negative("recovery", "role_max_restarts")
        yield from self._positive(
            "recovery", "role_restart_window_s", "batch_wait_timeout_s", "max_numeric_refusals"
        )
        if recovery.exit_on_missing_checkpoint and not recovery.auto_continue_train:
            yield self._broken(
                "exit_on_missing_checkpoint is about resuming, which is off",
                "recovery.exit_on_missing_checkpoint",
                "recovery.auto_continue_train",
            )

    # Plug-ins, model, training ----------------------------------------------------------

    def plug_ins(self) -> Iterator[str]:
        for key in ("data_source", "reward", "filter"):
            path = f"rl.{key}"
            value = self.resolved.get(path)
            if not value and key == "filter":
                continue
            module, _, name = value.partition(":")
            if not module or not name.isidentifier():
                yield self._broken(f"{path} must be written module:name", path)

    def model(self) -> Iterator[str]:
        model = self.resolved.sections.model
        if model.flavor == "hf" and not model.hf_assets_path:
            yield self._broken(
                'flavor "hf" is read from a directory', "model.flavor", "model.hf_assets_path"
            )

    def training(self) -> Iterator[str]:
        yield from self._positive("optimizer", "lr", "eps")
        yield from self._not_negative("optimizer", "weight_decay")
        yield from self._not_negative("lr_scheduler", "warmup_steps")
        for key in ("beta1", "beta2"):
            path = f"optimizer.{key}"
            if not 0 <= self.resolved.get(path) < 1:
                yield self._broken(f"{path} must be at least 0 and below 1", path)
        flat = [f"optimizer.{k}" for k in ("name", "lr", "beta1", "beta2", "eps", "weight_decay")]
        given = [path for path in flat if self.resolved.given(path)]
        groups = self.resolved.get("optimizer.param_groups")
        if given and len(groups) > 1:
            yield self._broken(
                "one value cannot stand for several parameter groups; write it into the groups",
                given[0],
                "optimizer.param_groups",
            )

    # Legal but suspicious ---------------------------------------------------------------

    def suspicious(self) -> list[str]:
        rl, rollout = self.resolved.sections.rl, self.resolved.sections.rollout
        ft, recovery = self.resolved.sections.fault_tolerance, self.resolved.sections.recovery
        found: list[str] = []

        def warn(condition: bool, message: str, *paths: str) -> None:
            if condition:
                found.append(self._broken(message, *paths))

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
            not rollout.journal,
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
            rollout.journal
            and self.resolved.get("checkpoint.interval") > self.resolved.get("training.steps"),
            "the first periodic checkpoint would come after the last step",
            "checkpoint.interval",
            "training.steps",
        )
        path = self.resolved.sections.model.hf_assets_path
        warn(
            bool(path) and not self.machine.exists(str(Path(path) / "config.json")),
            "the model directory is not there yet (no config.json)",
            "model.hf_assets_path",
        )
        return found

    def without_effect(self) -> tuple[list[str], list[str]]:
        """Keys that a person set and that do nothing in the chosen mode: refused when they were
        changed, a warning when they repeat the default."""
        sections = self.resolved.sections
        rl, ft = sections.rl, sections.fault_tolerance
        policy = self.resolved.get("activation_checkpoint.mode")
        idle: list[tuple[str, str]] = []
        if ft.semi_sync_method is None:
            idle += [(f"fault_tolerance.{k}", "semi_sync_method") for k in SEMI_SYNC_KEYS]
            idle = [(key, "fault_tolerance.semi_sync_method") for key, _ in idle]
        if rl.mode != "semi_async":
            idle.append(("rl.start_fraction", "rl.mode"))
        if rl.kl_coef == 0:
            idle.append(("rl.kl_reference", "rl.kl_coef"))
        for key, policies in {
            "force_recompute_mm_shapes_by_fqns": ("selective",),
            "memory_budget": ("memory_budget",),
            "visualize_memory_budget_pareto": ("memory_budget",),
            "preserve_rng_state": ("selective", "full"),
            "determinism_check": ("selective", "full"),
            "debug": ("selective", "full"),
        }.items():
            if policy not in policies:
                idle.append((f"activation_checkpoint.{key}", "activation_checkpoint.mode"))
        problems: list[str] = []
        warnings: list[str] = []
        schema = load_schema()
        for path, mode in idle:
            if self.resolved.given(path):
                changed = self.resolved.get(path) != schema.find(path).default
                text = self._broken(f"{path} has no effect here", path, mode)
                (problems if changed else warnings).append(text)
        return problems, warnings
