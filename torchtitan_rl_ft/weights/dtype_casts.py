"""Casts between the float formats of checkpoints and engines, on raw bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

ENGINE_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "half": "F16"}
"""SGLang's --dtype -> safetensors' name."""


class CastUnknown(Exception):
    """No cast between these formats is known here."""


def cast(raw: Any, source: str, target: str) -> Any:
    """`raw` as bytes of format `target`, rounded to nearest even like torch's `Tensor.to`.

    Raises CastUnknown.
    """
    if source == target:
        return raw
    return _from_float32(_to_float32(raw, source), target)


def _to_float32(raw: Any, source: str) -> np.ndarray:
    if source == "F32":
        return np.frombuffer(raw, np.float32)
    if source == "F16":
        return np.frombuffer(raw, np.float16).astype(np.float32)
    if source == "BF16":
        return (np.frombuffer(raw, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    raise CastUnknown(f"no cast from {source}")


def _from_float32(values: np.ndarray, target: str) -> np.ndarray:
    if target == "F32":
        return values.view(np.uint8)
    if target == "F16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint8)
    if target == "BF16":
        bits = values.view(np.uint32)
        rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
        return (rounded >> np.uint32(16)).astype(np.uint16).view(np.uint8)
    raise CastUnknown(f"no cast to {target}")
