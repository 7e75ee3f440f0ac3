"""A tiny random Qwen3 in Hugging Face format: the model of the default task.

Everything is a pure function of (seed, spec): the same call gives the same bytes on every
machine, so replica groups and engines that start from it start equal.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from torchtitan_rl_ft.run_folder import fsync_dir

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
ALPHABET = (PAD, BOS, EOS, *"0123456789", ">", "+", " ")
"""Tokens in order of their ids: 16, so that tensor parallelism divides them."""


@dataclass(frozen=True, kw_only=True)
class TinySpec:
    """Shape of the model. Vocabulary, hidden size and heads divide by 2 and 4 (heads by 2), so
    that FSDP and tensor parallelism over 2 ranks need no padding."""

    hidden_size: int = 64
    intermediate_size: int = 192
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    rope_theta: float = 10000.0
    max_positions: int = 512
    init_std: float = 0.1
    """Standard deviation of embeddings and projections; those that write into the residual
    stream are scaled by 1 / sqrt(2 * layers) (GPT-2, Radford et al. 2019, section 2.3)."""

    tie_word_embeddings: bool = False
    """Tied weights exclude pipeline parallelism and split badly into semi-sync fragments."""


def make_tiny_model(path: str | Path, seed: int, spec: TinySpec | None = None) -> Path:
    """Write the model directory at `path`, whole or not at all, and return the path.

    A directory that already holds this very model is left alone. Raises FileExistsError when
    `path` holds anything else, OSError when it cannot be written.
    """
    path = Path(path)
    files = tiny_model_files(seed, spec or TinySpec())
    if path.exists():
        _require_same(path, files)
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        for name, data in files.items():
            with open(temp / name, "wb") as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
        temp.chmod(0o755)
        fsync_dir(temp)
        try:
            temp.rename(path)
        except OSError:
            if not path.exists():
                raise
            _require_same(path, files)  # another process was first
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    fsync_dir(path.parent)
    return path


def tiny_model_files(seed: int, spec: TinySpec) -> dict[str, bytes]:
    """File name -> bytes of the whole directory."""
    return {
        "config.json": _json(_config(spec)),
        "generation_config.json": _json(
            {
                "bos_token_id": ALPHABET.index(BOS),
                "eos_token_id": ALPHABET.index(EOS),
                "pad_token_id": ALPHABET.index(PAD),
                "do_sample": True,
            }
        ),
        "tokenizer.json": tiny_tokenizer().to_str(pretty=True).encode(),
        "tokenizer_config.json": _json(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": BOS,
                "eos_token": EOS,
                "pad_token": PAD,
                "clean_up_tokenization_spaces": False,
                "model_max_length": spec.max_positions,
            }
        ),
        "model.safetensors": save(dict(_tensors(seed, spec)), metadata={"format": "pt"}),
    }


def tiny_tokenizer() -> Tokenizer:
    """One token per character of ALPHABET; the first three are special."""
    model = WordLevel({token: i for i, token in enumerate(ALPHABET)}, unk_token=PAD)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = Split(Regex("."), behavior="isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (PAD, BOS, EOS)]
    )
    return tokenizer


def _config(spec: TinySpec) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(ALPHABET),
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": spec.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": spec.layers,
        "initializer_range": spec.init_std,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "torch_dtype": "float32",
        "bos_token_id": ALPHABET.index(BOS),
        "eos_token_id": ALPHABET.index(EOS),
        "pad_token_id": ALPHABET.index(PAD),
    }


def _tensors(seed: int, spec: TinySpec) -> Iterator[tuple[str, np.ndarray]]:
    """(name, float32 array) of every parameter; linear weights are [out_features, in_features]."""
    rng = np.random.default_rng(seed)
    hidden, inner, vocab = spec.hidden_size, spec.intermediate_size, len(ALPHABET)
    q_size, kv_size = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    residual_std = spec.init_std / math.sqrt(2 * spec.layers)

    def normal(rows: int, columns: int, std: float = spec.init_std) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * std).astype(np.float32)

    def ones(size: int) -> np.ndarray:
        return np.ones(size, np.float32)

    yield "model.embed_tokens.weight", normal(vocab, hidden)
    for i in range(spec.layers):
        at = f"model.layers.{i}"
        yield f"{at}.input_layernorm.weight", ones(hidden)
        yield f"{at}.self_attn.q_proj.weight", normal(q_size, hidden)
        yield f"{at}.self_attn.k_proj.weight", normal(kv_size, hidden)
        yield f"{at}.self_attn.v_proj.weight", normal(kv_size, hidden)
        yield f"{at}.self_attn.q_norm.weight", ones(spec.head_dim)
        yield f"{at}.self_attn.k_norm.weight", ones(spec.head_dim)
        yield f"{at}.self_attn.o_proj.weight", normal(hidden, q_size, residual_std)
        yield f"{at}.post_attention_layernorm.weight", ones(hidden)
        yield f"{at}.mlp.gate_proj.weight", normal(inner, hidden)
        yield f"{at}.mlp.up_proj.weight", normal(inner, hidden)
        yield f"{at}.mlp.down_proj.weight", normal(hidden, inner, residual_std)
    yield "model.norm.weight", ones(hidden)
    if not spec.tie_word_embeddings:
        yield "lm_head.weight", normal(vocab, hidden)


def _json(data: object) -> bytes:
    return json.dumps(data, indent=2).encode() + b"\n"


def _require_same(path: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        file = path / name
        if not file.is_file() or file.read_bytes() != data:
            raise FileExistsError(
                f"{path} exists and is not the tiny model of this seed and shape ({name} "
                "differs): remove it, or give job.dump_folder another path"
            )
