"""A Hugging Face directory as a policy folder, without torch: its files and a manifest."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torchtitan_rl_ft.run_folder import fsync_dir
from torchtitan_rl_ft.weights.image import WEIGHTS_FILE
from torchtitan_rl_ft.weights.manifest import (
    Manifest,
    TensorEntry,
    WeightsInvalid,
    read_manifest,
    tensor_entry,
    write_manifest,
)
from torchtitan_rl_ft.weights.tensor_files import TensorFile, TensorFileError

INDEX_FILE = "model.safetensors.index.json"


def release_directory(source: Path, target: Path, *, step: int, token: str) -> str:
    """Make `target` the policy (step, token) with the weights of `source`, as they are there.

    Files are hard links where the file system allows it. A complete `target` of this step and
    token is left alone. Returns the manifest's digest. Raises WeightsInvalid, OSError.
    """
    if (known := _known(target, step, token)) is not None:
        return known
    target.parent.mkdir(parents=True, exist_ok=True)
    temp = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        weights = _weight_files(source)
        others = [f.name for f in source.iterdir() if f.is_file() and f.suffix != ".safetensors"]
        for name in [*weights, *others]:
            _link(source / name, temp / name)
        tensors: dict[str, TensorEntry] = {}
        for name in weights:
            tensors |= _entries(temp, name)
        digest = write_manifest(temp, Manifest.build(step=step, token=token, tensors=tensors))
        temp.chmod(0o755)
        if target.exists():
            shutil.rmtree(target)
        os.rename(temp, target)
        fsync_dir(target.parent)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return digest


def _known(target: Path, step: int, token: str) -> str | None:
    """The digest of a complete `target`."""
    try:
        manifest = read_manifest(target)
    except WeightsInvalid:
        return None
    return manifest.digest if (manifest.step, manifest.token) == (step, token) else None


def _weight_files(source: Path) -> Sequence[str]:
    """Raises WeightsInvalid."""
    index = source / INDEX_FILE
    if not index.exists():
        return [WEIGHTS_FILE]
    try:
        return sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as e:
        raise WeightsInvalid(f"{index} is no index of weights: {e}") from e


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


def _entries(folder: Path, name: str) -> dict[str, TensorEntry]:
    """Raises WeightsInvalid."""
    try:
        file = TensorFile(folder / name)
    except TensorFileError as e:
        raise WeightsInvalid(f"{folder / name}: {e}") from e
    try:
        return {
            tensor: tensor_entry(span.dtype, span.shape, file.raw(tensor), name)
            for tensor, span in file.tensors.items()
        }
    finally:
        file.close()
