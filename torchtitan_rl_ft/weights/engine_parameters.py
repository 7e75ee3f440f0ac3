"""How SGLang 0.5.23 lays a Hugging Face checkpoint out as parameters.

SGLang fuses projections (`qkv_proj`, `gate_up_proj`) by rows and pads vocabularies with zero rows
to a multiple of 64 (sglang/srt/models/{llama,qwen2,qwen3}.py, layers/vocab_parallel_embedding.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
VOCABULARY_PADDING = 64
VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")

_FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


@dataclass(frozen=True)
class Parameter:
    """One parameter of an engine: HF tensors concatenated by rows, then zero rows."""

    name: str
    parts: tuple[str, ...]
    zero_rows: int = 0


def known_family(config: Mapping[str, Any]) -> bool:
    """Whether the layout of a model with this config.json is known here."""
    generates = all(a.endswith("ForCausalLM") for a in config.get("architectures") or [])
    return (
        config.get("model_type") in FAMILIES
        and generates  # a reward model has a head of its own
        and "quantization_config" not in config
    )


def engine_parameters(
    shapes: Mapping[str, Iterable[int]], config: Mapping[str, Any]
) -> dict[str, Parameter]:
    """Parameters of an unsharded engine, by name, from the HF tensors' shapes."""
    parts: dict[str, dict[int, str]] = {}
    for name in shapes:
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue  # the same parameter as the embedding
        fused, place = _engine_name(name)
        parts.setdefault(fused, {})[place] = name
    found = {}
    for name, places in parts.items():
        zero_rows = 0
        if name in VOCABULARY:
            zero_rows = -next(iter(shapes[name])) % VOCABULARY_PADDING
        found[name] = Parameter(name, tuple(places[p] for p in sorted(places)), zero_rows)
    return found


def _engine_name(name: str) -> tuple[str, int]:
    """(parameter, place in it) of an HF tensor."""
    words = name.split(".")
    if len(words) >= 2 and words[-2] in _FUSED:
        words[-2], place = _FUSED[words[-2]]
        return ".".join(words), place
    return name, 0
