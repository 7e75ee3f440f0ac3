"""What SGLang 0.5.23 needs to serve on a machine without an accelerator.

    python -m torchtitan_rl_ft.platform.sglang_cpu <arguments of sglang.launch_server>

* The `sgl_kernel` on PyPI is built for CUDA and fails to load without it. The CPU path calls
  nothing in it but one op, which is defined below.
* SGLang spawns its scheduler and detokenizer, and each imports everything again: 19 of the 28 CPU
  seconds that one engine takes to start. Without CUDA there is no reason not to fork, so the
  server process imports once and its children are forked from it.
* SGLang leaves a file in /dev/shm when it is killed; it goes into the engine's TMPDIR instead,
  which its owner removes.
* `--enable-deterministic-inference` is what makes SGLang honour a request's `sampling_seed`. It
  is refused for the CPU's attention backend and installs Triton kernels; both are CUDA matters.

Importing this module changes nothing and needs no torch; `main` does the work.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
import tempfile
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",  # 7 times faster than the default with two engines on two cores
    # Seeded sampling is wrapped in torch.compile; without a C++ compiler that ends the scheduler.
    "TORCHDYNAMO_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",  # the library warns after a fork otherwise
}

ARGUMENTS = (
    "--device=cpu",
    "--dtype=float32",
    "--attention-backend=torch_native",
    "--disable-overlap-schedule",
    "--mem-fraction-static=0.1",
    "--max-total-tokens=8192",
    "--enable-deterministic-inference",
    "--skip-server-warmup",
    # An idle scheduler polls its sockets in a busy loop: two take most of a core from the trainers.
    "--sleep-on-idle",
)

MODEL_MODULES = "sglang/srt/models"

_libraries: list[Any] = []
"""Op libraries that were defined; a definition goes when its object does."""


def main(argv: Sequence[str]) -> None:
    """Run one SGLang server until it is stopped."""
    _load_only_needed_model(argv)
    _stub_kernel_loader()
    _fork_children()
    _define_seed_hash()
    _allow_deterministic_sampling()
    _keep_out_of_shared_memory()
    # Everything that the children need, before they are forked.
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    # SGLang collects garbage at every flush of its cache on a CPU: half a second of each install
    # when what was imported is looked through.
    gc.freeze()
    try:
        run_server(prepare_server_args(list(argv)))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _stub_kernel_loader() -> None:
    """Stand in for the module of `sgl_kernel` that loads its CUDA library."""
    loader: Any = types.ModuleType("sgl_kernel.load_utils")
    loader._load_architecture_specific_ops = lambda: None
    loader._preload_cuda_library = lambda: None
    sys.modules["sgl_kernel.load_utils"] = loader


def _fork_children() -> None:
    """Turn SGLang's `set_start_method("spawn", force=True)` into fork."""
    choose = multiprocessing.set_start_method

    def fork(method: str | None, force: bool = False) -> None:
        choose("fork", force=True)

    multiprocessing.set_start_method = fork  # type: ignore[assignment]


def _keep_out_of_shared_memory() -> None:
    """Put the scheduler's load figures, a mapped file, into TMPDIR."""
    import sglang.srt.managers.load_snapshot as load_snapshot

    path_for = load_snapshot.shm_path_for

    def in_scratch(ipc_name: str) -> str:
        return path_for(ipc_name).replace("/dev/shm", tempfile.gettempdir())

    load_snapshot.shm_path_for = in_scratch


def _load_only_needed_model(argv: Sequence[str]) -> None:
    """Skip the import of model families that the served one does not use (5 s of 13)."""
    if "SGLANG_DISABLED_MODEL_ARCHS" in os.environ:
        return
    architectures = _architectures(argv)
    folder = next(
        (Path(p) / MODEL_MODULES for p in sys.path if (Path(p) / MODEL_MODULES).is_dir()), None
    )
    if not architectures or folder is None:
        return
    modules = {f.stem: f for f in folder.glob("*.py")}
    needed = {
        name
        for name, file in modules.items()
        if any(f"class {a}(" in file.read_text(errors="replace") for a in architectures)
    }
    if needed:  # else: an unknown family, SGLang decides
        os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(sorted(set(modules) - needed))


def _architectures(argv: Sequence[str]) -> list[str]:
    """`architectures` of the model that `argv` names; empty when they cannot be told here."""
    words = [w for a in argv for w in a.split("=", 1)]
    for option in ("--model-path", "--model"):
        if option in words[:-1]:
            config = Path(words[words.index(option) + 1]) / "config.json"
            try:
                return list(json.loads(config.read_bytes()).get("architectures") or [])
            except (OSError, ValueError):
                return []
    return []


# Seeded sampling ------------------------------------------------------------------------------


def _allow_deterministic_sampling() -> None:
    """Accept the CPU's attention backend; leave out kernels that exist for CUDA only.

    Per-request seeds then work. Results do not depend on the batch as far as the CPU's matrix
    product does not: a token can differ where two candidates are equal to rounding.
    """
    import sglang.srt.batch_invariant_ops as batch_invariant_ops
    from sglang.srt.arg_groups import choices

    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    batch_invariant_ops.enable_batch_invariant_mode = lambda *args, **kwargs: None


def _define_seed_hash() -> None:
    """Define `sgl_kernel::murmur_hash32_cpu`, which the CPU build of sgl_kernel has."""
    import torch

    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")

    def hashed(seed: Any, positions: Any, columns: Any) -> Any:
        import numpy as np

        words = seed_hash(seed.numpy().astype(np.uint64), positions.numpy(), columns.numpy())
        return torch.from_numpy(words)

    library.impl("murmur_hash32_cpu", hashed, "CPU")
    _libraries.append(library)


def seed_hash(seed: Any, positions: Any, columns: Any) -> Any:
    """MurmurHash3 (x86, 32 bit, seed 0) of the blocks (seed low, seed high, position, column).

    `seed` [n] uint64, `positions` [n], `columns` [m]; returns [n, m] uint32. The same function as
    SGLang's Triton kernel (kernels/ops/sampling/murmur_hash.py), so a seed draws the same tokens
    on both. Source: A. Appleby, MurmurHash3.cpp, public domain.
    """
    import numpy as np

    u32 = np.uint32

    def rotated(x: Any, by: int) -> Any:
        return (x << u32(by)) | (x >> u32(32 - by))

    def mixed(h: Any, k: Any) -> Any:
        k = rotated(k * u32(0xCC9E2D51), 15) * u32(0x1B873593)
        return rotated(h ^ k, 13) * u32(5) + u32(0xE6546B64)

    h = np.zeros(len(seed), u32)
    h = mixed(h, (seed & np.uint64(0xFFFFFFFF)).astype(u32))
    h = mixed(h, (seed >> np.uint64(32)).astype(u32))
    h = mixed(h, positions.astype(u32))
    h = mixed(h[:, None], columns.astype(u32)[None, :])
    h ^= u32(16)  # length in bytes
    h = (h ^ (h >> u32(16))) * u32(0x85EBCA6B)
    h = (h ^ (h >> u32(13))) * u32(0xC2B2AE35)
    return h ^ (h >> u32(16))


if __name__ == "__main__":
    main(sys.argv[1:])
elif __name__ == "__mp_main__":  # a child that was spawned after all
    _stub_kernel_loader()
