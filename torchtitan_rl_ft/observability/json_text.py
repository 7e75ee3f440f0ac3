"""JSON as anybody may have written it, and as anybody can read it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_DECODER = json.JSONDecoder(parse_constant=lambda name: None)


def parse(text: bytes) -> Any:
    """NaN and Infinity, which JSON does not know, are None; what cannot be encoded again (half a
    surrogate pair, of a file name that is no UTF-8) is a question mark. Raises ValueError."""
    try:
        value = _DECODER.decode(text.decode())
        if b"\\ud" in text:
            whole = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
            return _DECODER.decode(whole.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def text_of(value: Any, indent: int | None = None, *, compact: bool = False) -> str:
    """Numbers without end are null."""
    separators = (",", ":") if compact else None
    try:
        return json.dumps(value, indent=indent, separators=separators, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), indent=indent, separators=separators, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value
