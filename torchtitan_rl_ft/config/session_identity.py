"""Which serving session a job belongs to, and what a job that goes on with it may change.

Both are pure functions of the resolved configuration. The id must not depend on how the trainer is
laid out, and engines that were kept must be the ones that the new configuration would start; so
the identity is a short list in a fixed order, and changes are allowed by list: a key that nobody
has thought of is frozen.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torchtitan_rl_ft.config.debug_mode import DebugMode, debug_mode
from torchtitan_rl_ft.config.sections import Sections
from torchtitan_rl_ft.run_folder import RunFolder

MUTABLE_SECTIONS = frozenset(
    {
        "activation_checkpoint",
        "chaos",
        "comm",
        "compile",
        "job",
        "metrics",
        "observability",
        "otel",
        "parallelism",
        "profiling",
        "recovery",
    }
)
"""Sections that may change as a whole: layout, recompute, limits and sinks of trainers."""

MUTABLE_KEYS = frozenset(
    {
        # Length of the run, micro-batches and memory of the trainer. The global batch is frozen.
        "training.steps",
        "training.local_batch_size",
        "training.seq_len",
        "training.enable_cpu_offload",
        "training.disable_cuda_graphs",
        "training.gc_freq",
        "training.gc_debug",
        # When and where checkpoints are saved; not what the run started from.
        "checkpoint.enable",
        "checkpoint.folder",
        "checkpoint.interval",
        "checkpoint.last_save_model_only",
        "checkpoint.last_save_in_hf",
        "checkpoint.export_dtype",
        "checkpoint.keep_latest_k",
        "checkpoint.load_step",
        "checkpoint.enable_first_step_checkpoint",
        "checkpoint.async_mode",
        "debug.detect_anomaly",
        "debug.enable_structured_logging",
        "debug.print_config",
        "debug.save_config_file",
        "debug.spmd_typechecking",
        # Number and limits of replica groups; not the semi-sync algorithm.
        "fault_tolerance.enable",
        "fault_tolerance.process_group",
        "fault_tolerance.process_group_timeout_ms",
        "fault_tolerance.replica_id",
        "fault_tolerance.group_size",
        "fault_tolerance.min_replica_size",
        "fault_tolerance.replica_groups",
        "fault_tolerance.ranks_per_group",
        "fault_tolerance.heartbeat_interval_ms",
        "fault_tolerance.heartbeat_timeout_ms",
        "fault_tolerance.join_timeout_ms",
        "fault_tolerance.quorum_tick_ms",
        "fault_tolerance.lighthouse_min_replicas",
        "fault_tolerance.quorum_timeout_s",
        "fault_tolerance.quorum_retries",
        "fault_tolerance.connect_timeout_s",
        "fault_tolerance.manager_timeout_s",
        "fault_tolerance.max_commit_retries",
        # Health times, the session's own keys, the trainer's publish buffer. Engines are the same
        # ones, however weights come to them.
        "rollout.use_fault_tolerance",
        "rollout.health_check_first_wait",
        "rollout.health_check_interval",
        "rollout.health_check_timeout",
        "rollout.health_check_failure_threshold",
        "rollout.cleanup_timeout",
        "rollout.session_id",
        "rollout.retain_ttl",
        "rollout.keep_serving",
        "rollout.publish_buffer_mb",
        "rollout.weight_transport",
    }
)

PATH_KEYS = frozenset(
    {
        "model.hf_assets_path",
        "rl.kl_reference",
        "rollout.data_dir",
    }
)
"""Compared as absolute paths."""

_HASHED_SECTIONS = ("model", "rl", "rollout")


class Job(Protocol):
    """What of `config.resolve.Resolved` is looked at."""

    @property
    def values(self) -> Mapping[str, Mapping[str, Any]]: ...

    @property
    def sections(self) -> Sections: ...

    @property
    def run_folder(self) -> RunFolder: ...

    def get(self, path: str) -> Any: ...

    def given(self, path: str) -> bool: ...


@dataclass(frozen=True)
class Identity:
    """A session's name, fit for a folder, and the rule that gave it."""

    id: str
    rule: str


def identify(job: Job) -> Identity:
    """The first rule that applies, in the order of docs/architecture.md. A debug mode has a
    session of its own: the one beside it is none of its business."""
    found = _first_rule(job)
    mode = debug_mode(job.sections.rollout)
    if mode is DebugMode.NONE:
        return found
    return Identity(f"{found.id}.{mode}", f"{found.rule}; rollout.debug_mode")


def _first_rule(job: Job) -> Identity:
    rollout = job.sections.rollout
    if rollout.session_id:
        return Identity(rollout.session_id, "rollout.session_id")
    if rollout.data_dir and job.given("rollout.data_dir"):
        folder = _absolute(rollout.data_dir)
        if not rollout.queue_run_id:
            return _named("data", "rollout.data_dir", folder)
        text = f"{folder}, {rollout.queue_run_id}"
        return _named("data", "rollout.data_dir, rollout.queue_run_id", text)
    if rollout.save_debug_rollout_data:
        template = _absolute(str(job.run_folder.path / rollout.save_debug_rollout_data))
        return _named("dump", "rollout.save_debug_rollout_data", template)
    if job.get("checkpoint.enable"):
        folder = job.run_folder.path / str(job.get("checkpoint.folder"))
        return _named("checkpoint", "checkpoint folder", _absolute(str(folder)))
    hashed = {k: v for k, v in frozen(job).items() if k.partition(".")[0] in _HASHED_SECTIONS}
    digest = hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()[:16]
    return Identity(f"config-{digest}", "hash of model and rollout configuration")


def _named(kind: str, rule: str, text: str) -> Identity:
    digest = hashlib.sha256(f"{kind}|{text}".encode()).hexdigest()[:16]
    return Identity(f"{kind}-{digest}", f"{rule}: {text}")


def _absolute(path: str) -> str:
    return os.path.realpath(os.path.expanduser(path))


def frozen(job: Job) -> dict[str, Any]:
    """ "section.key" -> value of everything that a job which takes over the session must keep."""
    found = {}
    for section, keys in job.values.items():
        if section in MUTABLE_SECTIONS:
            continue
        for key, value in keys.items():
            path = f"{section}.{key}"
            if path not in MUTABLE_KEYS:
                found[path] = _absolute(value) if path in PATH_KEYS and value else value
    return found


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """One text for each frozen key that is not the same in both, added and removed ones too."""
    texts = []
    for path in sorted(old.keys() | new.keys()):
        if path not in new:
            texts.append(f"{path} was {_shown(old[path])} and is gone")
        elif path not in old:
            texts.append(f"{path} = {_shown(new[path])} is new")
        elif old[path] != new[path]:
            texts.append(f"{path} was {_shown(old[path])}, is {_shown(new[path])}")
    return texts


def _shown(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
