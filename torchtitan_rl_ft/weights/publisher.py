"""Writing a policy as a Hugging Face directory, tensor by tensor.

Tensors are gathered as far as a set buffer goes, written and dropped before the next ones, so
neither the writer nor its peers ever hold the full model beside their shards.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from torchtitan_rl_ft.run_folder import fsync_dir
from torchtitan_rl_ft.weights.assets import copy_assets
from torchtitan_rl_ft.weights.image import WEIGHTS_FILE, Image
from torchtitan_rl_ft.weights.manifest import Manifest, TensorEntry, write_manifest
from torchtitan_rl_ft.weights.shards import DTYPES


class NonFiniteWeights(Exception):
    """A parameter is NaN or infinite; nothing was published."""


@dataclass(frozen=True)
class Published:
    """A policy directory that is complete, manifest last."""

    path: Path
    manifest_digest: str
    bytes: int


def publish(
    tensors: dict[str, torch.Tensor],
    *,
    target: Path,
    assets: Path,
    step: int,
    token: str,
    writer: bool,
    buffer_bytes: int,
    dtype: torch.dtype | None = None,
) -> Published | None:
    """Write the HF-named `tensors` (plain or DTensor) to `target`; collective over their mesh.

    At most `buffer_bytes` of gathered tensors exist at a time, or one tensor if that is larger.
    Only the `writer` rank writes and gets the result. A complete `target` of the same step and
    token is left alone; anything else there is replaced. Raises NonFiniteWeights, OSError.
    """
    if not writer:
        for _ in gathered(tensors, buffer_bytes):
            pass
        return None
    target.parent.mkdir(parents=True, exist_ok=True)
    temp = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        copy_assets(assets, temp)
        entries, size = _write_safetensors(temp / WEIGHTS_FILE, tensors, dtype, buffer_bytes)
        manifest = Manifest.build(step=step, token=token, tensors=entries)
        digest = write_manifest(temp, manifest)
        temp.chmod(0o755)
        fsync_dir(temp)
        if target.exists():
            shutil.rmtree(target)
        os.rename(temp, target)
        fsync_dir(target.parent)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return Published(target, digest, size)


def gathered(
    tensors: Mapping[str, torch.Tensor], buffer_bytes: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors, sorted by name, so in the same order on all ranks. Those that share a buffer
    are requested together, so that their all-gathers overlap."""
    for names in _chunks(tensors, buffer_bytes):
        wholes = [
            t.full_tensor() if isinstance(t, DTensor) else t
            for t in (tensors[name].detach() for name in names)
        ]
        yield from zip(names, wholes, strict=True)


def _chunks(tensors: Mapping[str, torch.Tensor], buffer_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name in sorted(tensors):
        nbytes = tensors[name].numel() * tensors[name].element_size()
        if names and size + nbytes > buffer_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += nbytes
    if names:
        yield names


def _write_safetensors(
    path: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype | None, buffer_bytes: int
) -> tuple[dict[str, TensorEntry], int]:
    """Stream a safetensors file: the header follows from the shapes, the data comes later."""
    image = image_of(tensors, dtype)
    entries: dict[str, TensorEntry] = {}
    bad: str | None = None
    with open(path, "wb") as f:
        f.write(image.header)
        for name, whole in gathered(tensors, buffer_bytes):
            if bad is not None:
                continue  # the other ranks gather to the end
            tensor = whole.to(dtype=dtype or whole.dtype).cpu().contiguous()
            if not torch.isfinite(tensor).all():
                bad = name
                continue
            raw = tensor.reshape(-1).view(torch.uint8).numpy()
            f.write(raw.data)
            entries[name] = TensorEntry(
                dtype=DTYPES[tensor.dtype],
                shape=list(tensor.shape),
                sha256=hashlib.sha256(raw.data).hexdigest(),
                file=path.name,
            )
        if bad is not None:
            raise NonFiniteWeights(f"tensor {bad!r} holds NaN or infinity; not published")
        f.flush()
        os.fsync(f.fileno())
    return entries, image.nbytes


def image_of(tensors: dict[str, torch.Tensor], dtype: torch.dtype | None) -> Image:
    """Where `publish` puts each byte."""
    return Image({n: (DTYPES[dtype or t.dtype], list(t.shape)) for n, t in tensors.items()})
