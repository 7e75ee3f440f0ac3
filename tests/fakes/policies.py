"""Published policies for tests: the tiny model with weights that depend on a number."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from torchtitan_rl_ft.models.tiny import make_tiny_model
from torchtitan_rl_ft.weights.manifest import Manifest, tensor_entry, write_manifest

ASSETS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def token_of(step: int) -> str:
    return f"{step:032x}"


def tiny_model(path: Path) -> Path:
    return make_tiny_model(path, seed=0)


def write_policy(
    folder: Path,
    model: Path,
    step: int,
    *,
    token: str | None = None,
    scale: float = 1.0,
    change: dict[str, np.ndarray] | None = None,
) -> tuple[Path, str]:
    """A published policy: every tensor of `model` times `scale`. Returns (path, digest)."""
    token = token or token_of(step)
    path = folder / f"step-{step}-{token[-8:]}"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    for name in ASSETS:
        shutil.copy(model / name, path / name)
    tensors = {
        n: np.asarray(a * np.float32(scale), np.float32)
        for n, a in load_file(model / "model.safetensors").items()
    }
    tensors.update(change or {})
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    entries = {
        n: tensor_entry("F32", a.shape, np.ascontiguousarray(a).tobytes(), "model.safetensors")
        for n, a in tensors.items()
    }
    return path, write_manifest(path, Manifest.build(step=step, token=token, tensors=entries))
