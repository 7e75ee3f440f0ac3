"""The frozen reference policy of the KL term."""

from __future__ import annotations

import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpoint import ModelWrapper
from torchtitan.components.loss import compute_logprobs
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import SpmdContext
from torchtitan.protocols import BaseModel
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter
from torchtitan.trainer import Trainer

from torchtitan_rl_ft.platform import torchtitan_cpu
from torchtitan_rl_ft.trainer.rows import REFERENCE_LOGPROB, TARGET, MicroBatch


def load_hf_weights(
    model_parts: list[torch.nn.Module], adapter: BaseStateDictAdapter, directory: str
) -> None:
    """Load a Hugging Face directory in place. Raises OSError, CheckpointException."""
    model = ModelWrapper(model_parts)
    weights = adapter.to_hf(model.state_dict())
    dcp.load(weights, storage_reader=adapter.get_hf_storage_reader(directory))
    model.load_state_dict(adapter.from_hf(weights))


def build_reference(
    config: Trainer.Config,
    model_config: BaseModel.Config,
    parallel_dims: ParallelDims,
    device: torch.device,
) -> torch.nn.Module:
    """A second model, sharded like the trained one, without weights yet."""
    spec = config.model_spec
    assert spec is not None
    with torch.device("meta"):
        model = model_config.build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=parallel_dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=None,
        dump_folder=config.dump_folder,
    )
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_states(buffer_device=None)
    torchtitan_cpu.prepare_model([model])
    return model


class ReferencePolicy:
    """Fills in the log-probs of a frozen model, one micro-batch at a time."""

    def __init__(self, model: torch.nn.Module, context: SpmdContext) -> None:
        self._model = model.eval().requires_grad_(False)
        self._context = context

    @torch.no_grad()
    def fill(self, rows: MicroBatch) -> torch.Tensor:
        """`rows.labels_BSC` with the reference channel set, on the device of the model."""
        device = next(self._model.parameters()).device
        labels = rows.labels_BSC.to(device)
        with self._context():
            logits = self._model(rows.input_BS.to(device), positions=rows.positions_BS.to(device))
            logprobs = compute_logprobs(logits, labels[..., TARGET].long())
        assert isinstance(logprobs, torch.Tensor)
        labels[..., REFERENCE_LOGPROB] = logprobs
        return labels
