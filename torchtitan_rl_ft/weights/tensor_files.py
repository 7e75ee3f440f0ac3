"""Raw bytes of tensors in safetensors files, without a tensor library.

safetensors' numpy reader knows no bfloat16 and copies; hashing and checking need only the bytes.
The format (https://github.com/huggingface/safetensors): 8 bytes little-endian header length,
a JSON header {name: {dtype, shape, data_offsets}}, then the data.
"""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}

# All bits of the exponent set means NaN or infinity (IEEE 754; bfloat16 has float32's exponent).
_EXPONENT: dict[str, tuple[Any, int]] = {
    "F64": (np.uint64, 0x7FF0000000000000),
    "F32": (np.uint32, 0x7F800000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}

MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


class TensorFileError(Exception):
    """Not a whole safetensors file."""


@dataclass(frozen=True)
class TensorSpan:
    """Where a tensor's bytes are in the file."""

    dtype: str
    shape: list[int]
    start: int
    end: int


class TensorFile:
    """One mapped safetensors file. Raises TensorFileError, OSError."""

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as f:
            size = f.seek(0, 2)
            if size < 8:
                raise TensorFileError(f"{path.name} is cut short: {size} bytes")
            self._map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        self._data = memoryview(self._map)
        try:
            self.tensors = _read_header(path.name, self._data)
        except BaseException:
            self.close()
            raise

    def raw(self, name: str) -> memoryview:
        """Bytes of tensor `name`. Valid until `close`."""
        span = self.tensors[name]
        return self._data[span.start : span.end]

    def close(self) -> None:
        self._data.release()
        try:
            self._map.close()
        except BufferError:
            # A caller still holds a view; the map goes with the last one.
            return


def _read_header(file: str, data: memoryview) -> dict[str, TensorSpan]:
    length = int.from_bytes(data[:8], "little")
    if length > min(MAX_HEADER_BYTES, len(data) - 8):
        raise TensorFileError(f"{file} is cut short or no safetensors file")
    try:
        header = json.loads(bytes(data[8 : 8 + length]))
        header.pop("__metadata__", None)
        spans = {
            name: TensorSpan(
                t["dtype"],
                list(t["shape"]),
                8 + length + t["data_offsets"][0],
                8 + length + t["data_offsets"][1],
            )
            for name, t in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as e:
        raise TensorFileError(f"{file} has no safetensors header: {e}") from e
    for name, span in spans.items():
        if span.dtype not in ITEM_BYTES:
            raise TensorFileError(f"{file}: tensor {name} has unknown dtype {span.dtype}")
        count = int(np.prod(span.shape, dtype=np.int64))
        if span.end - span.start != count * ITEM_BYTES[span.dtype]:
            raise TensorFileError(f"{file}: tensor {name} has {span.end - span.start} bytes")
        if not 8 + length <= span.start <= span.end <= len(data):
            raise TensorFileError(f"{file} is cut short: tensor {name} is not all there")
    return spans


def has_non_finite(raw: Any, dtype: str, chunk_items: int = 1 << 22) -> bool:
    """Whether a tensor holds NaN or infinity; False for integers and 8-bit floats."""
    if dtype not in _EXPONENT:
        return False
    word, mask = _EXPONENT[dtype]
    words = np.frombuffer(raw, dtype=word)
    for start in range(0, len(words), chunk_items):
        part = words[start : start + chunk_items] & word(mask)
        if (part == word(mask)).any():
            return True
    return False
