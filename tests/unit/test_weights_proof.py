"""Checksums that engines have to show, derived from published bytes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from torchtitan_rl_ft.models.tiny import TinySpec, make_tiny_model
from torchtitan_rl_ft.platform.sglang_cpu import seed_hash
from torchtitan_rl_ft.weights.dtype_casts import CastUnknown, cast
from torchtitan_rl_ft.weights.engine_hashes import cpu_hash, gpu_hash
from torchtitan_rl_ft.weights.engine_parameters import engine_parameters, known_family
from torchtitan_rl_ft.weights.manifest import (
    MANIFEST_FILE,
    Manifest,
    WeightsInvalid,
    checkpoint_manifest,
    tensor_entry,
    write_manifest,
)
from torchtitan_rl_ft.weights.proof import EngineLayout, Proof, derive_proof, make_proofs

KERNELS = Path(__file__).parents[1] / "fakes" / "sglang_kernels.py"
SEEDS, POSITIONS, COLUMNS = [0, 1, 42, 2**31 - 1, 2**63 - 1, 2**40 + 5], [0, 1, 2, 100, 511, 7], 9
CPU = EngineLayout("float32", 1, cpu_hash)
SAFETENSORS_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def published(path: Path, spec: TinySpec | None = None) -> Path:
    make_tiny_model(path, seed=1, spec=spec)
    tensors = load_file(path / "model.safetensors")
    entries = {
        n: tensor_entry("F32", a.shape, a.tobytes(), "model.safetensors")
        for n, a in tensors.items()
    }
    write_manifest(path, Manifest.build(step=0, token="t", tensors=entries))
    return path


def sha(*arrays: np.ndarray) -> str:
    return hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()[:16]


# Layout -----------------------------------------------------------------------------------------


def test_fused_and_padded_parameters(tmp_path: Path) -> None:
    path = published(tmp_path / "m")
    tensors = load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_bytes())
    found = engine_parameters({n: a.shape for n, a in tensors.items()}, config)
    at = "model.layers.1"
    assert found[f"{at}.self_attn.qkv_proj.weight"].parts == tuple(
        f"{at}.self_attn.{p}_proj.weight" for p in "qkv"
    )
    assert found[f"{at}.mlp.gate_up_proj.weight"].parts == (
        f"{at}.mlp.gate_proj.weight",
        f"{at}.mlp.up_proj.weight",
    )
    assert found["lm_head.weight"].zero_rows == 64 - 16
    assert len(found) == len(tensors) - 2 * 3  # per layer: three into one, two into one
    assert sum(len(p.parts) for p in found.values()) == len(tensors)


def test_a_tied_head_is_the_embedding() -> None:
    shapes = {"model.embed_tokens.weight": [128, 4], "lm_head.weight": [128, 4]}
    found = engine_parameters(shapes, {"tie_word_embeddings": True})
    assert list(found) == ["model.embed_tokens.weight"]
    assert found["model.embed_tokens.weight"].zero_rows == 0


def test_biases_are_fused_too() -> None:
    shapes = {f"model.layers.0.self_attn.{p}_proj.bias": [4] for p in "vkq"}
    [parameter] = engine_parameters(shapes, {}).values()
    assert parameter.name == "model.layers.0.self_attn.qkv_proj.bias"
    assert [p.split(".")[-2] for p in parameter.parts] == ["q_proj", "k_proj", "v_proj"]


def test_known_families() -> None:
    assert known_family({"model_type": "qwen3"})
    assert not known_family({"model_type": "qwen3_moe"})
    assert not known_family({"model_type": "qwen3", "quantization_config": {}})
    reward = {"model_type": "qwen2", "architectures": ["Qwen2ForRewardModel"]}
    assert not known_family(reward)


# Proof ------------------------------------------------------------------------------------------


def proof_of(path: Path, layout: EngineLayout) -> Proof:
    return make_proofs(path, [layout])[1][layout]


@pytest.mark.parametrize("tied", [False, True])
def test_exact_proof(tmp_path: Path, tied: bool) -> None:
    path = published(tmp_path / "m", TinySpec(tie_word_embeddings=tied))
    tensors = load_file(path / "model.safetensors")
    proof = proof_of(path, CPU)
    assert proof.kind == "exact"
    config = json.loads((path / "config.json").read_bytes())
    shown = {}
    for name, p in engine_parameters({n: a.shape for n, a in tensors.items()}, config).items():
        arrays = [tensors[n] for n in p.parts]
        if p.zero_rows:
            arrays.append(np.zeros((p.zero_rows, arrays[0].shape[1]), np.float32))
        shown[name] = sha(*arrays)
    assert proof.problem([shown], [], None) is None
    name = "model.layers.0.self_attn.qkv_proj.weight"
    wrong = proof.problem([{**shown, name: "0" * 16}], [], None)
    assert wrong is not None
    assert name in wrong and "1 of" in wrong
    missing = {n: s for n, s in shown.items() if n != name}
    assert "None" in (proof.problem([missing], [], None) or "")
    extra = proof.problem([{**shown, "draft.weight": "0"}], [], None)
    assert extra == "the engine has a parameter that nothing accounts for: draft.weight"


def test_the_engines_dtype_is_taken_into_account(tmp_path: Path) -> None:
    path = published(tmp_path / "m")
    proof = proof_of(path, EngineLayout("bfloat16", 1, cpu_hash))
    raw = load_file(path / "model.safetensors")["model.norm.weight"]
    half = torch.from_numpy(raw).to(torch.bfloat16).view(torch.uint8).numpy()
    assert proof._exact is not None
    assert proof._exact["model.norm.weight"] == sha(half)
    assert proof_of(path, EngineLayout("auto", 1, cpu_hash)).kind == "witness"


def test_a_checkpoint_that_nobody_published_is_proved_from_its_files(tmp_path: Path) -> None:
    path = published(tmp_path / "m")
    expected = proof_of(path, CPU)
    (path / MANIFEST_FILE).unlink()
    # Some checkpoints come in a second form beside the one that engines load.
    shutil.copy(path / "model.safetensors", path / "consolidated.safetensors")
    manifest = checkpoint_manifest(path)
    proof = derive_proof(path, manifest, CPU)
    assert (manifest.step, manifest.token) == (0, "")
    assert proof.model_digest == expected.model_digest
    assert proof._exact == expected._exact
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "missing.safetensors"}}))
    with pytest.raises(WeightsInvalid, match="missing.safetensors"):
        checkpoint_manifest(path)


def test_damaged_weights_give_no_proof(tmp_path: Path) -> None:
    path = published(tmp_path / "m")
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)
    with pytest.raises(WeightsInvalid, match="sha256"):
        make_proofs(path, [CPU])


def test_weights_that_are_damaged_while_they_are_read_give_no_proof(tmp_path: Path) -> None:
    """A proof of them would refuse every engine that loads the right ones."""
    path = published(tmp_path / "m")

    def damaging(chunks: Iterable[Any]) -> str:
        with open(path / "model.safetensors", "r+b") as f:
            f.seek(-1, os.SEEK_END)
            f.write(b"\x01")
        return cpu_hash(chunks)

    with pytest.raises(WeightsInvalid, match="sha256"):
        make_proofs(path, [EngineLayout("float32", 1, damaging)])


def test_witness_proof_for_what_cannot_be_derived(tmp_path: Path) -> None:
    path = published(tmp_path / "m")
    assert proof_of(path, EngineLayout("float32", 2, cpu_hash)).kind == "witness"
    old, new = [{"a": "1"}, {"a": "2"}], [{"a": "3"}, {"a": "4"}]
    proof = Proof("digest-2", None)
    unchanged = "all checksums are those from before the update"
    assert proof.problem(old, old, "digest-1") == unchanged
    assert proof.problem(new, old, "digest-1") is None
    assert proof.problem(new, new, "digest-2") is None  # the same content once more
    torn = proof.problem([new[0], old[1]], old, None)
    assert torn is not None
    assert "rank 1" in torn
    # Weights of unknown content may happen to be the very ones.
    assert Proof("digest-2", None).problem(old, old, None) is None


# Hashes and casts -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kernels() -> dict[str, Any]:
    """SGLang's own kernels, run by Triton's interpreter in a process of its own: the interpreter
    is chosen when Triton is imported."""
    asked = {
        "tensors": {n: raw.hex() for n, raw in gpu_hash_cases().items()},
        "seeds": SEEDS,
        "positions": POSITIONS,
        "columns": COLUMNS,
    }
    done = subprocess.run(
        [sys.executable, str(KERNELS)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def gpu_hash_cases() -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    sizes = {"word": 4, "odd": 1003, "tile": 8192 * 4, "tiles": 8192 * 4 + 36}
    return {name: rng.bytes(size) for name, size in sizes.items()}


def test_gpu_hash_is_sglangs(kernels: dict[str, Any]) -> None:
    for name, raw in gpu_hash_cases().items():
        assert gpu_hash([raw]) == kernels["tensors"][name], name
        assert gpu_hash([raw[:7], raw[7:]]) == kernels["tensors"][name], name
    assert gpu_hash([]) == "0" * 16


def test_seeds_draw_what_they_draw_on_a_gpu(kernels: dict[str, Any]) -> None:
    words = seed_hash(np.array(SEEDS, np.uint64), np.array(POSITIONS), np.arange(COLUMNS))
    assert words.dtype == np.uint32
    assert words.tolist() == kernels["words"]


@pytest.mark.parametrize("source", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("target", ["F32", "F16", "BF16"])
def test_casts_are_torchs(source: str, target: str) -> None:
    rng = np.random.default_rng(3)
    values = rng.standard_normal(4096).astype(np.float32) * np.float32(10.0) ** rng.integers(
        -12, 5, 4096
    ).astype(np.float32)
    tensor = torch.from_numpy(values).to(SAFETENSORS_DTYPES[source])
    raw = tensor.view(torch.uint8).numpy().tobytes()
    expected = tensor.to(SAFETENSORS_DTYPES[target]).view(torch.uint8).numpy().tobytes()
    assert bytes(memoryview(cast(raw, source, target))) == expected


def test_unknown_casts_are_refused() -> None:
    with pytest.raises(CastUnknown):
        cast(b"\0" * 8, "F8_E4M3", "F32")
