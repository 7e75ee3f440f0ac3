"""The manifest is the only thing that makes a weights folder one."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from torchtitan_rl_ft.weights.manifest import (
    MANIFEST_FILE,
    Manifest,
    TensorEntry,
    WeightsInvalid,
    open_tensors,
    read_and_verify,
    read_manifest,
    tensor_entry,
    write_manifest,
)
from torchtitan_rl_ft.weights.tensor_files import TensorFile, TensorFileError, has_non_finite


def make_folder(path: Path, *, step: int = 3, finite: bool = True) -> Manifest:
    path.mkdir()
    tensors = {
        "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b.weight": np.arange(8, dtype=np.float32).reshape(4, 2),
    }
    if not finite:
        tensors["b.weight"][1, 1] = np.nan
    entries = {}
    for i, (name, array) in enumerate(tensors.items()):
        file = f"model-{i}.safetensors"
        save_file({name: array}, path / file)
        entries[name] = tensor_entry("F32", array.shape, array.tobytes(), file)
    manifest = Manifest.build(step=step, token="t" * 32, tensors=entries)
    write_manifest(path, manifest)
    return manifest


def test_round_trip_and_digest(tmp_path: Path) -> None:
    manifest = make_folder(tmp_path / "w")
    again = read_and_verify(tmp_path / "w", finite=True)
    assert again == manifest
    assert again.digest == hashlib.sha256((tmp_path / "w" / MANIFEST_FILE).read_bytes()).hexdigest()
    assert again.nbytes == 20 * 4


def test_sha256_is_over_the_raw_bytes(tmp_path: Path) -> None:
    make_folder(tmp_path / "w")
    with open_tensors(tmp_path / "w", read_manifest(tmp_path / "w")) as tensors:
        raw = np.frombuffer(tensors.raw("b.weight"), dtype=np.float32)
        assert raw.tolist() == list(range(8))
        del raw


def test_model_digest_does_not_depend_on_step_or_file() -> None:
    one = Manifest.build(
        step=1, token="x", tensors={"a": TensorEntry("F32", [1], "0", "m.safetensors")}
    )
    two = Manifest.build(
        step=2, token="y", tensors={"a": TensorEntry("F32", [1], "0", "n.safetensors")}
    )
    assert one.model_digest == two.model_digest
    assert one.digest != two.digest


def test_a_folder_without_manifest_is_incomplete(tmp_path: Path) -> None:
    make_folder(tmp_path / "w")
    (tmp_path / "w" / MANIFEST_FILE).unlink()
    with pytest.raises(WeightsInvalid, match="never completed"):
        read_and_verify(tmp_path / "w")


@pytest.mark.row("D10")
def test_a_flipped_byte_names_the_tensor(tmp_path: Path) -> None:
    make_folder(tmp_path / "w")
    file = tmp_path / "w" / "model-1.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises(WeightsInvalid, match=r"b\.weight differs from its sha256"):
        read_and_verify(tmp_path / "w")
    assert read_and_verify(tmp_path / "w", contents=False).step == 3


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
def test_a_cut_file_is_refused(tmp_path: Path, keep: int) -> None:
    make_folder(tmp_path / "w")
    file = tmp_path / "w" / "model-0.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(WeightsInvalid, match=r"cut short|not all there|header"):
        read_and_verify(tmp_path / "w", contents=False)


def test_missing_file_shape_and_extra_tensor(tmp_path: Path) -> None:
    make_folder(tmp_path / "w")
    (tmp_path / "w" / "model-0.safetensors").unlink()
    with pytest.raises(WeightsInvalid, match=r"model-0\.safetensors"):
        read_and_verify(tmp_path / "w")
    a = np.zeros((2, 6), np.float32)
    save_file({"a.weight": a}, tmp_path / "w" / "model-0.safetensors")
    with pytest.raises(WeightsInvalid, match=r"a\.weight is F32 \[2, 6\]"):
        read_and_verify(tmp_path / "w")
    save_file(
        {"a.weight": np.arange(12, dtype=np.float32).reshape(3, 4), "c": a},
        tmp_path / "w" / "model-0.safetensors",
    )
    with pytest.raises(WeightsInvalid, match="tensor c is not in the manifest"):
        read_and_verify(tmp_path / "w")


def test_non_finite_is_found(tmp_path: Path) -> None:
    make_folder(tmp_path / "w", finite=False)
    read_and_verify(tmp_path / "w")
    with pytest.raises(WeightsInvalid, match=r"b\.weight has NaN"):
        read_and_verify(tmp_path / "w", finite=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format=99), "format 99"),
        (lambda m: m.update(model_digest="0"), "altered"),
        (lambda m: m.pop("tensors"), "not a manifest"),
        (lambda m: m["tensors"]["a.weight"].update(file="../x.safetensors"), "not a file of"),
        (lambda m: m["tensors"]["a.weight"].update(dtype="Q4"), "unknown dtype"),
    ],
)
def test_altered_manifests_are_refused(tmp_path: Path, change, message: str) -> None:
    make_folder(tmp_path / "w")
    path = tmp_path / "w" / MANIFEST_FILE
    fields = json.loads(path.read_bytes())
    change(fields)
    path.write_bytes(json.dumps(fields).encode())
    with pytest.raises(WeightsInvalid, match=message):
        read_manifest(tmp_path / "w")


@pytest.mark.parametrize(
    ("dtype", "finite", "broken"),
    [
        ("F32", [0x3F800000], [0x7FC00000]),
        ("F32", [0x7F7FFFFF], [0xFF800000]),
    ],
)
def test_non_finite_float32(dtype: str, finite: list[int], broken: list[int]) -> None:
    assert not has_non_finite(np.array(finite, np.uint32), dtype)
    assert has_non_finite(np.array(broken, np.uint32), dtype)


def test_non_finite_half_precision() -> None:
    assert not has_non_finite(np.array([65504.0], np.float16), "F16")
    assert has_non_finite(np.array([np.inf], np.float16), "F16")
    assert not has_non_finite(np.array([0x7F7F], np.uint16), "BF16")
    assert has_non_finite(np.array([0xFFC0], np.uint16), "BF16")
    assert not has_non_finite(np.array([-1], np.int64), "I64")


def test_a_file_that_is_no_safetensors(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0not json at all!")
    with pytest.raises(TensorFileError, match="no safetensors header"):
        TensorFile(tmp_path / "x.safetensors")
