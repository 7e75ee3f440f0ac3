"""The canonical image of a policy: where each byte of it is, known to all from its shapes alone.

The image is what `model.safetensors` holds: the header, then the tensors, sorted by name, without
gaps. It is a pure function of names, dtypes and shapes, so ranks that never met agree on the offset
of every row, and the pieces of different ranks make one file.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from torchtitan_rl_ft.weights.tensor_files import ITEM_BYTES, MAX_HEADER_BYTES, TensorSpan

WEIGHTS_FILE = "model.safetensors"

METADATA = "__metadata__"  # safetensors' own key


class ImageInvalid(Exception):
    """Not the layout of a canonical image."""


class Image:
    """`header` is how the file begins: 8 bytes of length (little-endian), then JSON, padded with
    blanks to a multiple of 8. `tensors` is in the order of the file, with offsets in the file;
    `nbytes` is the size of the file."""

    def __init__(self, specs: Mapping[str, tuple[str, Sequence[int]]]) -> None:
        """`specs`: {name: (dtype as safetensors names it, shape)}. Raises ImageInvalid."""
        fields: dict[str, Any] = {METADATA: {"format": "pt"}}
        sizes: dict[str, tuple[int, int]] = {}
        end = 0
        for name in sorted(specs):
            dtype, shape = specs[name]
            start, end = end, end + _nbytes(name, dtype, shape)
            sizes[name] = start, end
            fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(fields, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text
        self.nbytes = len(self.header) + end
        self.tensors: dict[str, TensorSpan] = {
            name: TensorSpan(
                specs[name][0],
                list(specs[name][1]),
                len(self.header) + start,
                len(self.header) + end,
            )
            for name, (start, end) in sizes.items()
        }

    @classmethod
    def from_header(cls, header: bytes) -> Image:
        """The image whose file begins with `header`. Raises ImageInvalid, also for a safetensors
        header that is not the canonical one."""
        if len(header) > MAX_HEADER_BYTES:
            raise ImageInvalid(f"a header of {len(header)} bytes is too long")
        try:
            fields = json.loads(header[8:])
            fields.pop(METADATA, None)
            specs = {
                name: (str(t["dtype"]), [int(s) for s in t["shape"]]) for name, t in fields.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise ImageInvalid(f"not a safetensors header: {type(e).__name__}: {e}") from e
        image = cls(specs)
        if image.header != header:
            raise ImageInvalid("the header is not canonical: sorted by name, without gaps")
        return image

    @cached_property
    def layout_digest(self) -> str:
        """Equal for images of equal names, dtypes and shapes only."""
        return hashlib.sha256(self.header).hexdigest()

    @cached_property
    def boundaries(self) -> list[int]:
        """Where the header and each tensor begin, and the end; ascending, each once."""
        starts = {0, len(self.header), self.nbytes}
        return sorted(starts | {t.start for t in self.tensors.values()})

    def names_in(self, start: int, end: int) -> list[str]:
        """Tensors of which some byte is in [start, end)."""
        first = max(0, bisect_right(self._starts, start) - 1)
        last = bisect_left(self._starts, end)
        return [n for n in self._names[first:last] if self._overlaps(n, start, end)]

    def _overlaps(self, name: str, start: int, end: int) -> bool:
        span = self.tensors[name]
        return max(span.start, start) < min(span.end, end)

    @cached_property
    def _names(self) -> list[str]:
        return list(self.tensors)

    @cached_property
    def _starts(self) -> list[int]:
        return [t.start for t in self.tensors.values()]


def _nbytes(name: str, dtype: str, shape: Sequence[int]) -> int:
    """Raises ImageInvalid."""
    if name == METADATA:
        raise ImageInvalid(f"no tensor may be named {name}")
    if dtype not in ITEM_BYTES:
        raise ImageInvalid(f"tensor {name}: unknown dtype {dtype!r}")
    if any(size < 0 for size in shape):
        raise ImageInvalid(f"tensor {name}: shape {list(shape)}")
    return math.prod(shape) * ITEM_BYTES[dtype]
