"""The TorchTitan model of a job, from an HF `config.json` or from TorchTitan's registry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.qwen3 import (
    _EMBEDDING_INIT,
    _EMBEDDING_SKIP_INIT,
    _LINEAR_INIT,
    Qwen3Model,
    _build_qwen3_layers,
    _qwen3_norm,
    parallelize_qwen3,
)
from torchtitan.models.qwen3 import model_registry as qwen3_registry
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_rl_ft.platform import torchtitan_cpu


class ModelConfigError(ValueError):
    """The model directory or flavor cannot be trained."""


def read_hf_config(hf_assets_path: str | Path) -> dict[str, Any]:
    """Raises ModelConfigError."""
    path = Path(hf_assets_path) / "config.json"
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelConfigError(
            f"{path} does not exist: not a Hugging Face model directory"
        ) from None
    except ValueError as e:
        raise ModelConfigError(f"{path} is not JSON: {e}") from None


def rope_theta(hf: dict[str, Any]) -> float:
    """transformers 5 has it in `rope_parameters`. A wrong theta loads silently: it is required."""
    theta = hf.get("rope_theta") or hf.get("rope_parameters", {}).get("rope_theta")
    if theta is None:
        raise ModelConfigError("config.json names no rope_theta")
    return float(theta)


def qwen3_from_hf(hf: dict[str, Any]) -> Qwen3Model.Config:
    """Dense Qwen3 as its HF config describes it. Raises ModelConfigError."""
    if hf.get("model_type") != "qwen3":
        raise ModelConfigError(
            f"model_type {hf.get('model_type')!r} is not supported, only 'qwen3'"
        )
    try:
        dim, layers, heads = hf["hidden_size"], hf["num_hidden_layers"], hf["num_attention_heads"]
        vocab, hidden = hf["vocab_size"], hf["intermediate_size"]
    except KeyError as e:
        raise ModelConfigError(f"config.json lacks {e}") from None
    if abs(hf.get("rms_norm_eps", 1e-6) - 1e-6) > 1e-12:
        raise ModelConfigError(f"rms_norm_eps {hf['rms_norm_eps']} differs from TorchTitan's 1e-6")
    head_dim = hf.get("head_dim") or dim // heads
    tied = bool(hf.get("tie_word_embeddings", False))
    config = Qwen3Model.Config(
        vocab_size=vocab,
        dim=dim,
        norm=_qwen3_norm(dim),
        enable_weight_tying=tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocab,
            embedding_dim=dim,
            param_init=_EMBEDDING_SKIP_INIT if tied else _EMBEDDING_INIT,
        ),
        lm_head=Linear.Config(in_features=dim, out_features=vocab, param_init=_LINEAR_INIT),
        layers=_build_qwen3_layers(
            n_layers=layers,
            dim=dim,
            n_heads=heads,
            n_kv_heads=hf.get("num_key_value_heads", heads),
            head_dim=head_dim,
            hidden_dim=hidden,
            # Fused QKV deadlocks the first sync of a sharded replica group.
            fuse_qkv=False,
            attn_backend="flex",
            rope=CosSinRoPE.Config(
                dim=head_dim,
                max_seq_len=hf.get("max_position_embeddings", 4096),
                theta=rope_theta(hf),
            ),
        ),
    )
    for layer in config.layers:
        layer.attention.inner_attention = torchtitan_cpu.attention_config()
    return config


def build_model_spec(name: str, flavor: str, hf_assets_path: str) -> ModelSpec:
    """The model of `[model] name/flavor/hf_assets_path`. Raises ModelConfigError.

    "tiny" and "hf" are read from the directory. A registry flavor is used as TorchTitan has it
    when there is no directory (a check before the weights are there); where there is one, the
    directory describes the model, and must agree with the flavor in size.
    """
    if name != "qwen3":
        raise ModelConfigError(f"model.name {name!r} is not supported, only 'qwen3'")
    directory = Path(hf_assets_path) if hf_assets_path else None
    if directory is not None and (directory / "config.json").exists():
        model = qwen3_from_hf(read_hf_config(directory))
        if flavor not in ("tiny", "hf"):
            _require_same_size(model, _registry_model(flavor), flavor, directory)
    elif flavor in ("tiny", "hf"):
        raise ModelConfigError(
            f"model.flavor {flavor!r} is read from model.hf_assets_path, and "
            f"{hf_assets_path or '(empty)'!r} holds no config.json"
        )
    else:
        model = _registry_model(flavor)
    return ModelSpec(
        name="qwen3",
        flavor=flavor,
        model=model,
        parallelize_fn=parallelize_qwen3,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=Qwen3StateDictAdapter,
    )


def _registry_model(flavor: str) -> Qwen3Model.Config:
    try:
        config = qwen3_registry(flavor, attn_backend="flex").model
    except (KeyError, ValueError) as e:
        raise ModelConfigError(
            f"model.flavor {flavor!r}: TorchTitan's qwen3 has no such flavor ({e})"
        ) from None
    assert isinstance(config, Qwen3Model.Config)
    return config


def _require_same_size(
    ours: Qwen3Model.Config, stock: Qwen3Model.Config, flavor: str, directory: Path
) -> None:
    for field in ("dim", "vocab_size"):
        if getattr(ours, field) != getattr(stock, field):
            raise ModelConfigError(
                f"model.flavor {flavor!r} has {field} {getattr(stock, field)}, but "
                f"{directory}/config.json has {getattr(ours, field)}"
            )
    if len(ours.layers) != len(stock.layers):
        raise ModelConfigError(
            f"model.flavor {flavor!r} has {len(stock.layers)} layers, but {directory}/config.json "
            f"has {len(ours.layers)}"
        )
