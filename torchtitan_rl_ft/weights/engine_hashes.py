"""The checksums that SGLang 0.5.23 gives to its parameters, computed from raw bytes.

Two functions, by where the engine holds its weights (sglang/srt/managers/mm_utils.py:
tensor_hash): on a CPU the first 8 bytes of sha256; on a GPU a hash of 32-bit words
(sglang/kernels/ops/memory/gpu_tensor_hash.py), here in numpy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

EngineHash = Callable[[Iterable[Any]], str]
"""Chunks of raw bytes, in order -> 16 hexadecimal digits."""

_U32 = np.uint32
_SEED_1 = 0x243F6A88
_SEED_2 = ((_SEED_1 * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF
_TILE_WORDS = 8192
_MASK_64 = (1 << 64) - 1


def cpu_hash(chunks: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()[:16]


def gpu_hash(chunks: Iterable[Any]) -> str:
    """Per tile of 8192 words: two sums of mixed words; the tiles' 64-bit values are added."""
    words = _words(chunks)
    if not len(words):
        return f"{0:016x}"
    total = 0
    for start in range(0, len(words), _TILE_WORDS):
        total += _tile(words[start : start + _TILE_WORDS], start, len(words))
    return f"{_splitmix64(total & _MASK_64):016x}"


def _words(chunks: Iterable[Any]) -> np.ndarray:
    """The bytes as 32-bit words, the last one filled with zeros."""
    data = b"".join(bytes(c) for c in chunks)
    return np.frombuffer(data + b"\0" * (-len(data) % 4), dtype=_U32)


def _tile(words: np.ndarray, start: int, n_words: int) -> int:
    index = np.arange(start, start + len(words), dtype=np.int64).astype(_U32)
    n_bytes = (n_words * 4) & 0xFFFFFFFF
    halves = []
    for factor, seed, turn in ((0x27D4EB2D, _SEED_1, 15), (0x165667B1, _SEED_2, 13)):
        place = (index * _U32(factor) + _U32(seed)) ^ _rotated(index, turn)
        added = int(_mixed(words ^ place).sum(dtype=np.uint64)) & 0xFFFFFFFF
        halves.append(int(_mixed(np.array([added ^ n_bytes], dtype=_U32))[0]))
    return (halves[0] << 32) | halves[1]


def _rotated(x: np.ndarray, by: int) -> np.ndarray:
    return (x << _U32(by)) | (x >> _U32(32 - by))


def _mixed(x: np.ndarray) -> np.ndarray:
    """MurmurHash3's 32-bit finaliser."""
    x = (x ^ (x >> _U32(16))) * _U32(0x85EBCA6B)
    x = (x ^ (x >> _U32(13))) * _U32(0xC2B2AE35)
    return x ^ (x >> _U32(16))


def _splitmix64(x: int) -> int:
    x ^= x >> 30
    x = (x * 0xBF58476D1CE4E5B9) & _MASK_64
    x ^= x >> 27
    x = (x * 0x94D049BB133111EB) & _MASK_64
    return x ^ (x >> 31)
