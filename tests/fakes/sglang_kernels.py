"""SGLang's own Triton kernels, run on the CPU by Triton's interpreter.

Reads {"tensors": {name: bytes as hex}, "seeds": [..], "positions": [..], "columns": n} from
stdin; prints {"tensors": {name: hash}, "words": [[..]]}.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
import triton  # noqa: E402


def kernel_module(path: str):
    """One file of sglang/kernels/ops: importing the package would import everything."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    file = root / "kernels" / "ops" / path
    found = importlib.util.spec_from_file_location(file.stem, file)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def hashed(module, raw: bytes) -> str:
    """`gpu_tensor_hash` without its demand for CUDA."""
    data = raw + b"\0" * (-len(raw) % 4)
    words = torch.frombuffer(bytearray(data), dtype=torch.int32).view(torch.uint32)
    seed, n, tile, chunk = 0x243F6A88, words.numel(), 8192, 1024
    partials = torch.empty(triton.cdiv(n, tile), dtype=torch.uint64)
    module.hash_tiles32_kernel_blocked[(partials.numel(),)](
        words,
        partials,
        n,
        seed1=seed & 0xFFFFFFFF,
        seed2=((seed * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF,
        FM_C1=module.FMIX32_C1,
        FM_C2=module.FMIX32_C2,
        POS_A=module.POS_C1,
        POS_B=module.POS_C2,
        TILE=tile,
        BLOCK=256,
        USE_CG=False,
    )
    total = torch.empty(1, dtype=torch.uint64)
    assert partials.numel() <= chunk
    module.add_tree_reduce_u64_kernel[(1,)](partials, total, partials.numel(), CHUNK=chunk)
    return f"{module._final_splitmix64(int(total.item())):016x}"


def seed_words(module, seeds: list[int], positions: list[int], columns: int) -> list[list[int]]:
    """`murmur_hash32`: a 32-bit word for each (row, column)."""
    n, block = len(seeds), 1024
    words = torch.empty((n, columns), dtype=torch.uint32)
    module.murmur_hash32_kernel[(n, triton.cdiv(columns, block))](
        torch.tensor(seeds, dtype=torch.uint64),
        torch.tensor(positions),
        torch.arange(columns),
        words,
        n,
        columns,
        BLOCK_SIZE=block,
    )
    return words.to(torch.int64).tolist()


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    hashing = kernel_module("memory/gpu_tensor_hash.py")
    seeding = kernel_module("sampling/murmur_hash.py")
    tensors = {n: hashed(hashing, bytes.fromhex(raw)) for n, raw in asked["tensors"].items()}
    words = seed_words(seeding, asked["seeds"], asked["positions"], asked["columns"])
    print(json.dumps({"tensors": tensors, "words": words}))
