"""The manifest of a published policy: what a weights folder holds, tensor by tensor.

A folder of weights is complete when `manifest.json` is in it: the publisher writes the files,
makes them durable, and writes the manifest last. A reader trusts nothing that it has not
compared with the manifest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.run_folder import write_atomic
from torchtitan_rl_ft.weights.tensor_files import (
    ITEM_BYTES,
    TensorFile,
    TensorFileError,
    has_non_finite,
)

MANIFEST_FORMAT = 1
MANIFEST_FILE = "manifest.json"


class WeightsInvalid(Exception):
    """A weights folder is incomplete, or does not hold what its manifest says."""


class WeightsNotFinite(WeightsInvalid):
    """They are what was published, and no engine can use them."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a policy. `dtype` is safetensors' name ("F32", "BF16", ...), `sha256` is over
    the raw little-endian bytes in row-major order, `file` is relative to the folder."""

    dtype: str
    shape: list[int]
    sha256: str
    file: str

    @property
    def nbytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * ITEM_BYTES[self.dtype]


def tensor_entry(dtype: str, shape: Iterable[int], raw: Any, file: str) -> TensorEntry:
    """Entry of a tensor whose bytes are `raw` (anything with the buffer protocol)."""
    return TensorEntry(dtype, list(shape), hashlib.sha256(raw).hexdigest(), file)


def model_digest(tensors: Mapping[str, TensorEntry]) -> str:
    """Digest of a model's content: independent of files, shards and of the step."""
    lines = (f"{n}|{t.dtype}|{t.shape}|{t.sha256}" for n, t in sorted(tensors.items()))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@dataclass(frozen=True)
class Manifest:
    """Names a policy by its history (`step`, `token`) and by its content (`model_digest`)."""

    step: int
    token: str
    tensors: dict[str, TensorEntry]
    model_digest: str
    format: int = MANIFEST_FORMAT

    @classmethod
    def build(cls, *, step: int, token: str, tensors: dict[str, TensorEntry]) -> Manifest:
        return cls(step, token, tensors, model_digest(tensors))

    def to_bytes(self) -> bytes:
        """Canonical JSON: equal manifests have equal bytes."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @property
    def digest(self) -> str:
        """What `/v1/publish` calls manifest_digest."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Raises WeightsInvalid."""
        try:
            fields = json.loads(data)
            if fields["format"] != MANIFEST_FORMAT:
                raise WeightsInvalid(f"manifest format {fields['format']} is not supported")
            tensors = {
                str(n): TensorEntry(
                    str(t["dtype"]), [int(s) for s in t["shape"]], str(t["sha256"]), str(t["file"])
                )
                for n, t in fields["tensors"].items()
            }
            manifest = cls(
                int(fields["step"]), str(fields["token"]), tensors, str(fields["model_digest"])
            )
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise WeightsInvalid(f"not a manifest: {type(e).__name__}: {e}") from e
        for name, entry in tensors.items():
            _check_entry(name, entry)
        if manifest.model_digest != model_digest(tensors):
            raise WeightsInvalid("manifest is altered: its model_digest does not fit its tensors")
        return manifest


def _check_entry(name: str, entry: TensorEntry) -> None:
    """A name from a manifest becomes a path: it must stay inside the folder."""
    if Path(entry.file).name != entry.file or not entry.file.endswith(".safetensors"):
        raise WeightsInvalid(f"tensor {name}: {entry.file!r} is not a file of the folder")
    if entry.dtype not in ITEM_BYTES:
        raise WeightsInvalid(f"tensor {name}: unknown dtype {entry.dtype!r}")


def write_manifest(directory: Path, manifest: Manifest) -> str:
    """Complete a weights folder, in which everything else must be durable. Returns the
    manifest's digest."""
    write_atomic(directory / MANIFEST_FILE, manifest.to_bytes())
    return manifest.digest


def read_manifest(directory: Path) -> Manifest:
    """Raises WeightsInvalid, also when the folder is incomplete."""
    try:
        return Manifest.from_bytes((directory / MANIFEST_FILE).read_bytes())
    except FileNotFoundError:
        raise WeightsInvalid(
            f"{directory} has no {MANIFEST_FILE}: it was never completed, or was removed"
        ) from None
    except WeightsInvalid as e:
        raise WeightsInvalid(f"{directory}: {e}") from None


def read_and_verify(directory: Path, *, contents: bool = True, finite: bool = False) -> Manifest:
    """Read a weights folder and compare it with its manifest.

    Names, dtypes, shapes and sizes always; bytes by sha256 with `contents`; NaN and infinity
    with `finite`. Raises WeightsInvalid naming the first tensor that differs, WeightsNotFinite.
    """
    manifest = read_manifest(directory)
    with open_tensors(directory, manifest) as tensors:
        for name, entry in manifest.tensors.items():
            raw = tensors.raw(name)
            if contents and hashlib.sha256(raw).hexdigest() != entry.sha256:
                raise WeightsInvalid(f"{directory}: tensor {name} differs from its sha256")
            if finite and has_non_finite(raw, entry.dtype):
                raise WeightsNotFinite(f"{directory}: tensor {name} has NaN or infinite values")
    return manifest


def checkpoint_manifest(directory: Path) -> Manifest:
    """The manifest of a Hugging Face checkpoint that nobody published, made from its files; those
    of its index, `model.safetensors`, or all. Step 0, no token.

    Reads all weights. Raises WeightsInvalid.
    """
    tensors: dict[str, TensorEntry] = {}
    for path in _checkpoint_files(directory):
        try:
            with closing(TensorFile(path)) as file:
                for name, found in file.tensors.items():
                    with file.raw(name) as raw:
                        tensors[name] = tensor_entry(found.dtype, found.shape, raw, path.name)
        except (OSError, TensorFileError) as e:
            raise WeightsInvalid(f"{directory}: {e}") from e
    if not tensors:
        raise WeightsInvalid(f"{directory} holds no weights (*.safetensors)")
    return Manifest.build(step=0, token="", tensors=tensors)


def _checkpoint_files(directory: Path) -> list[Path]:
    """Raises WeightsInvalid."""
    index = directory / "model.safetensors.index.json"
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
        return [directory / name for name in sorted(names)]
    except FileNotFoundError:
        whole = directory / "model.safetensors"
        return [whole] if whole.is_file() else sorted(directory.glob("*.safetensors"))
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as e:
        raise WeightsInvalid(f"{index}: not an index of weights: {e}") from e


class FolderTensors:
    """The tensors of a weights folder, mapped, by name. Close it, or use it in `with`."""

    def __init__(self, files: dict[str, TensorFile], manifest: Manifest) -> None:
        self._files = files
        self._manifest = manifest

    def raw(self, name: str) -> memoryview:
        """Bytes of a tensor, mapped from its file. Valid until `close`."""
        return self._files[self._manifest.tensors[name].file].raw(name)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def __enter__(self) -> FolderTensors:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_tensors(directory: Path, manifest: Manifest) -> FolderTensors:
    """Map the tensors of `directory`, whose names, dtypes and shapes must be the manifest's.

    Raises WeightsInvalid.
    """
    files: dict[str, TensorFile] = {}
    opened = FolderTensors(files, manifest)
    try:
        for name in sorted({t.file for t in manifest.tensors.values()}):
            files[name] = TensorFile(directory / name)
        for name, entry in manifest.tensors.items():
            found = files[entry.file].tensors.get(name)
            if found is None:
                raise WeightsInvalid(f"{directory}: tensor {name} is not in {entry.file}")
            if (found.dtype, found.shape) != (entry.dtype, entry.shape):
                raise WeightsInvalid(
                    f"{directory}: tensor {name} is {found.dtype} {found.shape}, "
                    f"the manifest says {entry.dtype} {entry.shape}"
                )
        extra = {n for f in files.values() for n in f.tensors} - set(manifest.tensors)
        if extra:
            raise WeightsInvalid(f"{directory}: tensor {min(extra)} is not in the manifest")
    except (OSError, TensorFileError) as e:
        opened.close()
        raise WeightsInvalid(f"{directory}: {e}") from e
    except WeightsInvalid:
        opened.close()
        raise
    return opened
