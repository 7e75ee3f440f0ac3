"""Sections and keys of TorchTitan, mostly of 0.2, that mean nothing here, and what does instead."""

from __future__ import annotations

_QUANTIZE = "quantized training is set up in a registry function (a converter of the model)"
_PROMPTS = "prompts come from rl.data_source"
_LOADER = "batches come from the journal, there is no data loader to set"

RETIRED: dict[str, str] = {
    "experimental": "name a module of your own with job.module and job.config",
    "validation": "held-out prompts are answered greedily at the end (rl.eval_prompts)",
    "validator": "held-out prompts are answered greedily at the end (rl.eval_prompts)",
    "memory_estimation": "it has no counterpart in TorchTitan 0.3",
    "float8": _QUANTIZE,
    "mx": _QUANTIZE,
    "quantize": _QUANTIZE,
    "override": "TorchTitan's fault-tolerant trainer ignores overrides; use a registry function",
    "dataloader": _LOADER,
    "job.print_config": "now debug.print_config",
    "job.save_config_file": "now debug.save_config_file",
    "job.custom_config_module": "name a module of your own with job.module and job.config",
    "model.tokenizer_path": "now model.hf_assets_path",
    "model.converters": _QUANTIZE,
    "model.print_after_conversion": _QUANTIZE,
    "optimizer.early_step_in_backward": "it has no counterpart in TorchTitan 0.3",
    "training.dataset": _PROMPTS,
    "training.dataset_path": _PROMPTS,
    "training.dataloader": _LOADER,
    "training.seed": "now debug.seed",
    "training.deterministic": "now debug.deterministic",
    "parallelism.disable_loss_parallel": "it has no counterpart in TorchTitan 0.3",
    "parallelism.enable_async_tensor_parallel": "now compile.enable_async_tensor_parallel",
    "parallelism.enable_compiled_autograd": "it has no counterpart in TorchTitan 0.3",
    "parallelism.pipeline_parallel_split_points": "now parallelism.module_fqns_per_model_part",
    "parallelism.pipeline_parallel_expert_parallel_overlap": "it has no counterpart in 0.3",
    "parallelism.context_parallel_rotate_method": "it has no counterpart in TorchTitan 0.3",
    "parallelism.expert_tensor_parallel_degree": "it has no counterpart in TorchTitan 0.3",
    "parallelism.expert_parallel_comm_backend": "it has no counterpart in TorchTitan 0.3",
    "activation_checkpoint.selective_ac_option": (
        "selective is always per operator in 0.3; leave the key out"
    ),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": (
        "now activation_checkpoint.force_recompute_mm_shapes_by_fqns"
    ),
    "activation_checkpoint.early_stop": "it has no counterpart in TorchTitan 0.3",
    "checkpoint.enable_ft_dataloader_checkpoints": (
        "the journal owns the one data cursor; a checkpoint commits it"
    ),
    "checkpoint.model_weights_only": "now checkpoint.last_save_model_only",
}


def retired(path: str) -> str | None:
    """What to do instead of a retired section or `section.key`; None when it is none of them."""
    section = path.partition(".")[0]
    if section in RETIRED:
        return f"TorchTitan's [{section}] is not understood here: {RETIRED[section]}"
    if path in RETIRED:
        return f"TorchTitan's {path} is not understood here: {RETIRED[path]}"
    return None
