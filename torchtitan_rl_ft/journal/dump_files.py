"""Files of dumped samples: safetensors whose metadata is JSON, written atomically, no pickle.

Anything that reads safetensors reads them. Texts are a JSON document in a uint8 tensor, because
safetensors limits the size of its header.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from torchtitan_rl_ft.run_folder import write_atomic

DUMP_FORMAT = 1
SAMPLE_INDICES = "sample_indices"
"""Key of a subsampled batch's meta: where its samples were in the dumped one."""

_KEY = "dump"
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


class DumpInvalid(Exception):
    """The file is missing, damaged, or no dump of the wanted kind. One line that names it."""


class DumpWriteError(Exception):
    """A dump could not be written. One line that names it."""


def write_dump(path: Path, kind: str, head: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Replace `path` by a dump. Raises DumpWriteError."""
    text = json.dumps({"kind": kind, "format": DUMP_FORMAT, **head}, sort_keys=True)
    data = save({k: np.ascontiguousarray(v) for k, v in arrays.items()}, metadata={_KEY: text})
    try:
        write_atomic(path, data)
    except OSError as e:
        raise DumpWriteError(f"cannot write the dump {path}: {e.strerror or e}") from e


def read_head(path: Path, kind: str) -> dict[str, Any]:
    """What the dump says of itself, without its arrays. Raises DumpInvalid."""
    try:
        with open(path, "rb") as f:
            size = int.from_bytes(f.read(8), "little")
            header = f.read(size) if size <= _MAX_HEADER_BYTES else b""
    except OSError as e:
        raise DumpInvalid(f"cannot read the dump {path}: {e.strerror or e}") from e
    return _head(path, kind, header)


def read_dump(path: Path, kind: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(head, arrays) of a dump. Raises DumpInvalid."""
    try:
        data = path.read_bytes()
        arrays = load(data)
    except OSError as e:
        raise DumpInvalid(f"cannot read the dump {path}: {e.strerror or e}") from e
    except (SafetensorError, KeyError, ValueError) as e:
        raise DumpInvalid(f"{path} is no whole dump: {e}") from e
    return _head(path, kind, data[8 : 8 + int.from_bytes(data[:8], "little")]), arrays


def _head(path: Path, kind: str, header: bytes) -> dict[str, Any]:
    try:
        head = json.loads(json.loads(header)["__metadata__"][_KEY])
        found = head["kind"], head["format"]
    except (ValueError, KeyError, TypeError) as e:
        raise DumpInvalid(f"{path} is no whole dump: {type(e).__name__}: {e}") from e
    if found != (kind, DUMP_FORMAT):
        raise DumpInvalid(
            f"{path} is a {found[0]} dump of format {found[1]}, wanted is a {kind} dump of format "
            f"{DUMP_FORMAT}"
        )
    return head


def to_json_array(value: Any) -> np.ndarray:
    """A JSON document as uint8."""
    return np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)


def from_json_array(array: np.ndarray) -> Any:
    """Raises ValueError."""
    return json.loads(array.tobytes())
