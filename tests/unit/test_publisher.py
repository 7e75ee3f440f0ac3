"""Publishing a policy: the directory is whole or absent, and holds what the manifest says."""

import json

import pytest
import torch
from safetensors.torch import load_file

from torchtitan_rl_ft.models.tiny import make_tiny_model
from torchtitan_rl_ft.weights.manifest import read_and_verify
from torchtitan_rl_ft.weights.publisher import NonFiniteWeights, publish


def tensors(n=5):
    g = torch.Generator().manual_seed(0)
    return {f"layer.{i}.weight": torch.randn(4, 3 + i, generator=g) for i in range(n)}


def write(tmp_path, weights, step=3, token="ab" * 16, buffer_bytes=1 << 20, **kwargs):
    assets = make_tiny_model(tmp_path / "model", 0)
    target = tmp_path / "weights" / f"step-{step}"
    return publish(
        weights,
        target=target,
        assets=assets,
        step=step,
        token=token,
        writer=True,
        buffer_bytes=buffer_bytes,
        **kwargs,
    )


@pytest.mark.parametrize("buffer_bytes", [1, 100, 1 << 30])
def test_the_directory_is_a_model_that_any_reader_loads(tmp_path, buffer_bytes):
    weights = tensors()
    done = write(tmp_path, weights, buffer_bytes=buffer_bytes)
    loaded = load_file(done.path / "model.safetensors")
    torch.testing.assert_close(loaded, weights, rtol=0, atol=0)
    manifest = read_and_verify(done.path)
    assert manifest.digest == done.manifest_digest
    assert (manifest.step, manifest.token) == (3, "ab" * 16)
    assert json.loads((done.path / "config.json").read_text())["model_type"] == "qwen3"
    assert (done.path / "tokenizer.json").exists()


def test_published_in_another_dtype(tmp_path):
    done = write(tmp_path, tensors(), dtype=torch.bfloat16)
    loaded = load_file(done.path / "model.safetensors")
    assert {t.dtype for t in loaded.values()} == {torch.bfloat16}
    read_and_verify(done.path)


@pytest.mark.row("I7")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_nan_is_not_published_and_leaves_nothing(tmp_path, bad):
    weights = tensors()
    weights["layer.2.weight"][1, 1] = bad
    with pytest.raises(NonFiniteWeights, match=r"layer\.2\.weight"):
        write(tmp_path, weights)
    assert list((tmp_path / "weights").iterdir()) == []


def test_what_stood_there_is_replaced(tmp_path):
    write(tmp_path, tensors(), token="00" * 16)
    done = write(tmp_path, tensors(), token="11" * 16)
    assert read_and_verify(done.path).token == "11" * 16
    assert [p.name for p in (tmp_path / "weights").iterdir()] == ["step-3"]


def test_other_ranks_write_nothing(tmp_path):
    args = {"target": tmp_path / "w" / "s", "assets": tmp_path, "step": 1, "token": "x"}
    assert publish(tensors(), writer=False, buffer_bytes=64, **args) is None
    assert not (tmp_path / "w").exists()
