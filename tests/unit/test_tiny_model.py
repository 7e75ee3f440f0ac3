"""The tiny model directory: deterministic, whole or absent, readable by transformers."""

from __future__ import annotations

import hashlib
import json
import os

import numpy as np
import pytest
from safetensors.numpy import load_file

from torchtitan_rl_ft.models.tiny import (
    ALPHABET,
    EOS,
    TinySpec,
    make_tiny_model,
    tiny_model_files,
    tiny_tokenizer,
)


def contents(path):
    return {f.name: f.read_bytes() for f in path.iterdir()}


def test_same_seed_gives_the_same_bytes(tmp_path):
    a = make_tiny_model(tmp_path / "a", seed=3)
    b = make_tiny_model(tmp_path / "b", seed=3)
    assert contents(a) == contents(b)
    assert contents(a) != contents(make_tiny_model(tmp_path / "c", seed=4))


def test_bytes_do_not_drift_between_machines_and_library_versions():
    files = tiny_model_files(0, TinySpec())
    digest = hashlib.sha256(files["model.safetensors"]).hexdigest()
    assert digest.startswith("2c1c630986172b1c")


def test_under_two_million_parameters(tmp_path):
    tensors = load_file(make_tiny_model(tmp_path / "m", seed=0) / "model.safetensors")
    assert sum(t.size for t in tensors.values()) < 2_000_000
    assert all(t.dtype == np.float32 for t in tensors.values())
    assert "lm_head.weight" in tensors


def test_tied_model_has_no_head(tmp_path):
    path = make_tiny_model(tmp_path / "m", 0, TinySpec(tie_word_embeddings=True))
    assert "lm_head.weight" not in load_file(path / "model.safetensors")


def test_existing_same_model_is_kept_and_another_is_refused(tmp_path):
    path = make_tiny_model(tmp_path / "m", seed=0)
    before = (path / "config.json").stat().st_mtime_ns
    make_tiny_model(path, seed=0)
    assert (path / "config.json").stat().st_mtime_ns == before
    with pytest.raises(FileExistsError, match="model.safetensors differs"):
        make_tiny_model(path, seed=1)


def test_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        make_tiny_model(tmp_path / "m", seed=0)
    assert list(tmp_path.iterdir()) == []


def test_tokenizer_round_trip():
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("41+07>").ids
    assert [ALPHABET[i] for i in ids] == list("41+07>")
    assert tokenizer.decode(ids) == "41+07>"
    assert tokenizer.token_to_id(EOS) == ALPHABET.index(EOS)
    assert len(ALPHABET) == tokenizer.get_vocab_size() == 16


@pytest.mark.timeout(120)
def test_transformers_reads_the_tokenizer(tmp_path):
    transformers = pytest.importorskip("transformers")
    path = make_tiny_model(tmp_path / "m", seed=0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    assert tokenizer.encode("30>") == tiny_tokenizer().encode("30>").ids
    assert tokenizer.eos_token_id == ALPHABET.index(EOS)
    assert tokenizer.decode([6, 3, 2], skip_special_tokens=True) == "30"
    assert len(tokenizer) == json.loads((path / "config.json").read_bytes())["vocab_size"]
