"""What a fake engine holds: its model, its settings, who waits for what."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from fake_disaggregation import Half
from fake_memory import Memory
from fake_worker import Worker
from safetensors.numpy import load_file


def load_parameters(path: Path) -> dict[str, np.ndarray]:
    """A Hugging Face folder as SGLang's parameters."""
    tied = json.loads((path / "config.json").read_bytes()).get("tie_word_embeddings")
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
    if tied:
        tensors.pop("lm_head.weight", None)
    fused = (("q_proj", "k_proj", "v_proj"), "qkv_proj"), (("gate_proj", "up_proj"), "gate_up_proj")
    for parts, whole in fused:
        for name in [n for n in tensors if parts[0] in n]:
            names = [name.replace(parts[0], p) for p in parts]
            tensors[name.replace(parts[0], whole)] = np.concatenate([tensors.pop(n) for n in names])
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            rows = -len(tensors[name]) % 64
            tensors[name] = np.pad(tensors[name], ((0, rows), (0, 0)))
    return tensors


class EngineState:
    def __init__(self, args: argparse.Namespace, faults: dict[str, Any]) -> None:
        self.model_path = model_path = args.model_path
        self.stream_interval = args.stream_interval
        self.incremental = args.incremental_streaming_output
        self.half = Half(args.disaggregation_mode) if args.disaggregation_mode else None
        saver = args.enable_memory_saver
        self.memory = Memory(args.enable_weights_cpu_backup) if saver else None
        self.vocabulary = json.loads((model_path / "config.json").read_bytes())["vocab_size"]
        self.parameters = load_parameters(model_path)
        self.version = "default"
        self.faults = faults
        self.boot = uuid.uuid4().hex
        self.paused = ""
        self.go = asyncio.Event()
        self.go.set()
        self.running = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.samples: dict[str, asyncio.Event] = {}  # set: aborted
        self.requests = 0
        self.prefilled = 0
        self.calls: list[tuple[float, str]] = []
        self.worker = Worker(bool(faults.get("orphan")))
        self.cached = self.weights_hash()

    def weights_hash(self) -> str:
        digest = hashlib.sha256()
        for name in sorted(self.parameters):
            digest.update(self.parameters[name].tobytes())
        return digest.hexdigest()[:16]
