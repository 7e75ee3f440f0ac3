"""What a checkpoint says of the trainers that wrote it: their layout and their model."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from torchtitan.distributed import ParallelDims

from torchtitan_rl_ft.trainer.model_spec import read_hf_config

if TYPE_CHECKING:
    from torchtitan_rl_ft.trainer.rl_trainer import RLFaultTolerantTrainer

# Of the files and of the library that wrote them, not of the model.
_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")


def group_layout(
    config: RLFaultTolerantTrainer.Config, parallel_dims: ParallelDims
) -> dict[str, int]:
    """Degrees of a replica group, number of groups and rows of a micro-batch, by name."""
    return {
        "dp_replicate": parallel_dims.dp_replicate,
        "dp_shard": parallel_dims.dp_shard,
        "cp": parallel_dims.cp,
        "tp": parallel_dims.tp,
        "pp": parallel_dims.pp,
        "ep": parallel_dims.ep,
        "replica_groups": config.fault_tolerance.replica_groups,
        "local_batch_size": config.training.local_batch_size,
    }


def model_identity(config: RLFaultTolerantTrainer.Config) -> str:
    """A digest of the model's architecture. Raises ModelConfigError."""
    assert config.model_spec is not None
    hf = read_hf_config(config.hf_assets_path)
    told = {k: v for k, v in hf.items() if k not in _NOT_THE_MODEL}
    text = json.dumps([config.model_spec.name, config.model_spec.flavor, told], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
